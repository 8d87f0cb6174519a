//! Copies through a channel, compared with memcpy of the same memory, alternating.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;
use serde_json::json;
use system_tests::outcome::{Outcome, measuring, report};
use system_tests::parent::{Parent, Vgpu};
use vgpu_guest::channel::Channel;
use vgpu_guest::copy;
use vgpu_guest::memory::Buffer;
use vgpu_guest::pushbuffer::Methods;

/// Promised ratio.
const RATIO: f64 = 0.9;

fn main() -> ExitCode {
    report("copy", run)
}

fn run() -> Result<Outcome> {
    let (len, rounds) = if measuring() { (256 * MIB, 9) } else { (4 * MIB, 3) };
    let mut parent = Parent::start(64 * MIB)?;
    let ram = 2 * len + 16 * MIB;
    let guest = parent.guest(Vgpu { ram, piece: 2 * MIB, ..Vgpu::default() })?;
    let from = Buffer::guest(&guest.device, len)?;
    let to = Buffer::guest(&guest.device, len)?;
    let mut channel = Channel::new(&guest.device, EngineKind::Copy)?;
    let mut methods = Methods::new();
    copy::linear(&mut methods, to.va(), from.va(), len);
    let (mut by_cpu, mut by_gpu) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let stamp = u8::try_from(round)?;
        from.window().fill(stamp);
        let start = Instant::now();
        // SAFETY: two buffers of this length that stay mapped; no work is in flight.
        unsafe {
            let (to, from) = (to.window().as_ptr(), from.window().as_ptr());
            std::ptr::copy_nonoverlapping(from, to, len as usize);
        }
        let cpu = start.elapsed();
        to.window().fill(0xff);
        let start = Instant::now();
        channel.run(&methods)?;
        let gpu = start.elapsed();
        let last: Vec<u8> = to.load(len - 4096, 4096);
        anyhow::ensure!(last.iter().all(|&byte| byte == stamp), "The copy is wrong");
        // The first round touches the memory for the first time.
        if round > 0 {
            by_cpu.push(cpu);
            by_gpu.push(gpu);
        }
    }
    let (cpu, gpu) = (median(&mut by_cpu), median(&mut by_gpu));
    let rate = |time: Duration| len as f64 / time.as_secs_f64() / 1e9;
    let ratio = cpu.as_secs_f64() / gpu.as_secs_f64();
    Ok(Outcome {
        line: format!(
            "{} MiB: {:.2} GB/s through a channel, {:.2} by memcpy, ratio {ratio:.3} (promised {RATIO})",
            len / MIB,
            rate(gpu),
            rate(cpu)
        ),
        facts: json!({"bytes": len, "channel_gb_s": rate(gpu), "memcpy_gb_s": rate(cpu), "ratio": ratio}),
        kept: ratio >= RATIO,
    })
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort();
    times[times.len() / 2]
}
