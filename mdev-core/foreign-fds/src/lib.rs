//! File descriptors that other processes pass.
//!
//! A descriptor can belong to a file system in user space (FUSE), whose server belongs to an
//! attacker and never answers. Almost every system call on such a file waits for the server, in a
//! state that not even SIGKILL ends: `fstat`, `poll`, `read`, a load from mapped memory, and
//! `close`. A process that takes descriptors from others therefore
//!
//! * takes none where none is due: the kernel discards them without asking their file system
//! * uses memory files ([`is_memory`]) and eventfds ([`is_eventfd`]) only
//! * closes all others, except for sockets, on a thread of their own ([`close`])
//!
//! The owner of an eventfd can make writes to it block: see [`eventfd`]. [`receive()`] is the
//! system call that receives descriptors.

pub mod eventfd;
mod receive;

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

pub use eventfd::is_eventfd;
pub use receive::{MAX_RECEIVED, Received, receive};

/// Maximum number of descriptors that are being closed.
pub const MAX_CLOSING: usize = 16;

/// Number of descriptors that are being closed.
static CLOSING: AtomicUsize = AtomicUsize::new(0);

/// Returns true if a descriptor is a memory file: a memfd, or a file of tmpfs or hugetlbfs. Asks no
/// file system: only the kernel's own memory files have seals.
pub fn is_memory(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: F_GET_SEALS takes no argument and changes nothing.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) >= 0 }
}

/// Returns true if a descriptor is a socket. Asks no file system. What a socket has queued is
/// released without waiting: only `close` itself asks a file system to write back.
fn is_socket(fd: BorrowedFd<'_>) -> bool {
    let mut kind: libc::c_int = 0;
    let mut len = size_of_val(&kind) as libc::socklen_t;
    // SAFETY: both pointers are to variables of the given length.
    let result = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_TYPE,
            (&raw mut kind).cast(),
            &raw mut len,
        )
    };
    result == 0
}

/// Closes a descriptor of another process without waiting for its file system.
///
/// Beyond [`MAX_CLOSING`] files that cannot be closed, the descriptor stays open: see
/// [`is_exhausted`].
pub fn close(fd: OwnedFd) {
    if is_memory(fd.as_fd()) || is_eventfd(fd.as_fd()) || is_socket(fd.as_fd()) {
        return drop(fd);
    }
    let fd = ManuallyDrop::new(fd);
    if CLOSING.fetch_add(1, Ordering::AcqRel) >= MAX_CLOSING {
        return;
    }
    let closing = move || {
        drop(ManuallyDrop::into_inner(fd));
        CLOSING.fetch_sub(1, Ordering::AcqRel);
    };
    // Without a thread the descriptor stays open, and counts.
    let _ = thread::Builder::new().name("close".into()).stack_size(64 << 10).spawn(closing);
}

/// Returns true if so many descriptors cannot be closed that no more should be taken from the
/// process that passed them. Stays true once a descriptor had to be left open.
pub fn is_exhausted() -> bool {
    CLOSING.load(Ordering::Acquire) >= MAX_CLOSING
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn descriptors_of_any_kind_are_closed() {
        let (reader, writer) = std::io::pipe().unwrap();
        close(OwnedFd::from(writer));
        let mut byte = [0];
        assert_eq!(std::io::Read::read(&mut &reader, &mut byte).unwrap(), 0, "no writer is left");
        assert!(!is_memory(reader.as_fd()) && !is_exhausted());
    }

    /// A busy machine does not get round to that many threads.
    #[test]
    fn any_number_of_sockets_is_closed_at_once() {
        let pairs = (0..100 * MAX_CLOSING).map(|_| UnixStream::pair().unwrap());
        for (mut ours, theirs) in pairs {
            close(OwnedFd::from(theirs));
            ours.set_nonblocking(true).unwrap();
            assert_eq!(std::io::Read::read(&mut ours, &mut [0]).unwrap(), 0, "it is still open");
        }
        assert!(!is_exhausted());
    }
}
