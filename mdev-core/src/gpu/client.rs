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
    ChannelHandle, ChannelSpec, ChannelStatus, ClientSpec, ErrorStates, Exception, GpuDescription,
    GpuError, SavedChannel, SavedClient, Usage,
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
    /// Video memory of [`Client::allocate`].
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
        /// faulted, and [`Client::take_exceptions`] returns exceptions.
        const CHANNEL_ERROR = 1 << 1;
        /// The GPU is lost.
        const DEVICE_LOST = 1 << 2;
        /// The control queue has completions, or another state. No GPU raises this.
        const QUEUE = 1 << 3;
    }
}

/// Descriptor that a client needs in a process that continues with it.
#[derive(Debug)]
pub struct KeptDescriptor {
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
pub trait Client: Send + fmt::Debug {
    /// Returns the granted resources.
    fn spec(&self) -> &ClientSpec;

    /// Returns the description of the GPU.
    fn gpu(&self) -> &GpuDescription;

    /// Returns the version of the GPU's driver, which the driver's libraries for programs must
    /// have. `None` on a GPU that these libraries do not know.
    fn driver(&self) -> Option<&str> {
        None
    }

    /// Answers a query to the GPU's driver (`NV_ESC_RM_CONTROL`) in `params`. Returns the driver's
    /// status, or `None` if the command is no known query of this length.
    fn query_driver(&mut self, _command: u32, _params: &mut [u8]) -> Option<u32> {
        None
    }

    /// Returns the ranges that the guest may map.
    fn apertures(&self) -> &Apertures;

    /// Imports guest memory, so that [`Client::map`] can map it.
    fn import(&mut self, ram: GuestRam<'_>) -> Result<MemoryId, GpuError>;

    /// Releases an import or an allocation, and unmaps its memory. No access is in flight after the
    /// return.
    fn release(&mut self, memory: MemoryId) -> Result<(), GpuError>;

    /// Allocates video memory that is filled with zeros, in bytes. [`Client::release`] frees it.
    ///
    /// The first allocation gives the partition up: allocations together cannot be larger. The
    /// partition comes back, cleared, when it is used after the last release, or with
    /// [`Client::renew`]. On a GPU without this, programs share the partition.
    fn allocate(&mut self, _len: u64) -> Result<MemoryId, GpuError> {
        Err(GpuError::Unsupported("allocations of video memory"))
    }

    /// Creates an empty address space beside [`SpaceId::DEFAULT`]. Its addresses are those from
    /// [`PAGE_SIZE`] to [`CREATED_VA_END`].
    fn create_space(&mut self) -> Result<SpaceId, GpuError> {
        Err(GpuError::Unsupported("several address spaces"))
    }

    /// Destroys a created address space, its mappings, and the channels in it.
    fn destroy_space(&mut self, _space: SpaceId) -> Result<(), GpuError> {
        Err(GpuError::NotFound("address space"))
    }

    /// Maps memory. If a page is mapped already, fails and changes nothing.
    fn map(&mut self, request: &MapRequest) -> Result<(), GpuError>;

    /// Maps memory through which kernels launch other kernels (CUDA's dynamic parallelism). The GPU
    /// alone uses its content. [`Client::unmap`] frees it.
    fn map_launch_region(
        &mut self,
        _space: SpaceId,
        _va: GpuVa,
        _len: u64,
    ) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("launches by kernels"))
    }

    /// Unmaps every page of a range. If a page is not mapped, fails and changes nothing.
    fn unmap(&mut self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), GpuError>;

    /// Creates a channel and schedules it.
    fn create_channel(&mut self, spec: &ChannelSpec) -> Result<ChannelHandle, GpuError>;

    /// Lets the GPU preempt the kernels of a channel's group at any instruction. The program must
    /// have installed a trap handler.
    fn preempt_instructions(&mut self, _channel: ChannelId) -> Result<(), GpuError> {
        Ok(())
    }

    /// Sets which exceptions of kernels in a channel's group [`Client::take_exceptions`] returns,
    /// as a mask (`NV83DE_CTRL_DEBUG_SET_EXCEPTION_MASK_*`). The program must have installed a trap
    /// handler. Without this, a kernel may end after an exception as if it had succeeded.
    fn watch_exceptions(&mut self, _channel: ChannelId, _mask: u32) -> Result<(), GpuError> {
        Ok(())
    }

    /// Returns the exceptions since the last call. [`Pending::CHANNEL_ERROR`] announces them.
    fn take_exceptions(&mut self) -> Vec<Exception> {
        Vec::new()
    }

    /// Reads the errors of `count` multiprocessors from number `first` for a channel, after an
    /// exception or a fault in its group.
    fn error_states(
        &mut self,
        _channel: ChannelId,
        _first: u32,
        _count: u32,
    ) -> Result<ErrorStates, GpuError> {
        Err(GpuError::Unsupported("errors of multiprocessors"))
    }

    /// Clears the errors of `count` multiprocessors for a channel.
    fn clear_error_states(&mut self, _channel: ChannelId, _count: u32) -> Result<(), GpuError> {
        Ok(())
    }

    /// Keeps the GPU's clocks up while programs have contexts, or no longer.
    fn boost_clocks(&mut self, _boost: bool) -> Result<(), GpuError> {
        Ok(())
    }

    /// Resets a channel's group, also while it works: its channels end with the error
    /// [`RESET_CHANNEL`](crate::abi::notifier::RESET_CHANNEL), as [`Pending::CHANNEL_ERROR`]
    /// announces.
    fn reset_channel(&mut self, _id: ChannelId) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("resets of channels"))
    }

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

    /// Returns the position in the sequence of this client's requests from which another process
    /// can continue, or `None` if none can.
    fn position(&self) -> Option<u64> {
        None
    }

    /// Returns what is to be kept for a process that continues, or not any more, since the last
    /// call. The caller passes descriptors on before it records the [`Client::position`] of a later
    /// call, and drops them after that.
    fn take_kept(&mut self) -> Vec<KeptDescriptor> {
        Vec::new()
    }

    /// Notes that the caller's state includes the effects of all requests so far, and the
    /// conditions that [`Client::take_pending`] returned. A process that continues from an earlier
    /// [`Client::position`] gets the replies again that came after it.
    fn record(&mut self) {}

    /// Destroys all channels, mappings and created address spaces, and keeps imports and video
    /// memory, for a function-level reset or a reboot of the guest.
    fn reset(&mut self) -> Result<(), GpuError>;

    /// Records from now on which pages of imported guest memory, of `len` bytes, the GPU writes. A
    /// second call begins anew.
    fn log_writes(
        &mut self,
        _memory: MemoryId,
        _len: u64,
    ) -> Result<Box<dyn WrittenPages>, GpuError> {
        Err(GpuError::Unsupported("recording its writes"))
    }

    /// Ends [`Client::log_writes`].
    fn end_log(&mut self, _memory: MemoryId) -> Result<(), GpuError> {
        Ok(())
    }

    /// Stops the work of all channels between two accesses of memory. On the return, and until
    /// [`Client::resume`], nothing of the client reads or writes memory. [`Client::reset`] and
    /// [`Client::renew`] end the pause.
    fn pause(&mut self) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("saving"))
    }

    /// Continues after [`Client::pause`].
    fn resume(&mut self) -> Result<(), GpuError> {
        Ok(())
    }

    /// Returns why [`Client::pause`] would fail, if the client's objects are a reason. Stops
    /// nothing.
    fn check_save(&mut self) -> Result<(), GpuError> {
        Ok(())
    }

    /// Returns whether video memory is copied through [`Client::staging`], because it is no file.
    fn stages_memory(&self) -> bool {
        false
    }

    /// Returns the staging memory of a paused client, from the start of its file. The memory stays
    /// until the client continues.
    fn staging(&mut self) -> Result<Aperture, GpuError> {
        Err(GpuError::Unsupported("staging memory"))
    }

    /// Copies between video memory and staging memory, and waits for the end of the copy.
    fn copy_staged(&mut self, _copy: StagedCopy) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("staging memory"))
    }

    /// Returns the state of a paused client.
    fn save(&mut self) -> Result<SavedClient, GpuError> {
        Err(GpuError::Unsupported("saving"))
    }

    /// Creates an address space with the id that it had in a saved client.
    fn restore_space(&mut self, _space: SpaceId) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("saving"))
    }

    /// Creates a channel with the id and the progress that it had in a saved client. The client
    /// must be paused, and writes no memory.
    fn restore_channel(&mut self, _channel: &SavedChannel) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("saving"))
    }

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
