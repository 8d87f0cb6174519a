//! One kernel, launched many times on end.

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

/// Which kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Which {
    /// A spin of so many iterations, in blocks that fill an H100.
    Spin(u32),
    /// A matrix product of so many rows.
    Product(u32),
}

/// How often to launch it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelSpec {
    /// Which.
    pub which: Which,
    /// Launches.
    pub count: u32,
    /// Of those, how many are submitted together.
    pub batch: u32,
}

impl KernelSpec {
    /// The same for `cuda.c`.
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

/// Microseconds of one launch.
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
            // One after the other, as in a stream of CUDA's.
            methods.push(SUBCHANNEL_COMPUTE, compute::WAIT_FOR_IDLE, &[0]);
        }
        work.push(&mut methods);
    }
    let mut took = 0.0;
    // The first round brings the clocks up.
    for _ in 0..2 {
        let begun = Instant::now();
        for _ in 0..spec.count / spec.batch {
            channel.submit(&methods)?;
        }
        channel.wait_idle()?;
        took = begun.elapsed().as_secs_f64();
    }
    Ok(took * 1e6 / f64::from(spec.count / spec.batch * spec.batch))
}
