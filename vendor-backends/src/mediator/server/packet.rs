//! Receiving requests and sending replies.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::seqpacket::{self, MAX_PACKET, SeqPacket};

/// Result of receiving a request.
pub(super) enum Received<T> {
    /// A request and its file descriptors.
    Request(T, Vec<OwnedFd>),
    /// No packet was available.
    Nothing,
    /// The packet is not a request.
    Malformed,
    /// The peer is gone.
    End,
}

/// Receives a request. Does not wait if `poll` is true.
pub(super) fn receive<T: DeserializeOwned>(socket: &SeqPacket, poll: bool) -> Received<T> {
    let mut buffer = vec![0; MAX_PACKET];
    let packet = if poll { socket.try_recv(&mut buffer) } else { socket.recv(&mut buffer) };
    match packet {
        Ok(Some(packet)) => match seqpacket::decode(&buffer[..packet.len]) {
            Ok(request) => Received::Request(request, packet.fds),
            Err(_) => Received::Malformed,
        },
        Ok(None) => Received::End,
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock => Received::Nothing,
            io::ErrorKind::InvalidData => Received::Malformed,
            _ => Received::End,
        },
    }
}

/// Sends a reply. Returns false if the peer does not accept the reply at once: the server does not
/// wait for a peer that does not read.
pub(super) fn send<T: Serialize>(socket: &SeqPacket, reply: &T, fds: &[BorrowedFd<'_>]) -> bool {
    seqpacket::encode(reply).and_then(|bytes| socket.try_send(&bytes, fds)).is_ok()
}
