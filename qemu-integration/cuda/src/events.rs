//! Events of files of the driver: packets on their sockets, for `poll()`.

use std::os::fd::RawFd;

use nix::errno::Errno;
use nix::libc::{POLLERR, POLLHUP, POLLIN, POLLNVAL, POLLPRI, pollfd};
use nix::sys::socket::{MsgFlags, recv};

use crate::open_files;

/// Events that the driver reports.
const DRIVER: i16 = POLLIN | POLLPRI;

/// Asks for packets where a program asks for events of the driver.
pub fn prepare(fds: &mut [pollfd]) {
    for entry in fds {
        if entry.events & POLLPRI != 0 && open_files::possible(entry.fd) {
            entry.events |= POLLIN;
        }
    }
}

/// Takes the packets of files of the driver that `poll()` has reported, and reports events as the
/// driver does. Returns the number of descriptors with results. `asked` is what the program asked
/// for.
pub fn report(fds: &mut [pollfd], asked: &[pollfd]) -> usize {
    let mut count = 0;
    for (entry, asked) in fds.iter_mut().zip(asked) {
        if entry.revents & POLLIN != 0 && open_files::get(entry.fd).is_some() {
            entry.revents = (entry.revents & !POLLIN) | take(entry.fd, asked.events);
        }
        entry.revents &= asked.events | POLLERR | POLLHUP | POLLNVAL;
        count += usize::from(entry.revents != 0);
    }
    count
}

/// Takes all packets of a file and returns its events.
fn take(fd: RawFd, asked: i16) -> i16 {
    let mut events = 0;
    let mut packet = [0; 64];
    loop {
        match recv(fd, &mut packet, MsgFlags::MSG_DONTWAIT) {
            // The end of the connection: the worker is gone.
            Ok(0) => return events | POLLERR | POLLHUP,
            Ok(_) => events |= asked & DRIVER,
            Err(Errno::EINTR) => {}
            // Another thread has taken the packet.
            Err(_) => return events,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use cuda_socket::{FileId, Node};
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, send, socketpair};

    use super::*;
    use crate::open_files::OpenFile;

    #[test]
    fn a_packet_is_one_event() {
        let (family, flags) = (AddressFamily::Unix, SockFlag::SOCK_CLOEXEC);
        let (ours, theirs) = socketpair(family, SockType::SeqPacket, None, flags).unwrap();
        let fd = ours.as_raw_fd();
        open_files::own();
        assert!(open_files::insert(fd, OpenFile { id: FileId(1), node: Node::Control }));
        let asked = [pollfd { fd, events: POLLPRI, revents: 0 }];
        let mut entries = asked;
        prepare(&mut entries);
        assert_eq!(entries[0].events, POLLIN | POLLPRI);
        for _ in 0..2 {
            send(theirs.as_raw_fd(), b"event", MsgFlags::empty()).unwrap();
        }
        entries[0].revents = POLLIN;
        assert_eq!((report(&mut entries, &asked), entries[0].revents), (1, POLLPRI));
        // Both packets are taken.
        entries[0].revents = POLLIN;
        assert_eq!((report(&mut entries, &asked), entries[0].revents), (0, 0));
        drop(theirs);
        entries[0].revents = POLLIN;
        assert_eq!((report(&mut entries, &asked), entries[0].revents), (1, POLLERR | POLLHUP));
    }
}
