//! Interface between the mediator and a device.
//!
//! The mediator implements channels, address spaces, scheduling and accounting. A device has memory
//! to be partitioned, and may have an engine that moves bytes. The CPU does whatever the device
//! does not override.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ipc::mem::Mapping;
use mdev_core::abi::copy;
use mdev_core::abi::program::FunctionId;
use mdev_core::device::Scanout;
use mdev_core::gpu::{ClientSpec, GpuDescription, ScreenStatus};
use mdev_core::ids::VgpuId;

use super::fault::Fault;
use super::wire::Refusal;

/// A device. The engine thread and the threads that serve workers call these methods.
pub trait Hardware: Send + Sync + fmt::Debug {
    /// Returns the description of the device.
    fn describe(&self) -> &GpuDescription;

    /// Allocates a partition of the device's memory for a vGPU, or refuses the sizes. The partition
    /// holds no data of an earlier vGPU.
    fn partition(&self, spec: &ClientSpec) -> Result<Partition, Refusal>;

    /// Returns zeroed memory in place of a vGPU's partition, which the caller then drops. Returns
    /// `None` if the device has no other memory for the partition.
    fn renew(&self, _spec: &ClientSpec) -> Result<Option<PartitionMemory>, Refusal> {
        Ok(None)
    }

    /// Frees what is reserved for a vGPU whose worker ended. The manager calls this when the vGPU
    /// is removed for good.
    fn forget(&self, _vgpu: VgpuId) {}

    /// Returns the files that the device opens again for later vGPUs.
    fn files(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Starts the device's threads. The GPU process calls this after it has dropped its privileges.
    fn start(&self) {}

    /// Applies a change of a vGPU's emulated display registers. A scanout that the screen cannot
    /// show is not an error: the vGPU is dark.
    fn set_scanout(&self, _vgpu: VgpuId, _scanout: &Scanout) -> Result<(), Refusal> {
        Err(Refusal::Unsupported)
    }

    /// Shows a vGPU on the screen. Returns how long the switch took.
    fn focus(&self, _vgpu: VgpuId) -> Result<Duration, Refusal> {
        Err(Refusal::Unsupported)
    }

    /// Starts or stops the rotation of the screen among vGPUs.
    fn rotate(&self, _every: Option<Duration>) -> Result<(), Refusal> {
        Err(Refusal::Unsupported)
    }

    /// Returns the state of the screen.
    fn screen(&self) -> Result<ScreenStatus, Refusal> {
        Err(Refusal::Unsupported)
    }

    /// Fills a vGPU's partition with zeros, for files that do not support hole punching.
    fn scrub(&self, _vgpu: VgpuId) -> Result<(), Refusal> {
        Err(Refusal::Unsupported)
    }

    /// Returns the timing of the device's engine.
    fn pace(&self) -> Pace {
        Pace::CPU
    }

    /// Maps guest memory for the device's DMA, if the device does DMA.
    fn attach(&self, _vgpu: VgpuId, _memory: &Arc<Mapping>) -> Result<Option<Attachment>, Refusal> {
        Ok(None)
    }

    /// Copies `to.len` bytes between two checked ranges of a vGPU's memory. When this function
    /// returns, no access is in flight.
    fn copy(
        &self,
        _vgpu: VgpuId,
        from: MemoryRange<'_>,
        to: MemoryRange<'_>,
        streaming: bool,
    ) -> Result<(), Fault> {
        let copied =
            from.mapping.copy(from.offset, to.mapping, to.offset, to.len as usize, streaming);
        copied.ok_or(Fault::class(copy::LAUNCH_DMA))
    }

    /// Writes bytes to a checked range of a vGPU's memory.
    fn write(&self, _vgpu: VgpuId, to: MemoryRange<'_>, bytes: &[u8]) -> Result<(), Fault> {
        to.mapping.write(to.offset, bytes).ok_or(Fault::class(copy::LAUNCH_DMA))
    }

    /// Returns the ids of the device's fixed functions ([`GpuCapabilities::FIXED_FUNCTION`]).
    ///
    /// [`GpuCapabilities::FIXED_FUNCTION`]: mdev_core::gpu::GpuCapabilities::FIXED_FUNCTION
    fn fixed_functions(&self) -> &[FunctionId] {
        &[]
    }

    /// Replaces words, [`Pace::words`] at most, by the results of one of [`Self::fixed_functions`].
    fn apply_fixed_function(&self, _function: FunctionId, _words: &mut [u32]) {}
}

/// Timing of an engine, and its preemption latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Bytes that are moved between two checks of the run limit.
    pub chunk_bytes: u64,
    /// Cost of a contiguous range in addition to its bytes, as an equivalent number of bytes.
    pub range_cost: u64,
    /// Words of a fixed function that are computed between two checks of the run limit.
    pub words: usize,
    /// Longest time by which a run exceeds its limit, unless the host took the core away.
    pub preemption_latency_ns: u64,
    /// Longest time without polling the other vGPUs.
    pub max_run_ns: u64,
    /// Whether the CPU is the engine. Time that the host takes from the CPU is then charged to no
    /// vGPU.
    pub on_cpu: bool,
}

impl Pace {
    /// Timing of a CPU: 128 KiB take about 15 us, and reading the clock costs a thousandth of that.
    /// A range costs less than this cost, unless it is a page fault, in which the engine may sleep.
    pub const CPU: Self = Self {
        chunk_bytes: 128 << 10,
        range_cost: 4 << 10,
        words: 2048,
        preemption_latency_ns: 100_000,
        max_run_ns: 200_000,
        on_cpu: true,
    };
}

/// Reservation of a device resource, released when dropped.
pub trait Reservation: Send + Sync + fmt::Debug {}

/// One vGPU's partition of a device.
#[derive(Debug)]
pub struct Partition {
    /// Video memory, if the device has any.
    pub memory: Option<PartitionMemory>,
    /// Reservation of the partition.
    pub reservation: Box<dyn Reservation>,
}

/// Video memory of a partition.
#[derive(Debug)]
pub struct PartitionMemory {
    /// The GPU process' own mapping.
    pub mapping: Arc<Mapping>,
    /// File that a guest may map.
    pub fd: OwnedFd,
    /// Offset of the partition in the file.
    pub offset: u64,
}

/// Contiguous memory behind a GPU virtual address.
#[derive(Clone, Copy, Debug)]
pub struct MemoryRange<'a> {
    /// Mapping that contains the range.
    pub mapping: &'a Mapping,
    /// Byte offset in the mapping.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Address of the range for the device's DMA, if the memory is attached.
    pub bus: Option<u64>,
}

/// Memory that the device's DMA can reach until this value is dropped.
#[derive(Debug)]
pub struct Attachment {
    /// Address of the first byte for the device's DMA.
    pub address: u64,
    /// Mapping in the IOMMU.
    pub reservation: Box<dyn Reservation>,
}
