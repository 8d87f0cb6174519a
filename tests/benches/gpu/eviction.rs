//! The end of a vGPU whose guest has much memory imported: the GPU's driver unpins each page.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use mdev_core::units::{GIB, MIB};
use serde_json::json;
use system_tests::Vgpud;
use vgpu_guest::device::Device;
use vgpu_guest::memory::Buffer;

use crate::tenant::{self, Order};
use crate::{Bench, MIDDLE};

/// Size of one import.
const PIECE: u64 = 256 * MIB;
/// Memory of the guest beside what it imports, in MiB.
const MORE_RAM: u64 = 64;
/// Pause between two requests to the manager.
const PAUSE: Duration = Duration::from_millis(5);
/// Longest time for an answer of the manager.
const ANSWER: Duration = Duration::from_millis(100);
/// Longest time for the end of the vGPU.
const END: Duration = Duration::from_secs(300);
/// Throughput that the other vGPU must keep.
const KEPT: f64 = 0.95;

/// Imports guest memory, for as long as the result lives.
pub fn import(device: &Device, gib: u64) -> Result<Vec<Buffer>> {
    (0..gib * GIB / PIECE).map(|_| Ok(Buffer::guest(device, PIECE)?)).collect()
}

/// Returns three quarters of the memory that is available here, in GiB.
pub fn available_gib() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)).context("No MemAvailable")?;
    Ok(kib.parse::<u64>()? * 3 / 4 / (GIB / 1024))
}

impl Bench<'_> {
    /// Stops a vGPU with imported memory while another one works.
    pub fn eviction(&mut self, gib: u64) -> Result<()> {
        let mut fleet = self.fleet(gib * 1024 + MORE_RAM, &[json!([]), json!([])])?;
        let begun = Instant::now();
        fleet.tenants[1].tell(&Order::Import(gib))?;
        fleet.tenants[1].hear::<()>().with_context(|| format!("Cannot import {gib} GiB"))?;
        let imported = begun.elapsed().as_secs_f64();
        let loads = [self.kernels(MIDDLE)];
        self.start_loads_of(&mut fleet.tenants[..1], &loads)?;
        let before = tenant::measure(&mut fleet.tenants[..1], self.window)?;
        let stop = format!("/v1/vgpus/{}/stop", fleet.uuid(1));
        let (tenants, diary) = fleet.parts();
        let vgpud = diary.vgpud;
        let done = AtomicBool::new(false);
        let (during, stopped, slowest) = thread::scope(|scope| {
            let asker = scope.spawn(|| slowest_answer(vgpud, &done));
            let stopper = scope.spawn(|| {
                let begun = Instant::now();
                // The request may end first: the driver releases the memory of large VMs for
                // longer.
                let _ = vgpud.request("POST", &stop, Some(&json!({ "force": true })));
                while vgpud.get("/v1/vgpus")?.as_array().map_or(0, Vec::len) > 1 {
                    ensure!(begun.elapsed() < END, "The vGPU has not ended in {END:?}");
                    thread::sleep(PAUSE);
                }
                anyhow::Ok(begun.elapsed())
            });
            let during = tenant::measure(&mut tenants[..1], self.window);
            let stopped = stopper.join();
            done.store(true, Ordering::Relaxed);
            (during, stopped, asker.join())
        });
        let panicked = || anyhow::anyhow!("A thread has panicked");
        let stopped = stopped.map_err(|_| panicked())??;
        let slowest = slowest.map_err(|_| panicked())??;
        let during = during?;
        let part = during[0].kernels / before[0].kernels;
        let seen = format!(
            "stopped in {:.2} s, manager answers within {:.0} ms, the other does {:.1} %, stall {:.0} ms",
            stopped.as_secs_f64(),
            slowest.as_secs_f64() * 1e3,
            part * 100.0,
            during[0].stall_ms
        );
        let what = format!("end of a vGPU with {gib} GiB imported");
        let kept = slowest <= ANSWER && part >= KEPT;
        self.row(&what, format!("imported in {imported:.1} s"), seen, "100 ms, 95 %".into(), kept);
        Ok(())
    }
}

/// Asks the manager until `done`, and returns the longest time for an answer.
fn slowest_answer(vgpud: &Vgpud, done: &AtomicBool) -> Result<Duration> {
    let mut slowest = Duration::ZERO;
    while !done.load(Ordering::Relaxed) {
        let begun = Instant::now();
        vgpud.get("/v1/stats")?;
        slowest = slowest.max(begun.elapsed());
        thread::sleep(PAUSE);
    }
    Ok(slowest)
}
