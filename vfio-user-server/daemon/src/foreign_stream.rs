//! Connections of the I/O runtime that less trusted processes write to.
//!
//! The runtime has one thread, which must never wait for a descriptor to be closed.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use foreign_fds::ForeignFd;
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

    /// Sends bytes without waiting. Returns how many were sent.
    ///
    /// # Errors
    ///
    /// Fails as send(2) does.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.as_ref().ok_or_else(gone)?.try_write(bytes)
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
            let _ = stream.shutdown(Shutdown::Both);
            foreign_fds::close(OwnedFd::from(stream));
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{IoSlice, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc;
    use std::time::Duration;

    use nix::sys::socket::{
        ControlMessage, MsgFlags, getsockopt, sendmsg, setsockopt, sockopt::Linger,
    };
    use tokio::io::AsyncReadExt;

    use super::*;

    /// Returns a socket whose close waits as long as its peer does not read.
    pub fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        let linger = libc::linger { l_onoff: 1, l_linger: 3600 };
        setsockopt(&socket, Linger, &linger).unwrap();
        assert_eq!(getsockopt(&socket, Linger).unwrap().l_linger, 3600);
        socket.set_nonblocking(true).unwrap();
        while (&socket).write(&[0; 1 << 12]).is_ok() {}
        (socket, peer)
    }

    /// Sends bytes with a descriptor, of which no copy stays here.
    pub fn try_pass(socket: &impl AsFd, bytes: &[u8], fd: TcpStream) -> nix::Result<()> {
        let raw = [fd.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&raw)];
        let (socket, flags) = (socket.as_fd().as_raw_fd(), MsgFlags::MSG_NOSIGNAL);
        let sent = sendmsg::<()>(socket, &[IoSlice::new(bytes)], &rights, flags, None);
        // It is the last one if the receiver was quicker, or the kernel has refused it.
        std::thread::spawn(|| drop(fd));
        sent.map(drop)
    }

    /// Runs a future on a runtime of one thread, and fails if the thread waits.
    pub fn without_waiting<T: Send + 'static>(
        body: impl FnOnce(&tokio::runtime::Runtime) -> T + Send + 'static,
    ) -> T {
        let (done, is_done) = mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            done.send(body(&runtime.unwrap()))
        });
        is_done.recv_timeout(Duration::from_secs(30)).expect("the runtime's thread waits")
    }

    #[test]
    fn neither_a_read_nor_the_end_of_a_connection_waits_for_descriptors() {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut peers = Vec::new();
        for byte in [b"a", b"b"] {
            let (socket, peer) = lingering();
            try_pass(&near, byte, socket).unwrap();
            peers.push(peer);
        }
        far.set_nonblocking(true).unwrap();
        without_waiting(move |runtime| {
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
