//! Messages between a worker and a GPU process.

use mdev_core::device::Scanout;
use mdev_core::gpu::{
    ChannelHandle, ChannelSpec, ChannelStatus, ClientSpec, GpuDescription, MapRequest, SavedChannel,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, SpaceId};
use serde::{Deserialize, Serialize};

use super::{Refusal, WithoutWaits};
#[cfg(doc)]
use super::{VERSION, agreed};

/// Requests of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientRequest {
    /// Must be sent first. Its discriminant must never change, so that any two versions understand
    /// it. Reply: [`ClientReply::Hello`].
    Hello {
        /// [`VERSION`].
        version: u32,
        /// Whether the worker continues the work of one that ended. Otherwise the numbers begin
        /// again at 1.
        adopts: bool,
    },
    /// Imports the attached file. Reply: [`ClientReply::Imported`].
    Import {
        /// Byte offset in the file.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// Whether the memory may be written.
        writable: bool,
    },
    /// Removes an import.
    Release(MemoryId),
    /// Creates an address space. Reply: [`ClientReply::SpaceCreated`].
    CreateSpace,
    /// Destroys a created address space, its mappings, and the channels in it.
    DestroySpace(SpaceId),
    /// Maps memory.
    Map(MapRequest),
    /// Unmaps memory.
    Unmap {
        /// Address space.
        space: SpaceId,
        /// GPU virtual address.
        va: GpuVa,
        /// Length in bytes.
        len: u64,
    },
    /// Creates a channel. Reply: [`ClientReply::Created`].
    CreateChannel(ChannelSpec),
    /// Destroys a channel.
    DestroyChannel(ChannelId),
    /// Reads the status of a channel. Reply: [`ClientReply::Status`].
    QueryChannel(ChannelId),
    /// Sets the eventfd of an interrupt vector to the attached eventfd, or clears it.
    SetInterrupt(u32),
    /// Destroys all channels, mappings and created address spaces.
    Reset,
    /// Reads the vGPU's counters but the waits. Reply: [`ClientReply::Usage`].
    Usage,
    /// Reports a change of the guest's display registers.
    SetScanout(Scanout),
    /// Fills the partition with zeros.
    Scrub,
    /// Destroys all channels and mappings, and replaces everything that a guest can map or signal.
    /// Reply: [`ClientReply::Renewed`].
    Renew,
    /// Stops all channels.
    Pause,
    /// Lets the channels of a paused vGPU run.
    Resume,
    /// Reads the state of a paused vGPU. Reply: [`ClientReply::Saved`].
    Save,
    /// Creates an address space with a saved id.
    RestoreSpace(SpaceId),
    /// Creates a channel of a paused vGPU in a saved state.
    RestoreChannel(SavedChannel),
    /// Records from now on which pages of an import are written. Reply: [`ClientReply::Logged`].
    LogWrites(MemoryId),
    /// Ends the record.
    EndLog(MemoryId),
}

/// Replies to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientReply {
    /// Reply to `Hello`. Attached, in this order: the doorbell page, the status page, the eventfd
    /// that signals a change of the status page, the socket on which any packet wakes the engine,
    /// the eventfd that wakes the engine, and the file of the video memory partition, if there is
    /// one.
    Hello {
        /// Negotiated version, as [`agreed`] returns it.
        version: u32,
        /// Description of the GPU.
        gpu: GpuDescription,
        /// Granted specification.
        spec: ClientSpec,
        /// Offset of the partition in its file, if there is one.
        vram_offset: Option<u64>,
    },
    /// Success without data.
    Done,
    /// Id of the import.
    Imported(MemoryId),
    /// Handle of the channel.
    Created(ChannelHandle),
    /// Status of the channel.
    Status(ChannelStatus),
    /// Counters of the vGPU but the waits.
    Usage(Box<WithoutWaits>),
    /// The request was refused.
    Refused(Refusal),
    /// Reply to `Renew`. Attached, in this order: the new doorbell page, the new eventfd that wakes
    /// the engine, and the file of the new video memory partition, if it was replaced.
    Renewed {
        /// Offset of the new partition in its file; `None` if video memory is the same as before.
        vram_offset: Option<u64>,
    },
    /// Id of the address space.
    SpaceCreated(SpaceId),
    /// Reply to `Save`. Attached: a file with a `SavedClient` in postcard.
    Saved,
    /// Reply to `LogWrites`. Attached: the file of a [`WriteLog`](ipc::mem::WriteLog).
    Logged,
}

/// File descriptors of [`ClientReply::Hello`] without the partition's file.
pub const HELLO_FDS: usize = 5;

/// File descriptors of [`ClientReply::Renewed`] without the partition's file.
pub const RENEWED_FDS: usize = 2;
