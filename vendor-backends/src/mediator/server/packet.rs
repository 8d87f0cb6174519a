//! Receiving requests and sending replies.

use std::io;
use std::os::fd::BorrowedFd;
use std::thread;
use std::time::Duration;

use foreign_fds::ForeignFd;
use ipc::seqpacket::{self, MAX_PACKET, Packet, SeqPacket};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::mediator::connection;
use crate::mediator::wire::Refusal;

/// Attempts to send a reply while the kernel has no memory for it.
const MEMORY_RETRIES: u32 = 10;
/// Pause between these attempts.
const MEMORY_PAUSE: Duration = Duration::from_millis(10);

/// Result of receiving a request.
pub(super) enum Received<T> {
    /// A request and its file descriptors.
    Request(T, Vec<ForeignFd>),
    /// No packet was available.
    Nothing,
    /// The request cannot be served: it is malformed, or its descriptors were lost for want of room
    /// in this process.
    Refused(Refusal),
    /// The peer is gone.
    End,
}

/// Receives a request of the manager. Does not wait.
pub(super) fn receive_admin<T: DeserializeOwned>(socket: &SeqPacket) -> Received<T> {
    let mut buffer = vec![0; MAX_PACKET];
    received(socket.try_recv_with_fds(&mut buffer), &buffer)
}

/// Waits for a request of a worker.
pub(super) fn receive<T: DeserializeOwned>(socket: &SeqPacket) -> Received<T> {
    let mut buffer = vec![0; MAX_PACKET];
    received(socket.recv_with_fds(&mut buffer), &buffer)
}

fn received<T: DeserializeOwned>(packet: io::Result<Option<Packet>>, buffer: &[u8]) -> Received<T> {
    match packet {
        Ok(Some(packet)) if packet.fds_lost => Received::Refused(Refusal::Os(libc::EMFILE)),
        Ok(Some(packet)) => match seqpacket::decode(&buffer[..packet.len]) {
            Ok(request) => Received::Request(request, packet.fds),
            Err(_) => Received::Refused(Refusal::Message),
        },
        Ok(None) => Received::End,
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock => Received::Nothing,
            io::ErrorKind::InvalidData => Received::Refused(Refusal::Message),
            _ => Received::End,
        },
    }
}

/// Sends a reply. Returns false if the peer is gone or does not accept the reply at once: the
/// server does not wait for a peer that does not read. A reply whose descriptors cannot be sent
/// becomes a refusal, and a lack of memory is waited for: neither ends the connection.
pub(super) fn send<T: Serialize>(
    socket: &SeqPacket,
    reply: &T,
    fds: &[BorrowedFd<'_>],
    refusal: impl FnOnce(Refusal) -> T,
) -> bool {
    match try_send(socket, reply, fds) {
        Err(error) if !fds.is_empty() && !is_final(&error) => {
            try_send(socket, &refusal(error.into()), &[]).is_ok()
        }
        sent => sent.is_ok(),
    }
}

/// Sends a reply, and repeats this for a while without memory.
fn try_send<T: Serialize>(socket: &SeqPacket, reply: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = seqpacket::encode(reply)?;
    for _ in 0..MEMORY_RETRIES {
        match socket.try_send(&bytes, fds) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::ENOBUFS)) => {
                thread::sleep(MEMORY_PAUSE);
            }
            sent => return sent,
        }
    }
    socket.try_send(&bytes, fds)
}

/// Returns whether another reply would fail in the same way.
fn is_final(error: &io::Error) -> bool {
    connection::is_closed(error) || error.kind() == io::ErrorKind::WouldBlock
}
