//! Connection that passes a file with the first bytes that are sent.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;
use tokio::time::{Instant, Sleep, sleep};

/// Time for which a manager may refuse the file. It takes files of administrators only, and knows
/// the user when it has accepted the connection.
const REFUSAL_LIMIT: Duration = Duration::from_secs(2);

/// Pause before the file is sent again.
const PAUSE: Duration = Duration::from_millis(1);

/// Connection with a file that is not sent yet.
#[derive(Debug)]
pub struct FileSender {
    stream: UnixStream,
    file: Option<File>,
    /// When the file is given up.
    give_up_at: Instant,
    /// Pause after a refusal.
    pause: Option<Pin<Box<Sleep>>>,
}

impl FileSender {
    /// Wraps a connection on which nothing was sent.
    pub fn new(stream: UnixStream, file: File) -> Self {
        let give_up_at = Instant::now() + REFUSAL_LIMIT;
        Self { stream, file: Some(file), give_up_at, pause: None }
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
        let Self { stream, file, give_up_at, pause } = &mut *self;
        loop {
            let Some(passed) = file else { return Pin::new(stream).poll_write(context, bytes) };
            if let Some(pausing) = pause {
                ready!(pausing.as_mut().poll(context));
                *pause = None;
            }
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
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    if Instant::now() < *give_up_at {
                        *pause = Some(Box::pin(sleep(PAUSE)));
                    } else {
                        // The manager tells why in its answer.
                        *file = None;
                    }
                }
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

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd, RawFd};

    use nix::sys::socket::{ControlMessageOwned, recvmsg};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    use super::*;

    /// Sends a file to a manager that accepts the connection later, and takes files then or not.
    /// Returns whether the file arrived.
    async fn arrives(takes: bool) -> bool {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        foreign_fds::refuse(listener.as_fd());
        let stream = UnixStream::connect(&path).await.unwrap();
        let mut sender = FileSender::new(stream, tempfile::tempfile().unwrap());
        sender.give_up_at = Instant::now() + if takes { REFUSAL_LIMIT * 10 } else { PAUSE };
        let sent = tokio::spawn(async move { sender.write_all(b"POST").await });
        // The sender has tried before the connection is accepted.
        tokio::time::sleep(PAUSE * 5).await;
        let (mut accepted, _) = listener.accept().await.unwrap();
        if takes {
            foreign_fds::take(accepted.as_fd());
        }
        sent.await.unwrap().unwrap();
        accepted.readable().await.unwrap();
        if !takes {
            let mut bytes = [0; 4];
            accepted.read_exact(&mut bytes).await.unwrap();
            return false;
        }
        let mut bytes = [0; 4];
        let mut slices = [io::IoSliceMut::new(&mut bytes)];
        let mut control = nix::cmsg_space!([RawFd; 1]);
        let (socket, flags) = (accepted.as_raw_fd(), MsgFlags::MSG_DONTWAIT);
        let message = recvmsg::<()>(socket, &mut slices, Some(&mut control), flags).unwrap();
        let mut parts = message.cmsgs().unwrap();
        matches!(parts.next(), Some(ControlMessageOwned::ScmRights(_)))
    }

    #[tokio::test]
    async fn a_file_arrives_once_the_manager_takes_it_and_the_request_in_any_case() {
        assert!(arrives(true).await);
        assert!(!arrives(false).await);
    }
}
