//! Memory of the client that is not shared: the device reads and writes it by asking the client.
//!
//! That takes time, and while a handler of the device runs, the client does not answer. So a device that implements
//! [`Transfers`] only says what it wants: the session takes it once no handler is running, asks, and hands over
//! the answer whenever that comes.

use crate::errno::Errno;

/// Most transfers that are under way at a time.
pub const MAX_TRANSFERS: usize = 16;

/// What a device wants of the client's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The device's own name for it.
    pub tag: u64,
    /// Where, as the device sees it: within ranges that the client has mapped.
    pub address: u64,
    /// What is wanted.
    pub kind: TransferKind,
}

/// See [`Transfer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransferKind {
    /// To read so many bytes, at most 1 MiB.
    Read(u32),
    /// To write these, at most 1 MiB.
    Write(Vec<u8>),
}

impl TransferKind {
    /// Bytes.
    pub fn size(&self) -> u64 {
        match self {
            Self::Read(count) => (*count).into(),
            Self::Write(data) => data.len() as u64,
        }
    }
}

/// A device that transfers memory through the client.
///
/// Some clients get these messages wrong (QEMU 10.1 and 10.2 misplace the data). So nothing is written before a read
/// has shown that the client's messages are right; where they are wrong, every transfer fails with `ENOTSUP`.
pub trait Transfers {
    /// The next thing that is wanted, if any. Asked after every lot of messages, and never from within a handler.
    fn next(&mut self) -> Option<Transfer>;

    /// A transfer has ended: what was read (nothing for a write), or why it was not done. `EFAULT` where the client
    /// has not mapped the range, or takes it back meanwhile; `EACCES` where it does not allow the access.
    ///
    /// Not called for what is under way when the client goes: [`Device::detach`](crate::device::Device::detach) is.
    fn done(&mut self, tag: u64, result: Result<&[u8], Errno>);
}
