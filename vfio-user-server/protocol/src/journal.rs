//! Sessions that another process adopts when theirs has ended.
//!
//! A device with a [`Journal`] keeps its state, and how far its session has come, where it survives
//! the process. The adopting process has the same socket, in which the message at hand is
//! still: a message leaves the socket some time after its reply, with others. Each message
//! therefore has its effect once, and the client gets each reply once. A duplicate of a reply
//! without data is possible, which clients drop.

use std::io;
use std::os::fd::BorrowedFd;

use serde::{Deserialize, Serialize};

use crate::errno::Errno;

/// Record of a device and its session.
///
/// The session calls, for each message: [`commit`](Self::commit) when it is carried out, then
/// [`begin_reply`](Self::begin_reply) before its reply, then [`finish`](Self::finish). From time to
/// time it calls [`remove`](Self::remove).
pub trait Journal {
    /// Records the state of the device and of the session, both or neither. The message can be
    /// carried out again if `is_repeatable`: then only changes of the device need a record.
    fn commit(&mut self, record: SessionRecord, is_repeatable: bool);

    /// Records that the reply to the message at hand is sent, or about to be.
    fn begin_reply(&mut self);

    /// Records that the message at hand is finished, and that its `bytes` bytes follow those of the
    /// finished messages in the socket. `bytes` is 0 if the message is not in the socket any more.
    fn finish(&mut self, bytes: usize);

    /// Removes the finished messages, at most [`MAX_FINISHED`] bytes, from the socket.
    fn remove(&mut self, socket: BorrowedFd<'_>) -> io::Result<()>;

    /// Records whether another process could continue now. None can while a part of a message is in
    /// this process alone.
    fn set_adoptable(&mut self, adoptable: bool);
}

/// Limit of the bytes of finished messages in a socket.
pub const MAX_FINISHED: usize = 64 << 10;

/// State of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionRecord {
    /// Limits of the client, once VERSION was handled.
    pub client: Option<ClientLimits>,
    /// Number of the message whose effects the state includes; the first is 1.
    pub message: u64,
    /// Error of that message, or 0.
    pub error: i32,
}

impl SessionRecord {
    /// Returns the result of the message.
    pub fn result(&self) -> Result<(), Errno> {
        Errno::new(self.error).map_or(Ok(()), Err)
    }
}

/// Where a session is between two messages, for a device that records it anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// State of the session.
    pub record: SessionRecord,
    /// Number of messages that are finished.
    pub finished: u64,
    /// Bytes of finished messages in the socket.
    pub in_socket: usize,
}

/// Limits that a client has proposed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientLimits {
    /// Descriptors per message.
    pub max_msg_fds: Option<u64>,
    /// Data bytes per message.
    pub max_data_xfer_size: Option<u64>,
    /// True for a client that drops replies without data for which it does not wait, and answers
    /// requests that it does not know: QEMU, which is known by its support for REGION_WRITE_MULTI.
    pub drops_replies: bool,
}

/// How far a reply has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplyPhase {
    /// Not sent.
    #[default]
    None,
    /// Sent, or about to be.
    Sending,
    /// Sent, or not needed.
    Sent,
}

/// What an adopting process knows of the first message in the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstMessage {
    /// Result, if it is carried out.
    pub executed: Option<Result<(), Errno>>,
    /// How far its reply has come.
    pub reply: ReplyPhase,
}
