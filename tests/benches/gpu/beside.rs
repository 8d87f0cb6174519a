//! A channel that is made while another of the same vGPU has all the work it can do.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mdev_core::gpu::EngineKind;
use serde::{Deserialize, Serialize};
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::fence::Patience;
use vgpu_guest::pushbuffer::Methods;

/// How long one command may take at most.
const PATIENCE: Duration = Duration::from_secs(5);

/// What to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BesideSpec {
    /// A compute channel, or else one for copies.
    pub compute: bool,
    /// Commands that it is then given, one after the other.
    pub trips: u32,
}

/// How it went.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Beside {
    /// How long it took until it had run its first commands, in milliseconds.
    pub made_ms: f64,
    /// The longest that one of the others took, in milliseconds.
    pub worst_ms: f64,
}

/// Makes it, and uses it.
pub fn measure(device: &Device, spec: BesideSpec) -> Result<Beside> {
    let engine = if spec.compute { EngineKind::Compute } else { EngineKind::Copy };
    let begun = Instant::now();
    let mut channel = Channel::new(device, engine).context("It does not get going")?;
    let made = begun.elapsed();
    channel.set_patience(Patience { limit: PATIENCE, ..Patience::default() });
    let mut worst = Duration::ZERO;
    for trip in 0..spec.trips {
        let begun = Instant::now();
        channel.run(&Methods::new()).with_context(|| format!("Command {trip}"))?;
        worst = worst.max(begun.elapsed());
    }
    Ok(Beside { made_ms: made.as_secs_f64() * 1e3, worst_ms: worst.as_secs_f64() * 1e3 })
}
