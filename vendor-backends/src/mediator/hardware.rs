//! What a kind of device adds to the mediator.
//!
//! The mediator has the channels, the address spaces, the order of turns and the accounts. A device has memory to be
//! partitioned, and perhaps an engine of its own that moves bytes. What is not overridden here is done by the CPU.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mdev_core::abi::copy;
use mdev_core::abi::program::Factorial;
use mdev_core::device::Scanout;
use mdev_core::gpu::{ClientSpec, GpuDescription, PhysicalScreen};
use mdev_core::ids::VgpuId;

use super::silicon::address_space::Piece;
use super::silicon::fault::Fault;
use super::wire::Refusal;
use crate::mem::Mapping;

/// One device. Its methods are called by the engine's thread and by those that serve workers.
pub trait Hardware: Send + Sync + fmt::Debug {
    /// What it is, and what it can do.
    fn describe(&self) -> &GpuDescription;

    /// Takes a partition of its memory for a vGPU, or refuses the sizes. Nothing of an earlier owner is left in it.
    fn partition(&self, spec: &ClientSpec) -> Result<Partition, Refusal>;

    /// A vGPU is gone for good. Until then, one whose worker died comes back for what it had.
    fn forget(&self, _vgpu: VgpuId) {}

    /// Files that it has to open again later, for vGPUs to come.
    fn files(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Starts its threads, where it has some, after the process has given up what it does not need.
    fn start(&self) {}

    /// What a vGPU's display registers show has changed. What the screen cannot show is not an error: it is dark then.
    fn set_scanout(&self, _vgpu: VgpuId, _scanout: &Scanout) -> Result<(), Refusal> {
        Err(Refusal::Unsupported)
    }

    /// Puts a vGPU on the screen; how long that took.
    fn focus(&self, _vgpu: VgpuId) -> Result<Duration, Refusal> {
        Err(Refusal::Unsupported)
    }

    /// Shows each vGPU for so long, in turn, or ends that.
    fn rotate(&self, _every: Option<Duration>) -> Result<(), Refusal> {
        Err(Refusal::Unsupported)
    }

    /// Who is on the screen.
    fn screen(&self) -> Result<PhysicalScreen, Refusal> {
        Err(Refusal::Unsupported)
    }

    /// Makes a vGPU's partition zeros, where its file takes no holes.
    fn scrub(&self, _vgpu: VgpuId) -> Result<(), Refusal> {
        Err(Refusal::Unsupported)
    }

    /// How its engine works.
    fn pace(&self) -> Pace {
        Pace::CPU
    }

    /// Lets the device reach memory that a guest has given to its vGPU, where it does so by itself.
    fn attach(&self, _vgpu: VgpuId, _memory: &Arc<Mapping>) -> Result<Option<Attachment>, Refusal> {
        Ok(None)
    }

    /// Copies from one piece of a vGPU's memory to another, as many bytes as the second has; both are checked. Returns
    /// when it is done: no access is in flight afterwards.
    fn copy(
        &self,
        _vgpu: VgpuId,
        from: Piece<'_>,
        to: Piece<'_>,
        streaming: bool,
    ) -> Result<(), Fault> {
        let copied =
            from.mapping.copy(from.offset, to.mapping, to.offset, to.len as usize, streaming);
        copied.ok_or(Fault::class(copy::LAUNCH_DMA))
    }

    /// Writes bytes to a piece of a vGPU's memory that has room for them.
    fn write(&self, _vgpu: VgpuId, to: Piece<'_>, bytes: &[u8]) -> Result<(), Fault> {
        to.mapping.write(to.offset, bytes).ok_or(Fault::class(copy::LAUNCH_DMA))
    }

    /// Replaces words, of [`Pace::words`] at most, by their factorials modulo 2^32.
    fn factorials(&self, words: &mut [u32]) {
        for word in words {
            *word = Factorial::of(*word);
        }
    }
}

/// How an engine works, and how soon it can be taken from a vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Bytes that are moved without a look at the time.
    pub chunk: u64,
    /// What a piece of contiguous memory costs besides, in bytes that could be moved in that time.
    pub piece: u64,
    /// Words whose factorials are computed without a look at the time.
    pub words: usize,
    /// Turns end within this after their limit, unless the host took the core away.
    pub grain_ns: u64,
    /// Longest time without a look at the other vGPUs.
    pub turn_ns: u64,
    /// The CPU is the engine: time that the host takes from it is nobody's.
    pub on_cpu: bool,
}

impl Pace {
    /// That of a CPU: 128 KiB are about 15 us, of which one reading of the clock is a thousandth.
    pub const CPU: Self = Self {
        chunk: 128 << 10,
        piece: 256,
        words: 2048,
        grain_ns: 100_000,
        turn_ns: 200_000,
        on_cpu: true,
    };
}

/// A claim that ends when it is dropped.
pub trait Hold: Send + Sync + fmt::Debug {}

/// One vGPU's part of a device.
#[derive(Debug)]
pub struct Partition {
    /// Its video memory, where there is any.
    pub memory: Option<PartitionMemory>,
    /// Its claim.
    pub hold: Box<dyn Hold>,
}

/// A partition's video memory.
#[derive(Debug)]
pub struct PartitionMemory {
    /// The owner's own view of it.
    pub mapping: Arc<Mapping>,
    /// The file that a guest may map.
    pub fd: OwnedFd,
    /// Where the partition begins in it.
    pub offset: u64,
}

/// Memory that a device reaches by itself, until this is dropped.
#[derive(Debug)]
pub struct Attachment {
    /// The first byte, as the device addresses it.
    pub address: u64,
    /// What ends with it.
    pub hold: Box<dyn Hold>,
}
