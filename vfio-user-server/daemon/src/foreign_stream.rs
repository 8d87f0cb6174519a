//! Connections of the I/O runtime that less trusted processes write to.
//!
//! A runtime has one thread, which must never wait for a descriptor to be closed.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use foreign_fds::{ForeignFd, ForeignSocket};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;
use tokio::net::unix::UCred;

/// UNIX stream socket whose peer may be hostile. Reads close descriptors that are not due, and the
/// end of the connection closes the socket with what is in it, without waiting
/// ([`foreign_fds::close`]).
#[derive(Debug)]
pub struct ForeignStream {
    /// Present until the stream is dropped.
    stream: Option<UnixStream>,
}

impl From<UnixStream> for ForeignStream {
    fn from(stream: UnixStream) -> Self {
        Self { stream: Some(stream) }
    }
}

fn gone() -> io::Error {
    io::ErrorKind::NotConnected.into()
}

impl ForeignStream {
    /// Connects to a listener, which cannot send descriptors ([`foreign_fds::refuse`]).
    ///
    /// # Errors
    ///
    /// Fails as connect(2) does, with `WouldBlock` if the listener has no room for a connection.
    pub fn connect_without_fds(path: &Path) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        foreign_fds::refuse(socket.as_fd());
        connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(UnixStream::from_std(socket.into())?.into())
    }

    /// Uses a connection that a listener has accepted.
    ///
    /// # Errors
    ///
    /// Fails if the runtime cannot watch it.
    pub fn accepted(socket: ForeignSocket) -> io::Result<Self> {
        let stream = std::os::unix::net::UnixStream::from(socket.into_fd());
        stream.set_nonblocking(true)?;
        Ok(UnixStream::from_std(stream)?.into())
    }

    /// Returns the peer's credentials.
    ///
    /// # Errors
    ///
    /// Fails if the kernel does not have them.
    pub fn peer_cred(&self) -> io::Result<UCred> {
        self.stream.as_ref().ok_or_else(gone)?.peer_cred()
    }

    /// Returns the descriptor.
    ///
    /// # Errors
    ///
    /// Never fails while the stream is in use.
    pub fn descriptor(&self) -> io::Result<BorrowedFd<'_>> {
        self.stream.as_ref().map(AsFd::as_fd).ok_or_else(gone)
    }

    /// Reads bytes as [`AsyncRead::poll_read`]. `take` gets up to `max_fds` descriptors that came
    /// with them.
    ///
    /// # Errors
    ///
    /// Fails as recvmsg(2) does.
    pub fn poll_read_with_fds(
        &self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
        max_fds: usize,
        mut take: impl FnMut(ForeignFd),
    ) -> Poll<io::Result<()>> {
        let stream = self.stream.as_ref().ok_or_else(gone)?;
        loop {
            ready!(stream.poll_read_ready(context))?;
            let free = buffer.initialize_unfilled();
            let receive = || {
                foreign_fds::receive(stream.as_fd(), free, max_fds, libc::MSG_DONTWAIT, &mut take)
            };
            match stream.try_io(Interest::READABLE, receive) {
                Ok(received) => {
                    buffer.advance(received.bytes);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn pinned(self: Pin<&mut Self>) -> io::Result<Pin<&mut UnixStream>> {
        self.get_mut().stream.as_mut().map(Pin::new).ok_or_else(gone)
    }
}

impl AsyncRead for ForeignStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_read_with_fds(context, buffer, 0, drop)
    }
}

impl AsyncWrite for ForeignStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.pinned()?.poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.pinned()?.poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.pinned()?.poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.pinned()?.poll_shutdown(context)
    }
}

impl Drop for ForeignStream {
    fn drop(&mut self) {
        // An error leaves no socket: the runtime has closed it.
        if let Some(Ok(stream)) = self.stream.take().map(UnixStream::into_std) {
            // The peer learns of the end although the descriptor may be closed later.
            ForeignSocket::from(OwnedFd::from(stream)).end();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use foreign_fds::testing::{lingering, pass, without_waiting};
    use tokio::io::AsyncReadExt;
    use tokio::runtime::{Builder, Runtime};

    use super::*;

    /// Makes a call with a runtime of one thread, and fails if the thread waits.
    pub fn on_a_thread<T: Send + 'static>(body: impl FnOnce(&Runtime) -> T + Send + 'static) -> T {
        without_waiting(move || body(&Builder::new_current_thread().enable_all().build().unwrap()))
    }

    #[test]
    fn neither_a_read_nor_the_end_of_a_connection_waits_for_descriptors() {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut peers = Vec::new();
        for byte in [b"a", b"b"] {
            let (socket, peer) = lingering();
            pass(&near, byte, socket).unwrap();
            peers.push(peer);
        }
        far.set_nonblocking(true).unwrap();
        on_a_thread(move |runtime| {
            runtime.block_on(async {
                let mut stream = ForeignStream::from(UnixStream::from_std(far).unwrap());
                // The second one is in the socket when that is closed.
                assert_eq!(stream.read_u8().await.unwrap(), b'a');
            });
        });
        let end = std::io::Read::read(&mut &near, &mut [0]);
        let is_reset = end.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::ConnectionReset);
        assert!(is_reset || end.is_ok_and(|read| read == 0), "the connection has ended");
        drop(peers);
    }
}
