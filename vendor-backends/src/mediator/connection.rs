//! The asking end of a connection: one request, one reply, and an end to patience.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use mdev_core::gpu::GpuError;
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::seqpacket::{self, MAX_PACKET, SeqPacket};

/// How long a reply may take: a worker owes QEMU an answer within 5 s.
const PATIENCE: Duration = Duration::from_secs(4);

/// A connection to a device's owner. Once it has failed it stays failed: a late reply would answer the next request.
#[derive(Debug)]
pub struct Connection {
    socket: SeqPacket,
    buffer: Vec<u8>,
    lost: Option<String>,
    garbled: bool,
}

impl Connection {
    pub fn new(socket: SeqPacket) -> io::Result<Self> {
        let patience = TimeVal::seconds(PATIENCE.as_secs().cast_signed());
        setsockopt(&socket, sockopt::ReceiveTimeout, &patience)?;
        setsockopt(&socket, sockopt::SendTimeout, &patience)?;
        Ok(Self { socket, buffer: vec![0; MAX_PACKET], lost: None, garbled: false })
    }

    /// Asks, and waits for the answer and its descriptors.
    pub fn ask<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        request: &Q,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(A, Vec<OwnedFd>), GpuError> {
        if let Some(why) = &self.lost {
            return Err(GpuError::Lost(why.clone()));
        }
        self.exchange(request, fds).map_err(|error| {
            self.garbled = error.kind() == io::ErrorKind::InvalidData;
            let why = match error.kind() {
                io::ErrorKind::WouldBlock => "it does not answer".into(),
                io::ErrorKind::BrokenPipe => "its process has ended".into(),
                _ => error.to_string(),
            };
            self.lost = Some(why.clone());
            GpuError::Lost(why)
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

    /// Whether it failed since an answer could not be read: after a hello, that of a version with another form.
    pub fn is_garbled(&self) -> bool {
        self.garbled
    }

    /// What to call the other end's failure to keep to the protocol.
    pub fn confused(&mut self) -> GpuError {
        let why = String::from("its answer does not fit the request");
        self.lost = Some(why.clone());
        GpuError::Lost(why)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
