//! Answers to the manager.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use vendor_backends::seqpacket::{MAX_PACKET, SeqPacket};

use crate::private::{OLDEST, VERSION, WorkerReply, WorkerRequest};

/// One connection to the worker's control socket.
#[derive(Debug)]
pub struct ControlConnection(SeqPacket);

impl ControlConnection {
    /// Serves a connection that was accepted.
    pub fn new(socket: SeqPacket) -> Self {
        Self(socket)
    }

    /// Takes the next request, with what came along; `Ok(None)` where the peer has closed.
    pub fn receive(&self) -> io::Result<Option<(WorkerRequest, Option<OwnedFd>)>> {
        let mut buffer = vec![0; MAX_PACKET];
        let Some(packet) = self.0.try_recv(&mut buffer)? else { return Ok(None) };
        match serde_json::from_slice(&buffer[..packet.len])? {
            // A manager that is newer asks for the oldest that it understands, which may be newer than this worker.
            WorkerRequest::Status { version } if !(OLDEST..=VERSION).contains(&version) => {
                let reason = format!(
                    "version {version} was asked for, this worker has {OLDEST} to {VERSION}"
                );
                Err(io::Error::new(io::ErrorKind::InvalidData, reason))
            }
            request => Ok(Some((request, packet.fds.into_iter().next()))),
        }
    }

    /// Answers it. A manager that does not read its answers loses the connection; the worker never waits for it.
    pub fn reply(&self, reply: &WorkerReply, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let json = serde_json::to_vec(reply)?;
        self.0.try_send(&json, fd.as_slice())
    }
}

impl AsFd for ControlConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
