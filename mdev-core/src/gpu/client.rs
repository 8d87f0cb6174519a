//! A worker's handle of a GPU.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use bitflags::bitflags;
use serde::{Deserialize, Serialize};
use vmm_sys_util::fallocate::{FallocateMode, fallocate};

use super::screen::Scanout;
use super::{
    Adoption, ChannelHandle, ChannelSpec, ChannelStatus, ClientSpec, GpuDescription, GpuError,
    Programs, Saving, Usage,
};
use crate::ids::{ChannelId, GpuVa, MemoryId, SpaceId, Token};
#[cfg(doc)]
use crate::units::PAGE_SIZE;

/// End of the addresses of a created address space: 47 bits. Rings and pushbuffers must be below
/// [`VA_END`](crate::abi::mailbox::VA_END), because the host class has 40 bits for them.
pub const CREATED_VA_END: u64 = 1 << 47;

/// Location of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backing {
    /// Imported guest memory.
    Guest {
        /// The import.
        memory: MemoryId,
        /// Byte offset into the import.
        offset: u64,
    },
    /// The vGPU's video memory.
    Vram {
        /// Byte offset into the partition.
        offset: u64,
    },
    /// Video memory of [`Programs::allocate`].
    Allocated {
        /// The allocation.
        memory: MemoryId,
        /// Byte offset into the allocation.
        offset: u64,
    },
}

impl Backing {
    /// Returns the location `bytes` later. The caller has checked that it exists.
    #[must_use]
    pub const fn later(mut self, bytes: u64) -> Self {
        match &mut self {
            Self::Guest { offset, .. } | Self::Vram { offset } | Self::Allocated { offset, .. } => {
                *offset += bytes;
            }
        }
        self
    }

    /// Returns the byte offset.
    pub const fn offset(self) -> u64 {
        match self {
            Self::Guest { offset, .. } | Self::Vram { offset } | Self::Allocated { offset, .. } => {
                offset
            }
        }
    }
}

/// Parameters of a new mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapRequest {
    /// Address space.
    pub space: SpaceId,
    /// Page-aligned GPU virtual address.
    pub va: GpuVa,
    /// Page-aligned length in bytes.
    pub len: u64,
    /// Page-aligned memory to map.
    pub backing: Backing,
    /// False if the GPU may only read the memory.
    pub writable: bool,
    /// True if the GPU may keep guest memory in its own cache. The guest sees what the GPU has
    /// written once the GPU has flushed its cache, as the release of a semaphore does, and the GPU
    /// may not see what the guest writes. GPU processes have no such cache.
    #[serde(skip)]
    pub gpu_caches: bool,
}

impl MapRequest {
    /// Returns the parameters of a writable mapping in the default address space.
    pub const fn new(va: GpuVa, len: u64, backing: Backing) -> Self {
        Self { space: SpaceId::DEFAULT, va, len, backing, writable: true, gpu_caches: false }
    }

    /// Returns the same mapping for reads only.
    #[must_use]
    pub const fn read_only(self) -> Self {
        Self { writable: false, ..self }
    }

    /// Returns the same mapping in another address space.
    #[must_use]
    pub const fn in_space(self, space: SpaceId) -> Self {
        Self { space, ..self }
    }
}

/// Range of a file for a guest's mapping.
///
/// The holder of the descriptor can map the whole file. If the file contains other vGPUs' memory
/// too, only the hypervisor confines the guest to the range.
#[derive(Debug)]
pub struct Aperture {
    /// The file.
    pub fd: OwnedFd,
    /// Page-aligned offset of the range in the file.
    pub offset: u64,
    /// Exact length in bytes.
    pub len: u64,
}

impl Aperture {
    /// Fills a part with zeros and releases its pages to the host: the file gets a hole.
    ///
    /// # Errors
    ///
    /// Fails if the range is outside, or if the file cannot have holes, as real video memory.
    pub fn punch_hole(&self, offset: u64, len: u64) -> io::Result<()> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len && len > 0);
        let start = end.and_then(|_| self.offset.checked_add(offset));
        let start = start.ok_or(io::ErrorKind::InvalidInput)?;
        fallocate(&self.fd, FallocateMode::PunchHole, true, start, len).map_err(io::Error::from)
    }
}

/// Apertures of a client.
#[derive(Debug)]
pub struct Apertures {
    /// The partition of video memory (BAR 4).
    pub vram: Option<Aperture>,
    /// The doorbell page (BAR 1).
    pub doorbell: Option<Aperture>,
    /// The framebuffer: the start of the partition (BAR 0).
    pub framebuffer: Option<Aperture>,
}

/// Guest memory to import: a range of a file.
#[derive(Debug)]
pub struct GuestRam<'a> {
    /// The file.
    pub fd: BorrowedFd<'a>,
    /// Page-aligned byte offset into the file.
    pub offset: u64,
    /// Page-aligned length in bytes.
    pub len: u64,
    /// False if the guest may only read the memory.
    pub writable: bool,
}

bitflags! {
    /// Conditions that a GPU raises for a client, in the layout of
    /// [`crate::abi::control::reg::INTR_STATUS`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Pending: u32 {
        /// A channel's non-stall interrupt.
        const NONSTALL = 1 << 0;
        /// A fault of a channel, or an exception. [`Client::query_channel`] tells which channel
        /// faulted, and [`Programs::take_exceptions`] returns exceptions.
        const CHANNEL_ERROR = 1 << 1;
        /// The GPU is lost.
        const DEVICE_LOST = 1 << 2;
        /// The control queue has completions, or another state. No GPU raises this.
        const QUEUE = 1 << 3;
    }
}

/// Descriptor that a client needs in the process that adopts it.
#[derive(Debug)]
pub struct AnchoredDescriptor {
    /// Number of the client's own choice, below 2^56.
    pub number: u64,
    /// The descriptor, or `None` if the one with this number is not needed any more. A memory file,
    /// an eventfd, a socket, or a file that the client has opened: closing it never waits.
    pub fd: Option<OwnedFd>,
}

/// Thread that watches the doorbell page of programs, which ring without a look whether the engine
/// sleeps. It can sleep while no program has the page.
pub trait DoorbellWatch: Send + Sync + fmt::Debug {
    /// Returns the time since the last ring, or since [`Self::resume`] has ended a pause.
    fn quiet_for(&self) -> Duration;

    /// Lets the thread sleep after another look: no program has the page.
    fn pause(&self);

    /// Watches the page again: a program has it. Does not wait.
    fn resume(&self);
}

/// Pages of imported guest memory that a GPU has written.
pub trait WrittenPages: Send + fmt::Debug {
    /// Returns the ranges of bytes in the import, in ascending order and in whole pages. The client
    /// must be paused, so that none is missing.
    fn ranges(&self) -> Vec<Range<u64>>;
}

/// Copy between the video memory of a paused client and its staging memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagedCopy {
    /// Offset in video memory, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset in staging memory, in bytes.
    pub at: u64,
    /// True if video memory is written.
    pub fills: bool,
}

/// A worker's handle of one vGPU on a GPU: a partition, address spaces, and channels.
///
/// What not every GPU can do is in traits of its own, which a client returns if it has them:
/// [`Programs`], [`Saving`] and [`Adoption`].
pub trait Client: Send + fmt::Debug {
    /// Returns what a GPU does for CUDA programs beyond channels and address spaces, if its
    /// hardware runs their kernels.
    fn programs(&mut self) -> Option<&mut dyn Programs> {
        None
    }

    /// Returns the means to save and to restore the client, if the GPU can.
    fn saving(&mut self) -> Option<&mut dyn Saving> {
        None
    }

    /// Returns the means by which another process adopts the client, if one can.
    fn adoption(&mut self) -> Option<&mut dyn Adoption> {
        None
    }

    /// Returns the granted resources.
    fn spec(&self) -> &ClientSpec;

    /// Returns the description of the GPU.
    fn gpu(&self) -> &GpuDescription;

    /// Returns the ranges that the guest may map.
    fn apertures(&self) -> &Apertures;

    /// Imports guest memory, so that [`Client::map`] can map it.
    fn import(&mut self, ram: GuestRam<'_>) -> Result<MemoryId, GpuError>;

    /// Releases an import or an allocation, and unmaps its memory. No access is in flight after the
    /// return.
    fn release(&mut self, memory: MemoryId) -> Result<(), GpuError>;

    /// Creates an empty address space beside [`SpaceId::DEFAULT`]. Its addresses are those from
    /// [`PAGE_SIZE`] to [`CREATED_VA_END`].
    fn create_space(&mut self) -> Result<SpaceId, GpuError>;

    /// Destroys a created address space, its mappings, and the channels in it.
    fn destroy_space(&mut self, space: SpaceId) -> Result<(), GpuError>;

    /// Maps memory. If a page is mapped already, fails and changes nothing.
    fn map(&mut self, request: &MapRequest) -> Result<(), GpuError>;

    /// Unmaps every page of a range. If a page is not mapped, fails and changes nothing.
    fn unmap(&mut self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), GpuError>;

    /// Creates a channel and schedules it.
    fn create_channel(&mut self, spec: &ChannelSpec) -> Result<ChannelHandle, GpuError>;

    /// Destroys a channel, also while it works.
    fn destroy_channel(&mut self, id: ChannelId) -> Result<(), GpuError>;

    /// Returns the status of a channel.
    fn query_channel(&mut self, id: ChannelId) -> Result<ChannelStatus, GpuError>;

    /// Wakes the engine for a channel after a trapped doorbell or wake write. Does not wait.
    fn wake(&mut self, token: Token) -> Result<(), GpuError>;

    /// Returns an eventfd that wakes the engine for all channels, for a hypervisor to signal.
    /// Misuse of the eventfd affects this client only.
    fn wake_event(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns the watch of the doorbell page, if the backend watches the page itself. The worker
    /// watches the page of a GPU with a [`Client::wake_event`].
    fn doorbell_watch(&self) -> Option<Arc<dyn DoorbellWatch>> {
        None
    }

    /// Returns a descriptor that polls readable while [`Client::take_pending`] may have new
    /// conditions.
    ///
    /// The worker polls it, without reads, and raises the guest's interrupt.
    fn event(&self) -> BorrowedFd<'_>;

    /// Sets the eventfd of the guest's interrupt `vector` for the GPU to signal without the worker,
    /// or removes it.
    fn set_interrupt(&mut self, vector: u32, event: Option<BorrowedFd<'_>>)
    -> Result<(), GpuError>;

    /// Returns and clears the conditions that were raised since the last call.
    fn take_pending(&mut self) -> Pending;

    /// Destroys all channels, mappings and created address spaces, and keeps imports and video
    /// memory, for a function-level reset or a reboot of the guest.
    fn reset(&mut self) -> Result<(), GpuError>;

    /// Returns the usage counters. The waits may be missing: they are for the manager.
    fn usage(&mut self) -> Result<Usage, GpuError>;

    /// Sets the picture that the physical screen shows while this vGPU has the focus. Called when
    /// the guest's display registers change. Offsets are relative to the partition. Waits for the
    /// screen's registers at most.
    fn set_scanout(&mut self, _scanout: &Scanout) -> Result<(), GpuError> {
        Ok(())
    }

    /// Fills video memory with zeros after its VM is gone. Called only if the file of the memory
    /// cannot have holes.
    fn scrub(&mut self) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("scrubbing video memory"))
    }

    /// Replaces all memory that a guest can map by new memory, and the wake eventfd by a new one.
    ///
    /// A VMM may keep its descriptors and mappings after it disconnects. Called when its channels
    /// and imports are gone; [`Client::apertures`] then returns the new memory. Returns false if
    /// video memory is still the same, because the device has no other; the caller scrubs it.
    fn renew(&mut self) -> Result<bool, GpuError> {
        Ok(false)
    }

    /// Starts the backend's threads. Called once, after the process dropped its privileges: earlier
    /// threads would have kept them.
    fn start(&mut self) -> Result<(), GpuError> {
        Ok(())
    }

    /// Accepts the connection of a new manager, from [`Gpu::readmit`](super::Gpu::readmit).
    fn attach_manager(&mut self, _fd: OwnedFd) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("orders through the worker"))
    }
}
