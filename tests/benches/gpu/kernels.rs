//! One kernel, launched many times in succession.

use std::time::Instant;

use anyhow::Result;
use mdev_core::abi::{compute, host::SUBCHANNEL_COMPUTE};
use mdev_core::gpu::EngineKind;
use serde::{Deserialize, Serialize};
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::Work;
use vgpu_guest::work::sgemm::Sgemm;
use vgpu_guest::work::spin::Spin;

use crate::solo::FILLING;

/// Kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Which {
    /// Spin with this many iterations, in blocks that fill an H100.
    Spin(u32),
    /// Matrix product with this many rows.
    Product(u32),
}

/// Kernel and number of launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelSpec {
    /// Kernel.
    pub which: Which,
    /// Number of launches.
    pub count: u32,
    /// Number of launches per submission.
    pub batch: u32,
    /// Whether to wait for each submission before the next.
    pub waits: bool,
}

impl KernelSpec {
    /// Returns the arguments for `cuda.c`.
    pub fn line(&self) -> String {
        let Self { which, count, .. } = self;
        match which {
            Which::Spin(iterations) => {
                format!("spin {} 1 {} 1 {iterations} 4096 {count}", FILLING.0, FILLING.1)
            }
            Which::Product(rows) => {
                let (blocks, bytes) = (rows.div_ceil(16), u64::from(*rows) * u64::from(*rows) * 4);
                format!("sgemm {blocks} {blocks} 16 16 {rows} {bytes} {count}")
            }
        }
    }
}

/// Returns the time of one launch in microseconds.
pub fn measure(device: &Device, spec: &KernelSpec) -> Result<f64> {
    let work: Box<dyn Work> = match spec.which {
        Which::Spin(iterations) => {
            Box::new(Spin::resident(device, iterations, FILLING.0, FILLING.1)?)
        }
        Which::Product(rows) => Box::new(Sgemm::resident(device, rows)?),
    };
    let mut channel = Channel::new(device, EngineKind::Compute)?;
    let mut methods = Methods::new();
    for launch in 0..spec.batch {
        if launch > 0 {
            // Serialized, as in a CUDA stream.
            methods.push(SUBCHANNEL_COMPUTE, compute::WAIT_FOR_IDLE, &[0]);
        }
        work.push(&mut methods);
    }
    let mut took = 0.0;
    // The first round raises the clocks.
    for _ in 0..2 {
        let begun = Instant::now();
        for _ in 0..spec.count / spec.batch {
            channel.submit(&methods)?;
            if spec.waits {
                channel.wait_idle()?;
            }
        }
        channel.wait_idle()?;
        took = begun.elapsed().as_secs_f64();
    }
    Ok(took * 1e6 / f64::from(spec.count / spec.batch * spec.batch))
}
