//! What not every GPU can do for a vGPU: parts of a [`Client`].

#[cfg(doc)]
use super::Pending;
use super::client::{AnchoredDescriptor, Aperture, Client, StagedCopy, WrittenPages};
use super::{ErrorStates, Exception, GpuError, SavedChannel, SavedClient};
use crate::ids::{ChannelId, GpuVa, MemoryId, SpaceId};

impl dyn Client + '_ {
    /// Returns [`Client::programs`].
    ///
    /// # Errors
    ///
    /// [`GpuError::Unsupported`] if the client has none.
    pub fn require_programs(&mut self) -> Result<&mut dyn Programs, GpuError> {
        self.programs().ok_or(GpuError::Unsupported("kernels of programs"))
    }

    /// Returns [`Client::saving`].
    ///
    /// # Errors
    ///
    /// [`GpuError::Unsupported`] if the client has none.
    pub fn require_saving(&mut self) -> Result<&mut dyn Saving, GpuError> {
        self.saving().ok_or(GpuError::Unsupported("saving"))
    }
}

/// What a GPU does for CUDA programs beyond channels and address spaces.
pub trait Programs {
    /// Returns the version of the GPU's driver, which the driver's libraries for programs must
    /// have.
    fn driver(&self) -> &str;

    /// Answers a query to the GPU's driver (`NV_ESC_RM_CONTROL`) in `params`. Returns the driver's
    /// status, or `None` if the command is no known query of this length.
    fn query_driver(&mut self, command: u32, params: &mut [u8]) -> Option<u32>;

    /// Allocates video memory that is filled with zeros, in bytes. [`Client::release`] frees it.
    ///
    /// The first allocation gives the partition up: allocations together cannot be larger. The
    /// partition comes back, cleared, when it is used after the last release, or with
    /// [`Client::renew`].
    fn allocate(&mut self, len: u64) -> Result<MemoryId, GpuError>;

    /// Maps memory through which kernels launch other kernels (CUDA's dynamic parallelism). The GPU
    /// alone uses its content. [`Client::unmap`] frees it.
    fn map_launch_region(&mut self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), GpuError>;

    /// Lets the GPU preempt the kernels of a channel's group at any instruction. The program must
    /// have installed a trap handler.
    fn preempt_instructions(&mut self, channel: ChannelId) -> Result<(), GpuError>;

    /// Sets which exceptions of kernels in a channel's group [`Self::take_exceptions`] returns, as
    /// a mask (`NV83DE_CTRL_DEBUG_SET_EXCEPTION_MASK_*`). The program must have installed a trap
    /// handler. Without this, a kernel may end after an exception as if it had succeeded.
    fn watch_exceptions(&mut self, channel: ChannelId, mask: u32) -> Result<(), GpuError>;

    /// Returns the exceptions since the last call. [`Pending::CHANNEL_ERROR`] announces them.
    fn take_exceptions(&mut self) -> Vec<Exception>;

    /// Reads the errors of `count` multiprocessors from number `first` for a channel, after an
    /// exception or a fault in its group.
    fn error_states(
        &mut self,
        channel: ChannelId,
        first: u32,
        count: u32,
    ) -> Result<ErrorStates, GpuError>;

    /// Clears the errors of `count` multiprocessors for a channel.
    fn clear_error_states(&mut self, channel: ChannelId, count: u32) -> Result<(), GpuError>;

    /// Keeps the GPU's clocks up while programs have contexts, or no longer.
    fn boost_clocks(&mut self, boost: bool) -> Result<(), GpuError>;

    /// Resets a channel's group, also while it works: its channels end with the error
    /// [`RESET_CHANNEL`](crate::abi::notifier::RESET_CHANNEL), as [`Pending::CHANNEL_ERROR`]
    /// announces.
    fn reset_channel(&mut self, id: ChannelId) -> Result<(), GpuError>;
}

/// Means to save a client, and to restore it.
pub trait Saving {
    /// Records from now on which pages of imported guest memory, of `len` bytes, the GPU writes. A
    /// second call begins anew.
    fn log_writes(&mut self, memory: MemoryId, len: u64)
    -> Result<Box<dyn WrittenPages>, GpuError>;

    /// Ends [`Self::log_writes`].
    fn end_log(&mut self, memory: MemoryId) -> Result<(), GpuError>;

    /// Stops the work of all channels between two accesses of memory. On the return, and until
    /// [`Self::resume`], nothing of the client reads or writes memory. [`Client::reset`] and
    /// [`Client::renew`] end the pause.
    fn pause(&mut self) -> Result<(), GpuError>;

    /// Continues after [`Self::pause`].
    fn resume(&mut self) -> Result<(), GpuError>;

    /// Returns why [`Self::pause`] would fail, if the client's objects are a reason. Stops
    /// nothing.
    fn check_save(&mut self) -> Result<(), GpuError> {
        Ok(())
    }

    /// Returns whether video memory is copied through [`Self::staging`], because it is no file.
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
    fn save(&mut self) -> Result<SavedClient, GpuError>;

    /// Creates an address space with the id that it had in a saved client.
    fn restore_space(&mut self, space: SpaceId) -> Result<(), GpuError>;

    /// Creates a channel with the id and the progress that it had in a saved client. The client
    /// must be paused, and writes no memory.
    fn restore_channel(&mut self, channel: &SavedChannel) -> Result<(), GpuError>;
}

/// Means by which another process adopts a client when its own has died.
pub trait Adoption {
    /// Returns the position in the sequence of this client's requests from which another process
    /// can continue, or `None` if none can.
    fn position(&mut self) -> Option<u64>;

    /// Returns what is to be kept for the adopting process, or not any more, since the last
    /// call. The caller passes descriptors on before it records the [`Self::position`] of a later
    /// call, and drops them after that.
    fn take_descriptors(&mut self) -> Vec<AnchoredDescriptor>;

    /// Notes that the caller's state includes the effects of all requests so far, and the
    /// conditions that [`Client::take_pending`] returned. A process that adopts the client from an
    /// earlier [`Self::position`] gets the replies again that came after it.
    fn record(&mut self);
}
