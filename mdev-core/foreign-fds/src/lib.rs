//! File descriptors that other processes pass.
//!
//! A descriptor can belong to a file system in user space (FUSE), whose server belongs to an
//! attacker and never answers. Almost every system call on such a file waits for the server, in a
//! state that not even SIGKILL ends: `fstat`, `poll`, `read`, a load from mapped memory, and
//! `close`. A socket can wait for its peer in `close` (SO_LINGER), and one with unread messages for
//! the descriptors in them. A process that takes descriptors from others therefore
//!
//! * takes none where none is due: the kernel refuses them ([`refuse`]) or discards them
//! * uses memory files ([`is_memory`]) and eventfds ([`is_eventfd`]) only
//! * closes all others on threads of their own ([`close`])
//!
//! The owner of an eventfd can make writes to it block: see [`eventfd`]. [`receive()`] is the
//! system call that receives descriptors.

mod closer;
pub mod eventfd;
mod receive;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use closer::Closer;

pub use eventfd::is_eventfd;
pub use receive::{MAX_RECEIVED, Received, receive};

/// `SO_PASSRIGHTS` (include/uapi/asm-generic/socket.h).
const SO_PASSRIGHTS: libc::c_int = 83;

/// Closes what may wait.
static CLOSER: Closer = Closer::new();

/// Has the kernel refuse messages with descriptors to a socket of the Unix domain, with `EPERM` for
/// the sender. Where a message with descriptors is queued, the kernel closes them for the receiver,
/// which may wait for what they belong to.
///
/// Before Linux 6.16, there is no such option, and nothing changes.
pub fn refuse(socket: BorrowedFd<'_>) {
    let takes: libc::c_int = 0;
    // SAFETY: the pointer is to a value of the given length.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const takes).cast(),
            size_of_val(&takes) as libc::socklen_t,
        )
    };
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

/// Closes a descriptor of another process without waiting for what it belongs to.
pub fn close(fd: OwnedFd) {
    if is_memory(fd.as_fd()) || is_eventfd(fd.as_fd()) {
        return drop(fd);
    }
    CLOSER.close(fd);
}

/// A descriptor that another process passed. Closed as by [`close`].
#[derive(Debug)]
pub struct ForeignFd(Option<OwnedFd>);

impl From<OwnedFd> for ForeignFd {
    fn from(fd: OwnedFd) -> Self {
        Self(Some(fd))
    }
}

impl ForeignFd {
    /// Returns the descriptor if it is a memory file, as [`is_memory`] says.
    pub fn into_memory(mut self) -> Option<OwnedFd> {
        self.0.take_if(|fd| is_memory(fd.as_fd()))
    }

    /// Returns the descriptor if it is a socket of the Unix domain. Calls on such a socket do not
    /// wait, except for its close.
    pub fn as_unix_socket(&self) -> Option<BorrowedFd<'_>> {
        self.0.as_ref().map(AsFd::as_fd).filter(|fd| is_unix_socket(*fd))
    }
}

impl Drop for ForeignFd {
    fn drop(&mut self) {
        if let Some(fd) = self.0.take() {
            close(fd);
        }
    }
}

/// Returns true if so many descriptors cannot be closed that no more should be taken from the
/// process that passed them.
pub fn is_exhausted() -> bool {
    CLOSER.is_exhausted()
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use super::closer::MAX_CLOSING;
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

    /// Returns a socket whose `close` waits: its peer does not read what was sent.
    fn lingering(listener: &TcpListener) -> (OwnedFd, TcpStream) {
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        let linger = libc::linger { l_onoff: 1, l_linger: 3600 };
        // SAFETY: the pointer is to a value of the given length.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const linger).cast(),
                size_of_val(&linger) as libc::socklen_t,
            )
        };
        assert_eq!(set, 0);
        socket.set_nonblocking(true).unwrap();
        while std::io::Write::write(&mut &socket, &[0; 1 << 12]).is_ok() {}
        (OwnedFd::from(socket), peer)
    }

    #[test]
    fn sockets_that_linger_cost_threads_and_give_them_back() {
        static CLOSER: Closer = Closer::new();
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let (mut peers, waiting) = (Vec::new(), 4);
        for _ in 0..MAX_CLOSING + waiting {
            let (socket, peer) = lingering(&listener);
            CLOSER.close(socket);
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
        // A peer that ends lets its socket be closed.
        drop(peers);
        until(false);
        let (ours, theirs) = UnixStream::pair().unwrap();
        CLOSER.close(OwnedFd::from(theirs));
        assert_eq!(std::io::Read::read(&mut &ours, &mut [0]).unwrap(), 0);
    }
}
