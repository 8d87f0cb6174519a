//! A channel that is created while another channel of the same vGPU is fully loaded.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mdev_core::gpu::EngineKind;
use serde::{Deserialize, Serialize};
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::fence::WaitPolicy;
use vgpu_guest::pushbuffer::Methods;

/// Timeout of one command.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Channel to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BesideSpec {
    /// Whether the channel is for compute; otherwise for copies.
    pub compute: bool,
    /// Number of commands, one after another.
    pub trips: u32,
}

/// Result.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Beside {
    /// Time until the first commands have run, in milliseconds.
    pub made_ms: f64,
    /// Longest time of another command, in milliseconds.
    pub worst_ms: f64,
}

/// Creates the channel and runs the commands.
pub fn measure(device: &Device, spec: BesideSpec) -> Result<Beside> {
    let engine = if spec.compute { EngineKind::Compute } else { EngineKind::Copy };
    let begun = Instant::now();
    let mut channel = Channel::new(device, engine).context("It does not get going")?;
    let made = begun.elapsed();
    channel.set_wait_policy(WaitPolicy { limit: TIMEOUT, ..WaitPolicy::default() });
    let mut worst = Duration::ZERO;
    for trip in 0..spec.trips {
        let begun = Instant::now();
        channel.run(&Methods::new()).with_context(|| format!("Command {trip}"))?;
        worst = worst.max(begun.elapsed());
    }
    Ok(Beside { made_ms: made.as_secs_f64() * 1e3, worst_ms: worst.as_secs_f64() * 1e3 })
}
