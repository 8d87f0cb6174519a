//! Sockets that less trusted processes write to.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::sys::socket::{Shutdown, shutdown};

/// Socket of the Unix domain that a less trusted process can write to. Messages that were not
/// received may have descriptors, for whose close the socket's close waits: the socket is closed
/// as by [`close`](crate::close), unless no foreign descriptor can have arrived.
#[derive(Debug)]
pub struct ForeignSocket {
    fd: ManuallyDrop<OwnedFd>,
    /// No message with foreign descriptors can have arrived.
    closes_at_once: bool,
}

impl ForeignSocket {
    /// Wraps a new socket, which has no peer yet, and refuses descriptors
    /// ([`refuse`](crate::refuse)).
    pub fn refusing(fd: OwnedFd) -> Self {
        let closes_at_once = crate::refuse(fd.as_fd());
        Self { fd: ManuallyDrop::new(fd), closes_at_once }
    }

    /// Wraps a socket to whose other end only trusted processes write, which pass on no foreign
    /// descriptors. It is closed at once.
    pub fn trusting(fd: OwnedFd) -> Self {
        Self { fd: ManuallyDrop::new(fd), closes_at_once: true }
    }

    /// Ends the connection: the peer reads what was sent, then the end, and can send no more. The
    /// close of a socket may come later, or never.
    pub fn end(&self) {
        // A socket without a peer has no connection to end.
        let _ = shutdown(self.as_raw_fd(), Shutdown::Both);
    }

    /// Returns the descriptor. Its owner closes it by [`close`](crate::close).
    pub fn into_fd(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used any more, and never dropped.
        unsafe { ManuallyDrop::take(&mut this.fd) }
    }
}

impl From<OwnedFd> for ForeignSocket {
    fn from(fd: OwnedFd) -> Self {
        Self { fd: ManuallyDrop::new(fd), closes_at_once: false }
    }
}

impl AsFd for ForeignSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for ForeignSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for ForeignSocket {
    fn drop(&mut self) {
        // SAFETY: a value is dropped once, and its descriptor is not used afterwards.
        let fd = unsafe { ManuallyDrop::take(&mut self.fd) };
        if self.closes_at_once { drop(fd) } else { crate::close(fd) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_socket_of_trusted_processes_has_ended_when_it_is_dropped() {
        for _ in 0..100 {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.set_nonblocking(true).unwrap();
            drop(ForeignSocket::trusting(ours.into()));
            assert_eq!(theirs.read(&mut [0]).unwrap(), 0, "the end");
        }
    }
}
