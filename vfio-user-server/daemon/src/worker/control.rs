//! Connections to the worker's control socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use foreign_fds::ForeignFd;
use ipc::seqpacket::{MAX_PACKET, SeqPacket};

use crate::worker_protocol::{OLDEST, VERSION, WorkerReply, WorkerRequest};

/// Connection to the worker's control socket.
#[derive(Debug)]
pub struct ControlConnection(SeqPacket);

impl ControlConnection {
    /// Wraps an accepted connection.
    pub fn new(socket: SeqPacket) -> Self {
        Self(socket)
    }

    /// Receives the next request and its descriptor. Returns `Ok(None)` if the peer has closed the
    /// connection.
    pub fn receive(&self) -> io::Result<Option<(WorkerRequest, Option<OwnedFd>)>> {
        let mut buffer = vec![0; MAX_PACKET];
        let Some(packet) = self.0.try_recv_with_fds(&mut buffer)? else { return Ok(None) };
        match serde_json::from_slice(&buffer[..packet.len])? {
            // A newer manager requests the oldest version that it supports, which may be newer than
            // this worker.
            WorkerRequest::Status { version } if !(OLDEST..=VERSION).contains(&version) => {
                let reason = format!(
                    "version {version} was requested, this worker speaks {OLDEST} to {VERSION}"
                );
                Err(io::Error::new(io::ErrorKind::InvalidData, reason))
            }
            // The manager is trusted.
            request => {
                let fd = packet.fds.into_iter().next().map(ForeignFd::into_trusted);
                Ok(Some((request, fd)))
            }
        }
    }

    /// Sends a reply without waiting. A full socket is an error, on which the worker closes the
    /// connection.
    pub fn reply(&self, reply: &WorkerReply, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let json = serde_json::to_vec(reply)?;
        self.0.try_send(&json, fds)
    }
}

impl AsFd for ControlConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
