//! Messages between a worker and a GPU process.

use mdev_core::device::Scanout;
use mdev_core::gpu::{
    Backing, ChannelHandle, ChannelSpec, ChannelStatus, ClientSpec, EngineKind, GpuDescription,
    MapRequest, Placement, SavedChannel,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, SpaceId};
use serde::{Deserialize, Serialize};

use super::{OLDEST, Refusal, WITH_LOG, WITH_RENEW, WITH_SAVE, WITH_SPACES, WithoutWaits};
#[cfg(doc)]
use super::{VERSION, agreed};

/// Requests of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientRequest {
    /// Must be sent first. Reply: [`ClientReply::Hello`].
    Hello {
        /// [`VERSION`].
        version: u32,
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
    /// Maps memory in the default address space.
    Map {
        /// GPU virtual address.
        va: GpuVa,
        /// Length in bytes.
        len: u64,
        /// Memory to map.
        backing: Backing,
        /// Whether the mapping may be written.
        writable: bool,
    },
    /// Unmaps memory in the default address space.
    Unmap {
        /// GPU virtual address.
        va: GpuVa,
        /// Length in bytes.
        len: u64,
    },
    /// Creates a channel. Reply: [`ClientReply::Created`].
    CreateChannel(DefaultChannel),
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
    /// Creates an address space. Reply: [`ClientReply::SpaceCreated`]. Since [`WITH_SPACES`], as all
    /// that follow.
    CreateSpace,
    /// Destroys a created address space, its mappings, and the channels in it.
    DestroySpace(SpaceId),
    /// Maps memory in any address space.
    MapIn(MapRequest),
    /// Unmaps memory in any address space.
    UnmapIn {
        /// Address space.
        space: SpaceId,
        /// GPU virtual address.
        va: GpuVa,
        /// Length in bytes.
        len: u64,
    },
    /// Creates a channel in any address space and group. Reply: [`ClientReply::Created`].
    CreateChannelIn(ChannelSpec),
    /// Stops all channels. Since [`WITH_SAVE`], as all that follow.
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
    /// Since [`WITH_LOG`], as all that follow.
    LogWrites(MemoryId),
    /// Ends the record.
    EndLog(MemoryId),
}

/// Channel in the default address space and group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DefaultChannel {
    /// Engine.
    pub engine: EngineKind,
    /// Address of the GPFIFO.
    pub gpfifo: GpuVa,
    /// Number of GPFIFO entries.
    pub gpfifo_entries: u32,
    /// Location of the USERD.
    pub userd: Backing,
    /// Interrupt vector.
    pub vector: u32,
}

impl From<DefaultChannel> for ChannelSpec {
    fn from(channel: DefaultChannel) -> Self {
        let DefaultChannel { engine, gpfifo, gpfifo_entries, userd, vector } = channel;
        let (space, group) = (SpaceId::DEFAULT, None);
        let placement = Placement::default();
        Self {
            engine,
            gpfifo,
            gpfifo_entries,
            userd,
            vector,
            space,
            group,
            placement,
            preamble: None,
        }
    }
}

impl ClientRequest {
    /// Returns the oldest request that creates a channel.
    pub const fn create_channel(spec: ChannelSpec) -> Self {
        let ChannelSpec { engine, gpfifo, gpfifo_entries, userd, vector, space, group, .. } = spec;
        if space.0 != SpaceId::DEFAULT.0 || group.is_some() {
            return Self::CreateChannelIn(spec);
        }
        Self::CreateChannel(DefaultChannel { engine, gpfifo, gpfifo_entries, userd, vector })
    }

    /// Returns the oldest request that makes a mapping.
    pub const fn map(request: MapRequest) -> Self {
        let MapRequest { space, va, len, backing, writable, .. } = request;
        if space.0 != SpaceId::DEFAULT.0 {
            return Self::MapIn(request);
        }
        Self::Map { va, len, backing, writable }
    }

    /// Returns the oldest request that unmaps a range.
    pub const fn unmap(space: SpaceId, va: GpuVa, len: u64) -> Self {
        if space.0 != SpaceId::DEFAULT.0 {
            return Self::UnmapIn { space, va, len };
        }
        Self::Unmap { va, len }
    }

    /// Returns the first version with the request.
    pub const fn since(&self) -> u32 {
        match self {
            Self::CreateSpace
            | Self::DestroySpace(_)
            | Self::MapIn(_)
            | Self::UnmapIn { .. }
            | Self::CreateChannelIn(_) => WITH_SPACES,
            Self::Renew => WITH_RENEW,
            Self::Pause
            | Self::Resume
            | Self::Save
            | Self::RestoreSpace(_)
            | Self::RestoreChannel(_) => WITH_SAVE,
            Self::LogWrites(_) | Self::EndLog(_) => WITH_LOG,
            _ => OLDEST,
        }
    }
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
    /// Id of the address space. Since [`WITH_SPACES`].
    SpaceCreated(SpaceId),
    /// Reply to `Save`. Attached: a file with a `SavedClient` in postcard. Since [`WITH_SAVE`].
    Saved,
    /// Reply to `LogWrites`. Attached: the file of a [`WriteLog`](crate::mem::WriteLog). Since
    /// [`WITH_LOG`].
    Logged,
}

/// File descriptors of [`ClientReply::Hello`] without the partition's file.
pub const HELLO_FDS: usize = 5;

/// File descriptors of [`ClientReply::Renewed`] without the partition's file.
pub const RENEWED_FDS: usize = 2;
