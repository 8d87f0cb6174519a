//! Time from doorbell to semaphore, on a busy channel.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;
use serde_json::json;
use system_tests::outcome::{Outcome, measuring, report};
use system_tests::parent::{Parent, Vgpu};
use vgpu_guest::channel::Channel;
use vgpu_guest::fence::WaitPolicy;
use vgpu_guest::pushbuffer::Methods;

/// Promised median.
const P50: Duration = Duration::from_micros(10);
/// Minimum number of doorbells per trapped doorbell. The channel is idle between two round trips.
/// If the host then takes the CPU from the guest for longer than the GPU polls, the GPU sleeps and
/// must be woken. The `shares` benchmark checks that no doorbell traps while work is queued.
const DOORBELLS_PER_TRAP: usize = 1000;

fn main() -> ExitCode {
    report("doorbell", run)
}

fn run() -> Result<Outcome> {
    let count = if measuring() { 100_000 } else { 1000 };
    let mut parent = Parent::start(64 * MIB)?;
    let guest = parent.guest(Vgpu::default())?;
    let mut channel = Channel::new(&guest.device, EngineKind::Copy)?;
    channel.set_wait_policy(WaitPolicy::spinning());
    let methods = Methods::new();
    for _ in 0..count / 10 {
        channel.run(&methods)?;
    }
    let trapped = guest.device.trapped_doorbells();
    let wakes = channel.counters().wakes;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        channel.run(&methods)?;
        times.push(start.elapsed());
    }
    let trapped = guest.device.trapped_doorbells().wrapping_sub(trapped);
    let wakes = channel.counters().wakes - wakes;
    times.sort();
    let at = |hundredths: usize| times[(count * hundredths / 100).min(count - 1)];
    let (p50, p99) = (at(50), at(99));
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    Ok(Outcome {
        line: format!(
            "to semaphore p50 {:.2} us, p99 {:.2} us of {count}, {trapped} trapped (promised p50 {} us)",
            us(p50),
            us(p99),
            us(P50)
        ),
        facts: json!({"count": count, "p50_us": us(p50), "p99_us": us(p99), "trapped": trapped, "wakes": wakes}),
        kept: p50 <= P50 && trapped as usize * DOORBELLS_PER_TRAP <= count,
    })
}
