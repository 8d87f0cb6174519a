//! Requesting end of a connection to a GPU process: one reply for each request, with a timeout.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use mdev_core::gpu::GpuError;
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::seqpacket::{self, MAX_PACKET, SeqPacket};

/// Time limit of a reply. A worker must answer QEMU within 5 s.
const REPLY_TIMEOUT: Duration = Duration::from_secs(4);

/// A connection to a GPU process. After an error it stays unusable, because a late reply would
/// answer the wrong request.
#[derive(Debug)]
pub struct Connection {
    socket: SeqPacket,
    buffer: Vec<u8>,
    lost: Option<String>,
    undecodable: bool,
}

impl Connection {
    pub fn new(socket: SeqPacket) -> io::Result<Self> {
        let timeout = TimeVal::seconds(REPLY_TIMEOUT.as_secs().cast_signed());
        setsockopt(&socket, sockopt::ReceiveTimeout, &timeout)?;
        setsockopt(&socket, sockopt::SendTimeout, &timeout)?;
        Ok(Self { socket, buffer: vec![0; MAX_PACKET], lost: None, undecodable: false })
    }

    /// Sends a request. Returns the reply and its file descriptors.
    pub fn request<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        request: &Q,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(A, Vec<OwnedFd>), GpuError> {
        if let Some(reason) = &self.lost {
            return Err(GpuError::Lost(reason.clone()));
        }
        self.exchange(request, fds).map_err(|error| {
            self.undecodable = error.kind() == io::ErrorKind::InvalidData;
            let reason = match error.kind() {
                io::ErrorKind::WouldBlock => "the GPU process does not answer".into(),
                io::ErrorKind::BrokenPipe => "the GPU process has ended".into(),
                _ => error.to_string(),
            };
            self.lost = Some(reason.clone());
            GpuError::Lost(reason)
        })
    }

    fn exchange<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        request: &Q,
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<(A, Vec<OwnedFd>)> {
        self.socket.send(&seqpacket::encode(request)?, fds)?;
        let packet = self.socket.recv(&mut self.buffer)?.ok_or(io::ErrorKind::BrokenPipe)?;
        Ok((seqpacket::decode(&self.buffer[..packet.len])?, packet.fds))
    }

    /// Returns whether the connection failed because a reply could not be decoded. For a hello this
    /// means a protocol version with another encoding.
    pub fn is_undecodable(&self) -> bool {
        self.undecodable
    }

    /// Marks the connection as unusable after an unexpected reply, and returns the error.
    pub fn unexpected_reply(&mut self) -> GpuError {
        let reason = String::from("the GPU process sent an unexpected reply");
        self.lost = Some(reason.clone());
        GpuError::Lost(reason)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
