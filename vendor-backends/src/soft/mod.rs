//! The software GPU: the CPU as a device that [`crate::mediator`] drives. It has memory and every engine there is.

pub mod vram;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mdev_core::gpu::{ClientSpec, GpuCapabilities, GpuDescription, Quotas};
use mdev_core::units::{GIB, MIB, PAGE_SIZE, is_aligned};

use self::vram::Vram;
use crate::mediator::hardware::{Partition, PartitionMemory};
use crate::mediator::wire::Refusal;
use crate::mediator::{Hardware, server};
use crate::mem::SharedMemory;
use crate::seqpacket::SeqPacketListener;

/// Channels that one vGPU may have.
const MAX_CHANNELS: u32 = 32;
/// VGPUs of one GPU.
const MAX_VGPUS: u32 = 256;
/// Most guest memory of one vGPU.
const MAX_IMPORT: u64 = 4096 * GIB;
/// Default time slice.
const DEFAULT_SLICE: Duration = Duration::from_millis(2);

/// What a software GPU's process is started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The parent's name: `soft0`.
    pub name: String,
    /// Video memory that vGPUs may share, in bytes.
    pub vram_bytes: u64,
    /// How long it stays with neither a manager nor a vGPU.
    pub grace: Duration,
}

/// Is a software GPU, until there has been neither a manager nor a vGPU for [`Config::grace`].
pub fn run(config: &Config, admin: &SeqPacketListener) -> io::Result<()> {
    let gpu = SoftGpu::new(&config.name, config.vram_bytes);
    server::run(Arc::new(gpu), config.grace, admin)
}

/// One software GPU.
#[derive(Debug)]
pub struct SoftGpu {
    description: GpuDescription,
    vram: Vram,
}

impl SoftGpu {
    /// One with so much video memory.
    pub fn new(name: &str, vram_bytes: u64) -> Self {
        Self {
            description: GpuDescription {
                parent: name.into(),
                model: "SOFT".into(),
                name: "Tessera software GPU".into(),
                vram_bytes,
                // It has no screen of its own.
                capabilities: GpuCapabilities::all()
                    .difference(GpuCapabilities::SCANOUT)
                    .difference(GpuCapabilities::EXACT_SLICES),
                max_vgpus: MAX_VGPUS,
                max_channels: MAX_CHANNELS,
                max_import_bytes: MAX_IMPORT,
                default_timeslice: DEFAULT_SLICE,
                hang_timeout: Some(Quotas::DEFAULT_HANG_TIMEOUT),
            },
            vram: Vram::new(vram_bytes),
        }
    }
}

impl Hardware for SoftGpu {
    fn describe(&self) -> &GpuDescription {
        &self.description
    }

    /// A file of memory, new and so all zero.
    fn partition(&self, spec: &ClientSpec) -> Result<Partition, Refusal> {
        if spec.vram_bytes == 0
            || !is_aligned(spec.vram_bytes, MIB)
            || !is_aligned(spec.framebuffer_bytes, PAGE_SIZE)
            || spec.framebuffer_bytes > spec.vram_bytes
            || spec.max_import_bytes > MAX_IMPORT
        {
            return Err(Refusal::Spec);
        }
        let claim = self.vram.take(spec.vram_bytes)?;
        let SharedMemory { fd, mapping } = SharedMemory::new(c"vgpu-vram", spec.vram_bytes)?;
        let memory = PartitionMemory { mapping, fd, offset: 0 };
        Ok(Partition { memory: Some(memory), hold: Box::new(claim) })
    }
}
