//! Transfers of memory that the client does not share, through messages to the client.
//!
//! The client does not answer while a method of the device runs. A device that implements
//! [`Transfers`] therefore queues its transfers. The session fetches them between handlers, sends
//! the requests, and delivers the results later.

use crate::errno::Errno;

/// Limit of transfers under way.
pub const MAX_TRANSFERS: usize = 16;

/// Transfer between the device and the client's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Identifier, chosen by the device.
    pub tag: u64,
    /// DMA address, within the client's mappings.
    pub address: u64,
    /// Direction and data.
    pub kind: TransferKind,
}

/// Direction and data of a [`Transfer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransferKind {
    /// Read this many bytes, at most 1 MiB.
    Read(u32),
    /// Write these bytes, at most 1 MiB.
    Write(Vec<u8>),
}

impl TransferKind {
    /// Returns the length in bytes.
    pub fn size(&self) -> u64 {
        match self {
            Self::Read(count) => (*count).into(),
            Self::Write(data) => data.len() as u64,
        }
    }
}

/// A device that transfers memory through the client.
///
/// QEMU 10.1 and 10.2 misplace the data in these messages. The session therefore checks the reply
/// to a read before the first write. If the client's format is wrong, every transfer fails with
/// `ENOTSUP`.
pub trait Transfers {
    /// Returns the next transfer, if any. The session calls it after each batch of messages, never
    /// within another method of the device.
    fn next(&mut self) -> Option<Transfer>;

    /// Takes the result of a transfer: the bytes read (none for a write) or the error.
    ///
    /// The error is `EFAULT` if the range is not mapped or was unmapped meanwhile, and `EACCES` if
    /// the mapping does not allow the access. When the client disconnects, transfers under way end
    /// without a call; [`Device::detach`](crate::device::Device::detach) drops them.
    fn done(&mut self, tag: u64, result: Result<&[u8], Errno>);
}
