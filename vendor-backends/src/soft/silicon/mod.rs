//! The software silicon: memory, address spaces, channels, the runlist and the engine.
//!
//! From the outside in:
//!
//! * [`Silicon`]: one GPU, its description and its vGPUs
//! * [`vgpu`]: one vGPU; [`vram`], [`address_space`], [`mem`]: its memory; [`signals`]: its interrupts
//! * [`engine`], [`runlist`], [`quota`], [`clock`]: who runs when
//! * [`channel`], [`method`]: rings and pushbuffers; [`host`], [`copy`], [`compute`], [`kernels`]: what methods do
//! * [`fault`], [`counters`]: how a channel ends; what is counted

pub mod address_space;
pub mod channel;
pub mod clock;
pub mod compute;
pub mod copy;
pub mod counters;
pub mod engine;
pub mod fault;
pub mod host;
#[cfg(test)]
mod hostile;
pub mod kernels;
pub mod mem;
pub mod method;
pub mod quota;
pub mod runlist;
pub mod signals;
pub mod vgpu;
pub mod vram;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mdev_core::gpu::{ClientSpec, GpuCapabilities, GpuDescription, UsageReport};
use mdev_core::ids::VgpuId;
use mdev_core::units::{GIB, MIB, is_aligned};

use self::engine::{Board, Engine};
use self::vgpu::{Shared, Vgpu};
use self::vram::Vram;
use super::wire::Refusal;

/// Channels that one vGPU may have.
const MAX_CHANNELS: u32 = 32;
/// VGPUs of one GPU.
const MAX_VGPUS: usize = 256;
/// Most guest memory of one vGPU.
const MAX_IMPORT: u64 = 4096 * GIB;
/// Default time slice.
const DEFAULT_SLICE: Duration = Duration::from_millis(2);

/// One software GPU.
#[derive(Debug)]
pub struct Silicon {
    description: GpuDescription,
    vram: Vram,
    board: Arc<Board>,
    _engine: Engine,
}

impl Silicon {
    /// Makes one and starts its engine.
    pub fn new(name: &str, vram_bytes: u64) -> io::Result<Self> {
        let board = Arc::new(Board::new()?);
        Ok(Self {
            description: GpuDescription {
                parent: name.into(),
                model: "SOFT".into(),
                name: "Tessera software GPU".into(),
                vram_bytes,
                capabilities: GpuCapabilities::all(),
                max_channels: MAX_CHANNELS,
                default_timeslice: DEFAULT_SLICE,
            },
            vram: Vram::new(vram_bytes),
            _engine: Engine::start(Arc::clone(&board))?,
            board,
        })
    }

    /// What it is.
    pub fn describe(&self) -> &GpuDescription {
        &self.description
    }

    /// Makes room for a vGPU.
    pub fn admit(&self, spec: &ClientSpec) -> Result<(Arc<Vgpu>, Shared), Refusal> {
        let whole = |bytes| is_aligned(bytes, MIB);
        if spec.vram_bytes == 0
            || !whole(spec.vram_bytes)
            || !is_aligned(spec.framebuffer_bytes, mdev_core::units::PAGE_SIZE)
            || spec.framebuffer_bytes > spec.vram_bytes
            || spec.max_import_bytes > MAX_IMPORT
        {
            return Err(Refusal::Spec);
        }
        let partition = self.vram.take(spec.vram_bytes)?;
        let (vgpu, shared) =
            Vgpu::new(spec.clone(), MAX_CHANNELS, DEFAULT_SLICE, partition, self.board.kick())?;
        let vgpu = Arc::new(vgpu);
        self.board.update(|vgpus| {
            if vgpus.iter().any(|other| other.id() == spec.vgpu) {
                return Err(Refusal::VgpuExists);
            }
            if vgpus.len() >= MAX_VGPUS {
                return Err(Refusal::VgpuLimit);
            }
            vgpus.push(Arc::clone(&vgpu));
            Ok(())
        })?;
        Ok((vgpu, shared))
    }

    /// The vGPU with this id.
    pub fn find(&self, id: VgpuId) -> Result<Arc<Vgpu>, Refusal> {
        self.board.list().into_iter().find(|vgpu| vgpu.id() == id).ok_or(Refusal::NoVgpu)
    }

    /// Takes everything from a vGPU and forgets it.
    pub fn evict(&self, vgpu: &Arc<Vgpu>) {
        vgpu.evict();
        self.board.update(|vgpus| vgpus.retain(|other| !Arc::ptr_eq(other, vgpu)));
    }

    /// All counters.
    pub fn usage(&self) -> UsageReport {
        let vgpus = self.board.list();
        let usage = vgpus.iter().map(|vgpu| (vgpu.id(), vgpu.usage())).collect();
        UsageReport { now_ns: clock::now_ns(), vgpus: usage }
    }
}
