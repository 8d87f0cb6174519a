//! Connections on which an administrator passes a file with a request.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use ipc::seqpacket::receive_with_fds;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

/// The last file that a client has passed on a connection, until a request takes it.
#[derive(Clone, Debug, Default)]
pub struct PassedFile(Arc<Mutex<Option<OwnedFd>>>);

impl PassedFile {
    /// Takes the file.
    pub fn take(&self) -> Option<File> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().map(File::from)
    }

    fn put(&self, files: Vec<OwnedFd>) {
        for file in files {
            let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(before) = last.replace(file) {
                foreign_fds::close(before);
            }
        }
    }
}

/// Connection that receives files, if its client is an administrator. The kernel discards those of
/// others: closing a file can wait for its file system.
#[derive(Debug)]
pub struct FileReceiver {
    stream: UnixStream,
    file: Option<PassedFile>,
}

impl FileReceiver {
    /// Wraps a connection. Returns what a request takes a file from, too.
    pub fn new(stream: UnixStream, is_admin: bool) -> (Self, PassedFile) {
        if !is_admin {
            foreign_fds::refuse(stream.as_fd());
        }
        let file = PassedFile::default();
        (Self { stream, file: is_admin.then(|| file.clone()) }, file)
    }
}

impl Drop for FileReceiver {
    fn drop(&mut self) {
        if let Some(file) = self.file.as_ref().and_then(PassedFile::take) {
            foreign_fds::close(file.into());
        }
    }
}

impl AsyncRead for FileReceiver {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { stream, file } = &mut *self;
        let Some(file) = file else { return Pin::new(stream).poll_read(context, buffer) };
        loop {
            ready!(stream.poll_read_ready(context))?;
            let free = buffer.initialize_unfilled();
            let received =
                stream.try_io(Interest::READABLE, || receive_with_fds(stream.as_fd(), free));
            match received {
                Ok((len, files)) => {
                    buffer.advance(len);
                    file.put(files);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
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
    use std::io::{IoSlice, Read, Seek, Write};
    use std::os::fd::AsRawFd;

    use nix::errno::Errno;
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    use tokio::io::AsyncReadExt;

    use super::*;

    fn received(is_admin: bool) -> Option<String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (near, far) = UnixStream::pair().unwrap();
            let (mut far, passed) = FileReceiver::new(far, is_admin);
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
            let mut file = passed.take()?;
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
}
