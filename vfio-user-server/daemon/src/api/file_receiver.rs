//! Connections on which an administrator passes a file with a request.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use foreign_fds::ForeignFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::foreign_stream::ForeignStream;

/// Limit of files that come with one message. Only the last one counts.
const MAX_FILES: usize = 8;

/// The last file that a client has passed on a connection, until a request takes it.
#[derive(Clone, Debug, Default)]
pub struct PassedFile(Arc<Mutex<Option<ForeignFd>>>);

impl PassedFile {
    /// Takes the file.
    pub fn take(&self) -> Option<ForeignFd> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn put(&self, file: ForeignFd) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(file);
    }
}

/// Connection that receives files, if its client is an administrator. The kernel refuses those of
/// others from the first message on, since the listener does ([`foreign_fds::refuse`]). An earlier
/// kernel passes them, and they are closed.
#[derive(Debug)]
pub struct FileReceiver {
    stream: ForeignStream,
    file: Option<PassedFile>,
}

impl FileReceiver {
    /// Wraps a connection. Returns what a request takes a file from, too.
    pub fn new(stream: ForeignStream, is_admin: bool) -> (Self, PassedFile) {
        if let Ok(socket) = stream.descriptor() {
            if is_admin {
                foreign_fds::take(socket);
            } else {
                foreign_fds::refuse(socket);
            }
        }
        let file = PassedFile::default();
        (Self { stream, file: is_admin.then(|| file.clone()) }, file)
    }
}

impl AsyncRead for FileReceiver {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let max_files = if self.file.is_some() { MAX_FILES } else { 0 };
        let put = |file| {
            if let Some(passed) = &self.file {
                passed.put(file);
            }
        };
        self.stream.poll_read_with_fds(context, buffer, max_files, put)
    }
}

impl AsyncWrite for FileReceiver {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
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
    use std::fs::File;
    use std::io::{IoSlice, Read, Seek, Write};
    use std::os::fd::AsRawFd;

    use nix::errno::Errno;
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    use tokio::io::AsyncReadExt;
    use tokio::net::UnixStream;

    use super::*;

    fn received(is_admin: bool) -> Option<String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (near, far) = UnixStream::pair().unwrap();
            let (mut far, passed) = FileReceiver::new(far.into(), is_admin);
            for text in ["first", "second"] {
                let mut file = tempfile::tempfile().unwrap();
                file.write_all(text.as_bytes()).unwrap();
                let fds = [file.as_raw_fd()];
                let rights = [ControlMessage::ScmRights(&fds)];
                let bytes = [IoSlice::new(b"POST")];
                let send = |rights: &[ControlMessage<'_>]| {
                    sendmsg::<()>(near.as_raw_fd(), &bytes, rights, MsgFlags::empty(), None)
                };
                // From Linux 6.16 on, the kernel refuses files that are not due.
                if let Err(error) = send(&rights) {
                    assert!(!is_admin && error == Errno::EPERM, "{error}");
                    send(&[]).unwrap();
                }
            }
            drop(near);
            let mut bytes = String::new();
            far.read_to_string(&mut bytes).await.unwrap();
            assert_eq!(bytes, "POSTPOST");
            let mut text = String::new();
            let mut file = File::from(passed.take()?.into_trusted());
            assert!(passed.take().is_none(), "taken once");
            file.rewind().unwrap();
            file.read_to_string(&mut text).unwrap();
            Some(text)
        })
    }

    #[test]
    fn an_administrators_last_file_is_received() {
        assert_eq!(received(true).as_deref(), Some("second"));
    }

    #[test]
    fn files_of_others_are_discarded() {
        assert_eq!(received(false), None);
    }

    #[test]
    fn files_that_no_request_takes_do_not_stop_the_runtime() {
        use crate::foreign_stream::tests::on_a_thread;
        use foreign_fds::testing::{lingering, pass};
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        let mut peers = Vec::new();
        // The second one replaces the first one, and the third one is not received.
        for byte in [b"a", b"b", b"c"] {
            let (socket, peer) = lingering();
            pass(&near, byte, socket).unwrap();
            peers.push(peer);
        }
        on_a_thread(move |runtime| {
            runtime.block_on(async {
                let stream = UnixStream::from_std(far).unwrap();
                let (mut stream, _passed) = FileReceiver::new(stream.into(), true);
                assert_eq!(stream.read_u8().await.unwrap(), b'a');
                assert_eq!(stream.read_u8().await.unwrap(), b'b');
            });
        });
        drop(peers);
    }
}
