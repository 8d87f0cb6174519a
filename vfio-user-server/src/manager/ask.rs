//! Questions to a worker. Each waits for at most [`PATIENCE`], so these run on threads that may wait, never on the
//! manager's own.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use mdev_core::device::Scanout;
use vendor_backends::seqpacket::{MAX_PACKET, SeqPacket};

use crate::private::{OLDEST, VERSION, WorkerReply, WorkerRequest, WorkerStatus};

/// How long a worker may take to answer. It answers between two requests of its VM, which take microseconds.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// How a worker is. One of a release that is not understood says so, or hangs up, or says what makes no sense here: that
/// is an error of kind `Unsupported`.
pub fn status(control: &Path) -> io::Result<WorkerStatus> {
    let foreign = |what: &str| {
        let known = format!("this vgpud speaks {OLDEST} to {VERSION}");
        io::Error::new(io::ErrorKind::Unsupported, format!("The worker {what}; {known}"))
    };
    let reply = match ask(control, &WorkerRequest::Status { version: OLDEST }) {
        Ok((reply, _)) => reply,
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(foreign("does not speak our version of the private protocol"));
        }
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return Err(foreign("says what makes no sense"));
        }
        Err(error) => return Err(error),
    };
    match reply {
        WorkerReply::Status(status) if status.is_understood() => Ok(*status),
        WorkerReply::Status(status) => {
            Err(foreign(&format!("speaks version {} of the private protocol", status.version)))
        }
        other => Err(unexpected(&other)),
    }
}

/// What is on a worker's screen, and the video memory that it is in.
pub fn scanout(control: &Path) -> io::Result<(Scanout, Option<OwnedFd>)> {
    match ask(control, &WorkerRequest::Scanout)? {
        (WorkerReply::Scanout(scanout), fds) => Ok((scanout, fds.into_iter().next())),
        (other, _) => Err(unexpected(&other)),
    }
}

/// Tells a worker to end.
pub fn stop(control: &Path) -> io::Result<()> {
    match ask(control, &WorkerRequest::Stop)?.0 {
        WorkerReply::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

/// Gives a worker a new connection to its GPU.
pub fn attach(control: &Path, gpu: BorrowedFd<'_>) -> io::Result<()> {
    match ask_with(control, &WorkerRequest::Attach, &[gpu])?.0 {
        WorkerReply::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

fn ask(control: &Path, request: &WorkerRequest) -> io::Result<(WorkerReply, Vec<OwnedFd>)> {
    ask_with(control, request, &[])
}

fn ask_with(
    control: &Path,
    request: &WorkerRequest,
    fds: &[BorrowedFd<'_>],
) -> io::Result<(WorkerReply, Vec<OwnedFd>)> {
    let socket = SeqPacket::connect_with_timeout(control, PATIENCE)?;
    socket.send(&serde_json::to_vec(request)?, fds)?;
    let mut buffer = vec![0; MAX_PACKET];
    let packet = socket.recv(&mut buffer).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, "The worker does not answer")
        }
        _ => error,
    })?;
    let packet = packet.ok_or_else(|| {
        io::Error::new(io::ErrorKind::UnexpectedEof, "The worker closed the connection")
    })?;
    let reply = serde_json::from_slice(&buffer[..packet.len])
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok((reply, packet.fds))
}

fn unexpected(reply: &WorkerReply) -> io::Error {
    match reply {
        WorkerReply::Error { message } => io::Error::other(message.clone()),
        other => io::Error::other(format!("The worker's answer was unexpected: {other:?}")),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use vendor_backends::seqpacket::SeqPacketListener;

    use super::*;
    use crate::private::tests::three;

    /// What comes of asking a worker that answers that to whatever it is asked.
    pub fn answered<T>(
        reply: &WorkerReply,
        fds: &[BorrowedFd<'_>],
        ask: impl FnOnce(&Path) -> T,
    ) -> T {
        said(&serde_json::to_vec(reply).unwrap(), fds, ask)
    }

    /// The same with whatever it says.
    fn said<T>(reply: &[u8], fds: &[BorrowedFd<'_>], ask: impl FnOnce(&Path) -> T) -> T {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let listener = SeqPacketListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let socket = listener.accept().unwrap();
                socket.recv(&mut vec![0; MAX_PACKET]).unwrap();
                socket.send(reply, fds).unwrap();
            });
            ask(&path)
        })
    }

    #[test]
    fn a_worker_of_another_release_is_told_from_one_of_ours() {
        let newer = WorkerStatus { version: VERSION + 1, ..three() };
        let newer = WorkerReply::Status(Box::new(newer));
        let error = answered(&newer, &[], status).unwrap_err().to_string();
        assert!(error.starts_with("The worker speaks version "), "{error}");
        for (said, why) in [
            (said(b"", &[], status), "does not speak our version of the private protocol"),
            (said(b"{}", &[], status), "says what makes no sense"),
        ] {
            let error = said.unwrap_err().to_string();
            assert!(error.starts_with(&format!("The worker {why}; this vgpud speaks ")), "{error}");
        }
        for done in [
            answered(&WorkerReply::Done, &[], |path| status(path).map(drop)),
            answered(&WorkerReply::Done, &[], |path| scanout(path).map(drop)),
            answered(&WorkerReply::Scanout(Scanout::default()), &[], stop),
        ] {
            let error = done.unwrap_err().to_string();
            assert!(error.starts_with("The worker's answer was unexpected"), "{error}");
        }
    }
}
