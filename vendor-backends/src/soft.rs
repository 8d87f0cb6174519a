//! The software GPU: the CPU as a device that [`crate::mediator`] drives, with memory and all
//! engines.

mod backend;
pub mod vram;

use std::time::Duration;

use ipc::mem::SharedMemory;
use mdev_core::abi::program::FunctionId;
use mdev_core::gpu::{ClientSpec, GpuCapabilities, GpuDescription, Quotas};
use mdev_core::units::{GIB, MIB, PAGE_SIZE, is_aligned};

pub use self::backend::SoftBackend;
use self::vram::Vram;
use crate::backend::FRONT_END;
use crate::mediator::hardware::{Partition, PartitionMemory};
use crate::mediator::wire::Refusal;
use crate::mediator::{Hardware, factorial};

/// Maximum number of channels of one vGPU.
const MAX_CHANNELS: u32 = 64;
/// Maximum number of vGPUs.
const MAX_VGPUS: u32 = 256;
/// Maximum bytes of imported guest memory of one vGPU.
const MAX_IMPORT: u64 = 4096 * GIB;
/// Default time slice.
const DEFAULT_SLICE: Duration = Duration::from_millis(2);

/// A software GPU.
#[derive(Debug)]
pub struct SoftGpu {
    description: GpuDescription,
    vram: Vram,
}

impl SoftGpu {
    /// Creates a software GPU with `vram_bytes` of video memory.
    pub fn new(name: &str, vram_bytes: u64) -> Self {
        // The software GPU has no screen.
        let mut lacking =
            GpuCapabilities::SCANOUT | GpuCapabilities::EXACT_SLICES | GpuCapabilities::CONTEXTS;
        if FRONT_END.is_none() {
            lacking |= GpuCapabilities::PROGRAMS;
        }
        Self {
            description: GpuDescription {
                parent: name.into(),
                model: "SOFT".into(),
                name: "Tessera software GPU".into(),
                vram_bytes,
                capabilities: GpuCapabilities::all().difference(lacking),
                max_vgpus: MAX_VGPUS,
                max_channels: MAX_CHANNELS,
                max_import_bytes: MAX_IMPORT,
                default_timeslice: DEFAULT_SLICE,
                hang_timeout: Some(Quotas::DEFAULT_HANG_TIMEOUT),
            },
            vram: Vram::new(vram_bytes),
        }
    }

    /// Gives each vGPU a process of its own
    /// ([`context_process`](crate::mediator::context_process)).
    #[must_use]
    pub fn with_contexts(mut self) -> Self {
        self.description.capabilities |= GpuCapabilities::CONTEXTS;
        self
    }
}

impl Hardware for SoftGpu {
    fn describe(&self) -> &GpuDescription {
        &self.description
    }

    /// Allocates a partition in a new memfd, which is all zeros.
    fn partition(&self, spec: &ClientSpec) -> Result<Partition, Refusal> {
        if spec.vram_bytes == 0
            || !is_aligned(spec.vram_bytes, MIB)
            || !is_aligned(spec.framebuffer_bytes, PAGE_SIZE)
            || spec.framebuffer_bytes > spec.vram_bytes
            || spec.max_import_bytes > MAX_IMPORT
        {
            return Err(Refusal::Spec);
        }
        let allocation = self.vram.allocate(spec.vram_bytes)?;
        Ok(Partition { memory: self.renew(spec)?, reservation: Box::new(allocation) })
    }

    fn renew(&self, spec: &ClientSpec) -> Result<Option<PartitionMemory>, Refusal> {
        let SharedMemory { fd, mapping } = SharedMemory::new(c"vgpu-vram", spec.vram_bytes)?;
        Ok(Some(PartitionMemory { mapping, fd, offset: 0 }))
    }

    fn fixed_functions(&self) -> &[FunctionId] {
        &[factorial::FUNCTION]
    }

    fn apply_fixed_function(&self, _function: FunctionId, words: &mut [u32]) {
        for word in words {
            *word = factorial::factorial(*word);
        }
    }
}
