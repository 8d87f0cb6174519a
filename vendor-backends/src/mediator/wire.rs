//! Protocol between a GPU process, the manager and the workers: postcard in SOCK_SEQPACKET packets.
//!
//! A connection carries alternating requests and replies, and begins with a hello. Both ends come
//! from the same binary but may be of different builds, because a manager may adopt a GPU process
//! that an older manager started. New requests, replies and refusals are therefore appended to
//! their enums. The server answers a hello with the older of both versions, and neither end then
//! uses anything newer. An incompatible change raises [`OLDEST`].
//!
//! * `admin`: messages of the manager
//! * `client`: messages of a worker
//! * `refusal`: reasons of refusals
//! * `usage`: counters of vGPUs

use serde::{Deserialize, Serialize};

mod admin;
mod client;
mod refusal;
#[cfg(test)]
mod tests;
mod usage;

pub use self::admin::{AdminReply, AdminRequest};
pub use self::client::{ClientReply, ClientRequest, HELLO_FDS, RENEWED_FDS};
pub use self::refusal::Refusal;
pub use self::usage::{UsageReportOnWire, WithoutWaits};

/// Protocol version. Incremented with every change of the types in this module, or of the types of
/// `mdev_core` in them.
pub const VERSION: u32 = 1;

/// Oldest supported version.
pub const OLDEST: u32 = 1;

/// Largest number of vGPUs in an [`AdminRequest::Waits`]: any counts of these fit into a packet.
pub const MAX_WAITS: usize = 64;

/// Request of a worker with its number, or the reply to it.
///
/// A worker that adopts the work of one that ended repeats requests of which it does not know
/// the reply. The GPU process carries out each number once, and repeats its reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Numbered<T> {
    /// Number of the request: one more than that of the request before, or [`Self::NONE`].
    pub number: u64,
    /// Number of the last request whose reply is not needed again; 0 in replies.
    pub recorded: u64,
    /// The request or reply.
    pub body: T,
}

impl Numbered<()> {
    /// Number of hellos, which are carried out each time, and of replies to packets before a hello.
    pub const NONE: u64 = 0;
}

/// Returns the version that a server answers to a client's version: the older of both.
pub const fn agreed(asked: u32) -> u32 {
    // A client that is too old gets this server's version, which it refuses.
    if asked < OLDEST || asked > VERSION { VERSION } else { asked }
}

/// Returns whether this build supports a negotiated version.
pub const fn is_spoken(version: u32) -> bool {
    version >= OLDEST && version <= VERSION
}

/// Byte offset of the 32-bit pending word ([`mdev_core::gpu::Pending`]) in a client's status page.
pub const STATUS_PENDING: usize = 0;
/// Byte offset of the 32-bit word with the pending conditions that a worker has taken and not yet
/// recorded.
pub const STATUS_TAKEN: usize = 4;
/// Length of a client's status page in bytes.
pub const STATUS_BYTES: usize = 4096;
