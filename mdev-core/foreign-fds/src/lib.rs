//! File descriptors that other processes pass.
//!
//! A descriptor can belong to a file system in user space (FUSE), whose server belongs to an
//! attacker and never answers. Almost every system call on such a file waits for the server, in a
//! state that not even SIGKILL ends: `fstat`, `poll`, `read`, a load from mapped memory, and
//! `close`. A socket can wait for its peer in `close` (SO_LINGER), and one with unread messages for
//! the descriptors in them. The kernel closes a descriptor that a receive call has no room for
//! within the call. A process that takes messages from others therefore
//!
//! * takes no descriptors where none is due: the kernel refuses them ([`refuse`], Linux 6.16), and
//!   each receive call of an earlier kernel takes all of them ([`receive()`])
//! * uses memory files ([`is_memory`]) and eventfds ([`is_eventfd`]) only
//! * closes all others on threads of their own ([`ForeignFd`]), and the sockets that others write
//!   to ([`ForeignSocket`])
//!
//! A thread that waits for ever is lost, and another one replaces it, up to a number ([`backlog`],
//! [`is_exhausted`]).
//!
//! The owner of an eventfd can make writes to it block: see [`eventfd`].

mod closer;
pub mod eventfd;
mod receive;
mod socket;
#[cfg(any(test, feature = "test-util"))]
pub mod testing;

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use closer::Closer;

pub use closer::{Backlog, MAX_CLOSING};
pub use eventfd::is_eventfd;
pub use receive::{Received, receive, receive_at};
pub use socket::ForeignSocket;

/// `SO_PASSRIGHTS` (include/uapi/asm-generic/socket.h).
const SO_PASSRIGHTS: libc::c_int = 83;

/// Closes what may wait.
static CLOSER: Closer = Closer::new();

/// Has the kernel refuse messages with descriptors to a socket of the Unix domain, with `EPERM` for
/// the sender. Connections that a listener accepts have its setting, from their first message on.
/// Returns true if the kernel does so.
///
/// Before Linux 6.16, there is no such option, and nothing changes.
pub fn refuse(socket: BorrowedFd<'_>) -> bool {
    set_takes(socket, false)
}

/// Has the kernel take messages with descriptors, on a connection of a listener that refuses them.
pub fn take(socket: BorrowedFd<'_>) {
    set_takes(socket, true);
}

fn set_takes(socket: BorrowedFd<'_>, takes: bool) -> bool {
    let takes = libc::c_int::from(takes);
    // SAFETY: the pointer is to a value of the given length.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const takes).cast(),
            size_of_val(&takes) as libc::socklen_t,
        )
    };
    result == 0
}

/// Returns true if a descriptor is a memory file: a memfd, or a file of tmpfs or hugetlbfs. Asks no
/// file system: only the kernel's own memory files have seals.
pub fn is_memory(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: F_GET_SEALS takes no argument and changes nothing.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) >= 0 }
}

/// Returns true if a descriptor is a socket of the Unix domain. Asks no file system.
fn is_unix_socket(fd: BorrowedFd<'_>) -> bool {
    let mut domain: libc::c_int = 0;
    let mut len = size_of_val(&domain) as libc::socklen_t;
    // SAFETY: both pointers are to variables of the given length.
    let result = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_DOMAIN,
            (&raw mut domain).cast(),
            &raw mut len,
        )
    };
    result == 0 && domain == libc::AF_UNIX
}

/// Returns true if the close of a descriptor never waits. That of an eventfd may: it takes the
/// eventfd out of all epoll sets, and waits for a thread that has locked one of them and copies
/// events to memory of a file that does not answer.
fn closes_at_once(fd: &OwnedFd) -> bool {
    is_memory(fd.as_fd())
}

/// Closes a descriptor of another process without waiting for what it belongs to.
pub fn close(fd: OwnedFd) {
    close_all([ForeignFd::from(fd)]);
}

/// Closes descriptors of one process as [`close`] does, on one thread.
pub fn close_all(fds: impl IntoIterator<Item = ForeignFd>) {
    let fds = fds.into_iter().map(ForeignFd::into_trusted);
    let (_, others): (Vec<_>, Vec<_>) = fds.partition(closes_at_once);
    if !others.is_empty() {
        CLOSER.close(others);
    }
}

/// A descriptor that another process passed. Closed as by [`close`].
#[derive(Debug)]
pub struct ForeignFd(ManuallyDrop<OwnedFd>);

impl From<OwnedFd> for ForeignFd {
    fn from(fd: OwnedFd) -> Self {
        Self(ManuallyDrop::new(fd))
    }
}

impl AsFd for ForeignFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl ForeignFd {
    /// Returns the descriptor if it is a memory file, as [`is_memory`] says.
    pub fn into_memory(self) -> Option<OwnedFd> {
        is_memory(self.as_fd()).then(|| self.into_trusted())
    }

    /// Returns the descriptor if it is an eventfd, as [`is_eventfd`] says.
    pub fn into_eventfd(self) -> Option<Self> {
        is_eventfd(self.as_fd()).then_some(self)
    }

    /// Returns the descriptor if it is a socket of the Unix domain. Calls on such a socket do not
    /// wait, except for its close.
    pub fn as_unix_socket(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd()).filter(|fd| is_unix_socket(*fd))
    }

    /// Returns a descriptor of a process that this process trusts, or one that the caller closes by
    /// [`close`].
    pub fn into_trusted(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used any more, and never dropped.
        unsafe { ManuallyDrop::take(&mut this.0) }
    }
}

impl Drop for ForeignFd {
    fn drop(&mut self) {
        // SAFETY: a value is dropped once, and its descriptor is not used afterwards.
        close(unsafe { ManuallyDrop::take(&mut self.0) });
    }
}

/// Returns true if so many descriptors cannot be closed that no more should be taken from the
/// process that passed them.
pub fn is_exhausted() -> bool {
    CLOSER.is_exhausted()
}

/// Returns how many descriptors of other processes are not closed.
pub fn backlog() -> Backlog {
    CLOSER.backlog()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use super::testing::{held_eventfd, lingering, send, without_waiting};
    use super::*;

    #[test]
    fn descriptors_of_any_kind_are_closed() {
        let (reader, writer) = std::io::pipe().unwrap();
        close(OwnedFd::from(writer));
        let mut byte = [0];
        assert_eq!(std::io::Read::read(&mut &reader, &mut byte).unwrap(), 0, "no writer is left");
        assert!(!is_memory(reader.as_fd()) && !is_exhausted());
    }

    #[test]
    fn any_number_of_sockets_is_closed() {
        let pairs: Vec<_> = (0..20 * MAX_CLOSING).map(|_| UnixStream::pair().unwrap()).collect();
        let (ours, theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        for socket in theirs {
            assert!(is_unix_socket(socket.as_fd()));
            close(OwnedFd::from(socket));
            assert!(!is_exhausted());
        }
        for mut socket in ours {
            assert_eq!(std::io::Read::read(&mut socket, &mut [0]).unwrap(), 0, "it is open");
        }
    }

    #[test]
    fn sockets_that_linger_cost_threads_and_give_them_back() {
        static CLOSER: Closer = Closer::new();
        let (mut peers, waiting) = (Vec::new(), 4);
        for _ in 0..MAX_CLOSING + waiting {
            let (socket, peer) = lingering();
            CLOSER.close(vec![socket.into()]);
            peers.push(peer);
        }
        let until = |exhausted| {
            let started = Instant::now();
            while CLOSER.is_exhausted() != exhausted {
                assert!(started.elapsed() < Duration::from_secs(60), "exhausted: {}", !exhausted);
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        until(true);
        assert_eq!(CLOSER.backlog(), Backlog { lost_threads: MAX_CLOSING, waiting });
        // A peer that ends lets its socket be closed.
        drop(peers);
        until(false);
        assert_eq!(CLOSER.backlog().waiting, 0);
        let (ours, theirs) = UnixStream::pair().unwrap();
        CLOSER.close(vec![OwnedFd::from(theirs)]);
        assert_eq!(std::io::Read::read(&mut &ours, &mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_receive_call_waits_for_no_descriptor_that_is_not_due() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut peers = Vec::new();
        for _ in 0..2 {
            let (socket, peer) = lingering();
            // One is due, and the other one is not.
            let (other, other_peer) = lingering();
            send(&ours, b"x", &[socket.as_fd(), other.as_fd()]).unwrap();
            drop((socket, other));
            peers.extend([peer, other_peer]);
        }
        for max in [0, 1] {
            let theirs = theirs.try_clone().unwrap();
            let flags = without_waiting(move || {
                receive(theirs.as_fd(), &mut [0; 4], max, 0, drop).unwrap().flags
            });
            assert!(flags & libc::MSG_CTRUNC != 0);
        }
        drop(peers);
    }

    #[test]
    fn the_close_of_an_eventfd_does_not_wait_for_epoll_sets() {
        let Some((event, held)) = held_eventfd() else {
            eprintln!("skipped: userfaultfd(2) is not permitted");
            return;
        };
        without_waiting(|| drop(ForeignFd::from(event)));
        drop(held);
    }

    #[test]
    fn the_close_of_a_socket_does_not_wait_for_what_is_in_it() {
        let (socket, peer) = lingering();
        let (ours, theirs) = UnixStream::pair().unwrap();
        send(&ours, b"x", &[socket.as_fd()]).unwrap();
        drop(socket);
        without_waiting(|| drop(ForeignSocket::from(OwnedFd::from(theirs))));
        drop(peer);
    }

    #[test]
    fn connections_of_a_listener_refuse_descriptors_before_they_are_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let listener = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
        if !refuse(listener.as_fd()) {
            return;
        }
        let ours = UnixStream::connect(dir.path().join("socket")).unwrap();
        let try_pass = || send(&ours, b"x", &[ours.as_fd()]).is_ok();
        assert!(!try_pass(), "before the connection is accepted");
        let (theirs, _) = listener.accept().unwrap();
        assert!(!try_pass());
        take(theirs.as_fd());
        assert!(try_pass());
    }
}
