//! Every job of the guest runtime, with results compared with the CPU's.

use anyhow::Result;
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;
use vgpu_guest::GuestError;
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::memory::{Buffer, Home};
use vgpu_guest::work::copy::{Copy, Rectangle};
use vgpu_guest::work::fill::Fill;
use vgpu_guest::work::mandelbrot::Mandelbrot;
use vgpu_guest::work::saxpy::Saxpy;
use vgpu_guest::work::sgemm::Sgemm;
use vgpu_guest::work::vadd::VectorAdd;
use vgpu_guest::work::{self, Work};

use crate::solo::spin;

/// Constructor of a job.
type Make = fn(&Device) -> Result<Box<dyn Work>, GuestError>;

const JOBS: [(&str, EngineKind, Make); 9] = [
    ("copy", EngineKind::Copy, |device| Ok(Box::new(Copy::new(device, 4 * MIB)?))),
    ("fill", EngineKind::Copy, |device| Ok(Box::new(Fill::new(device, Home::Guest, 100_003)?))),
    ("rectangle", EngineKind::Copy, |device| Ok(Box::new(Rectangle::new(device)?))),
    ("copy on a compute channel", EngineKind::Compute, |device| {
        Ok(Box::new(Copy::new(device, MIB)?))
    }),
    ("vector add", EngineKind::Compute, |device| {
        Ok(Box::new(VectorAdd::new(device, Home::Guest, 100_003)?))
    }),
    ("saxpy", EngineKind::Compute, |device| {
        Ok(Box::new(Saxpy::new(device, Home::Guest, 100_003)?))
    }),
    ("matrix product", EngineKind::Compute, |device| {
        Ok(Box::new(Sgemm::new(device, Home::Guest, 133)?))
    }),
    ("mandelbrot", EngineKind::Compute, |device| {
        let surface = Buffer::guest(device, 4 * 320 * 200)?;
        Ok(Box::new(Mandelbrot::new(device, surface, (320, 200), 4 * 320)?))
    }),
    ("spin", EngineKind::Compute, |device| Ok(Box::new(spin(device, 10_000)?))),
];

/// Runs each job on a separate channel, so that a failure does not affect the others, and returns
/// the results.
pub fn run(device: &Device) -> Vec<(String, Result<String, String>)> {
    let one = |engine, make: Make| -> Result<String, GuestError> {
        let job = make(device)?;
        // Runs twice: stale caches of the first run must not affect the second.
        let mut channel = Channel::new(device, engine)?;
        work::run(&*job, &mut channel)?;
        Ok(work::run(&*job, &mut channel)?.to_string())
    };
    JOBS.iter()
        .map(|(name, engine, make)| {
            ((*name).to_owned(), one(*engine, *make).map_err(|error| error.to_string()))
        })
        .collect()
}
