//! From the doorbell to the semaphore, on a channel that is kept busy.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;
use serde_json::json;
use system_tests::outcome::{Outcome, measuring, report};
use system_tests::parent::{Parent, Vgpu};
use vgpu_guest::channel::Channel;
use vgpu_guest::fence::Patience;
use vgpu_guest::pushbuffer::Methods;

/// What is promised for the median.
const P50: Duration = Duration::from_micros(10);
/// Doorbells per trapped one, at least. The channel is idle between two round trips: where the host takes the CPU from
/// the guest just then, for longer than the silicon polls, it sleeps and has to be woken. That no doorbell is trapped
/// while work is queued is what the `shares` benchmark holds.
const DOORBELLS_PER_TRAP: usize = 1000;

fn main() -> ExitCode {
    report("doorbell", run)
}

fn run() -> Result<Outcome> {
    let count = if measuring() { 100_000 } else { 1000 };
    let mut parent = Parent::start(64 * MIB)?;
    let guest = parent.guest(Vgpu::default())?;
    let mut channel = Channel::new(&guest.device, EngineKind::Copy)?;
    channel.set_patience(Patience::spinning());
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
