//! Connection that passes a file with the first bytes that are sent.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

/// Connection with a file that is not sent yet.
#[derive(Debug)]
pub struct FileSender {
    stream: UnixStream,
    file: Option<File>,
}

impl FileSender {
    /// Wraps a connection on which nothing was sent.
    pub fn new(stream: UnixStream, file: File) -> Self {
        Self { stream, file: Some(file) }
    }
}

impl AsyncRead for FileSender {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for FileSender {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let Self { stream, file } = &mut *self;
        let Some(passed) = file else { return Pin::new(stream).poll_write(context, bytes) };
        loop {
            ready!(stream.poll_write_ready(context))?;
            let fds = [passed.as_raw_fd()];
            let rights = [ControlMessage::ScmRights(&fds)];
            let send = || {
                let (socket, flags) = (stream.as_raw_fd(), MsgFlags::MSG_NOSIGNAL);
                Ok(sendmsg::<()>(socket, &[IoSlice::new(bytes)], &rights, flags, None)?)
            };
            match stream.try_io(Interest::WRITABLE, send) {
                Ok(len) => {
                    *file = None;
                    return Poll::Ready(Ok(len));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
