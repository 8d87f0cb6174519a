//! Workers that die on a real NVIDIA GPU, under VMs that work; skipped on machines without one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::calibration::calibrate_under_load;
use system_tests::vgpuctl::vgpuctl_json;
use system_tests::{Vgpud, is_alive, kill_process, wait_for};
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::memory::Home;
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::{self, Work, copy::Copy, fill::Fill, spin::Spin};

use super::nvidia::{attach, there_is_a_gpu};
use system_tests::worker_deaths::worker;

/// Kernels that are queued in each round, and the length of each.
const KERNELS: u32 = 300;
const KERNEL: Duration = Duration::from_millis(5);
/// Rounds, and workers that are killed in each.
const ROUNDS: u32 = 10;
const KILLS: u32 = 10;
/// Upgrades of the worker while the kernels of another round run.
const UPGRADES: u32 = 4;
/// Longest time after a death until a new ring has its effect.
const RING_LIMIT: Duration = Duration::from_millis(100);

/// A manager with one vGPU.
struct Vgpu {
    vgpud: Vgpud,
    uuid: String,
}

impl Vgpu {
    fn start(attrs: &Value) -> Result<Self> {
        let vgpud = Vgpud::start_with(&["--parent", "nvidia"])?;
        let parents = vgpud.get("/v1/parents")?;
        let parent = parents[0]["name"].as_str().context("No parent")?;
        let model = parents[0]["model"].as_str().context("No model")?;
        let mdev_type = format!("{model}-1C");
        let request =
            json!({ "parent": parent, "mdev_type": mdev_type, "attrs": attrs, "run": true });
        let uuid = vgpud.create(&request)?;
        Ok(Self { vgpud, uuid })
    }

    /// Kills the worker. Returns its process.
    fn kill(&self) -> Result<u32> {
        let before = worker(&self.vgpud, &self.uuid)?;
        kill_process(before, Signal::SIGKILL)?;
        Ok(before)
    }

    /// Waits for the worker after the one with this process.
    fn await_next(&self, before: u32) -> Result<()> {
        let anchor = self.vgpud.anchor(&self.uuid)?;
        wait_for("another worker runs", || {
            let next = worker(&self.vgpud, &self.uuid);
            next.is_ok_and(|pid| pid != before && pid != anchor && is_alive(pid))
        })
    }

    /// Returns the engine time of kernels in nanoseconds that is charged, once it does not change
    /// any more.
    fn charged(&self) -> Result<u64> {
        let mut last = None;
        for _ in 0..50 {
            thread::sleep(Duration::from_millis(300));
            let stats = self.vgpud.get("/v1/stats")?;
            let all = stats["vgpus"].as_array().cloned().unwrap_or_default();
            let own = all.into_iter().find(|vgpu| vgpu["uuid"] == self.uuid.as_str());
            let charged = own.and_then(|vgpu| vgpu["engines"]["compute_ns"].as_u64());
            let charged = charged.with_context(|| format!("No engine time in {stats:#}"))?;
            if last == Some(charged) {
                return Ok(charged);
            }
            last = Some(charged);
        }
        anyhow::bail!("The engine time does not come to rest: {last:?}")
    }
}

/// Queues kernels. Returns the charged part of the time that they take: the engine is busy all the
/// time. `meanwhile` is called while they run.
fn round(
    vgpu: &Vgpu,
    channel: &mut Channel,
    spin: &Spin,
    meanwhile: impl FnOnce() -> Result<()>,
) -> Result<f64> {
    let before = vgpu.charged()?;
    spin.prepare();
    let mut methods = Methods::new();
    spin.push(&mut methods);
    let since = Instant::now();
    for _ in 0..KERNELS {
        channel.submit(&methods)?;
    }
    meanwhile()?;
    ensure!(spin.launches()? < KERNELS, "the kernels end too early");
    channel.wait_idle()?;
    let took = since.elapsed();
    ensure!(spin.launches()? == KERNELS, "{} of {KERNELS} kernels", spin.launches()?);
    let charged = Duration::from_nanos(vgpu.charged()? - before);
    let part = charged.as_secs_f64() / took.as_secs_f64();
    println!("{KERNELS} kernels took {took:?}, charged {charged:?}: {part:.4}");
    Ok(part)
}

#[test]
fn queued_kernels_run_on_while_workers_die() -> Result<()> {
    if !there_is_a_gpu() {
        return Ok(());
    }
    let vgpu = Vgpu::start(&json!([]))?;
    let device = attach(&vgpu.vgpud, &vgpu.uuid)?;
    let mut channel = Channel::with_entries(&device, EngineKind::Compute, 512)?;
    let mut spin = Spin::new(&device, 1000)?;
    let each = calibrate_under_load(&mut spin, &mut channel, KERNEL)?;
    println!("kernels take {each:?}");
    let mut copies = Channel::new(&device, EngineKind::Copy)?;
    let copy = Copy::new(&device, MIB)?;
    work::run(&copy, &mut copies)?;
    let undisturbed = round(&vgpu, &mut channel, &spin, || Ok(()))?;
    let (mut rings, mut worst) = (Vec::new(), 0.0_f64);
    for _ in 0..ROUNDS {
        let charged = round(&vgpu, &mut channel, &spin, || {
            for _ in 0..KILLS {
                let before = vgpu.kill()?;
                let since = Instant::now();
                work::run(&copy, &mut copies)?;
                rings.push(since.elapsed());
                vgpu.await_next(before)?;
                thread::sleep(Duration::from_millis(20));
            }
            Ok(())
        })?;
        worst = worst.max((charged / undisturbed - 1.0).abs());
    }
    let upgraded = round(&vgpu, &mut channel, &spin, || {
        for _ in 0..UPGRADES {
            let before = worker(&vgpu.vgpud, &vgpu.uuid)?;
            let upgraded = vgpuctl_json(&vgpu.vgpud, "upgrade --output json")?;
            ensure!(upgraded[0]["pid_before"] == before, "{upgraded}");
            work::run(&copy, &mut copies)?;
        }
        Ok(())
    })?;
    worst = worst.max((upgraded / undisturbed - 1.0).abs());
    rings.sort_unstable();
    let (middle, longest) = (rings[rings.len() / 2], rings[rings.len() - 1]);
    println!("from death to a new ring's effect: p50 {middle:?}, longest {longest:?}");
    println!("charged time differs by at most {:.2} %", worst * 100.0);
    println!("{:#}", vgpu.vgpud.get("/v1/stats")?);
    ensure!(longest <= RING_LIMIT, "a new ring took {longest:?}");
    ensure!(worst <= 0.01, "charged time differs by {:.2} %", worst * 100.0);
    Ok(())
}

/// Creates channels and memory, works with checked results, and frees them, until told to stop.
fn create_and_work(device: &Device, stop: &AtomicBool) -> Result<u32> {
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        for engine in [EngineKind::Copy, EngineKind::Compute] {
            let mut channel = Channel::new(device, engine)?;
            work::run(&Copy::new(device, MIB)?, &mut channel)?;
            work::run(&Fill::new(device, Home::Guest, 1000)?, &mut channel)?;
        }
        rounds += 1;
    }
    Ok(rounds)
}

#[test]
fn requests_of_vms_are_carried_out_once_wherever_workers_die() -> Result<()> {
    if !there_is_a_gpu() {
        return Ok(());
    }
    let vgpu = Vgpu::start(&json!([]))?;
    let device = attach(&vgpu.vgpud, &vgpu.uuid)?;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let guest = scope.spawn(|| create_and_work(&device, &stop));
        for number in 0..60_u64 {
            thread::sleep(Duration::from_millis(40 + number * 37 % 60));
            if guest.is_finished() {
                break;
            }
            let before = vgpu.kill()?;
            vgpu.await_next(before)?;
        }
        stop.store(true, Ordering::Relaxed);
        let rounds = guest.join().ok().context("The guest panicked")??;
        println!("{rounds} rounds of channels between 60 deaths");
        ensure!(rounds > 10, "only {rounds} rounds");
        anyhow::Ok(())
    })?;
    wait_for("no channel is left", || {
        let stats = vgpu.vgpud.get("/v1/stats").unwrap_or_default();
        let own = stats["vgpus"].as_array().and_then(|all| all.first()).cloned();
        own.is_some_and(|vgpu| vgpu["channels"] == 0 && vgpu["faults"] == 0)
    })
}

#[test]
fn a_capped_vgpu_keeps_its_cap_while_workers_die() -> Result<()> {
    if !there_is_a_gpu() {
        return Ok(());
    }
    let vgpu = Vgpu::start(&json!([{ "core": "50" }, { "mode": "hard" }]))?;
    let device = attach(&vgpu.vgpud, &vgpu.uuid)?;
    let mut channel = Channel::with_entries(&device, EngineKind::Compute, 1024)?;
    let mut spin = Spin::new(&device, 1000)?;
    spin.calibrate(&mut channel, Duration::from_millis(1))?;
    spin.prepare();
    let mut methods = Methods::new();
    spin.push(&mut methods);
    // Returns kernels per second while workers are killed.
    let mut rate = |kills: u32| -> Result<f64> {
        channel.wait_idle()?;
        let (before, since) = (spin.launches()?, Instant::now());
        let mut last_kill = Instant::now();
        let mut killed = 0;
        while since.elapsed() < Duration::from_secs(4) {
            for _ in 0..64 {
                channel.submit(&methods)?;
            }
            if killed < kills && last_kill.elapsed() > Duration::from_millis(100) {
                let dead = vgpu.kill()?;
                vgpu.await_next(dead)?;
                (last_kill, killed) = (Instant::now(), killed + 1);
            }
        }
        let done = spin.blocks() / work::spin::BLOCKS - before;
        Ok(f64::from(done) / since.elapsed().as_secs_f64())
    };
    let undisturbed = rate(0)?;
    let disturbed = rate(30)?;
    println!("with a cap: {undisturbed:.0} kernels/s without deaths, {disturbed:.0} with 30");
    ensure!((disturbed / undisturbed - 1.0).abs() < 0.05, "{disturbed:.0}, were {undisturbed:.0}");
    let usage = vgpu.vgpud.get("/v1/stats")?;
    let closings = usage["vgpus"][0]["gate_closings"].as_u64();
    ensure!(closings.is_some_and(|closings| closings > 10), "the gate was not in use: {usage:#}");
    Ok(())
}

/// The manager and the worker die together, and the next manager charges and schedules the next
/// worker.
#[test]
fn managers_and_workers_die_together() -> Result<()> {
    if !there_is_a_gpu() {
        return Ok(());
    }
    let mut vgpu = Vgpu::start(&json!([]))?;
    let device = attach(&vgpu.vgpud, &vgpu.uuid)?;
    let mut channel = Channel::with_entries(&device, EngineKind::Compute, 512)?;
    let mut spin = Spin::new(&device, 1000)?;
    calibrate_under_load(&mut spin, &mut channel, Duration::from_millis(1))?;
    let mut methods = Methods::new();
    spin.push(&mut methods);
    for number in 0..10 {
        spin.prepare();
        for _ in 0..KERNELS {
            channel.submit(&methods)?;
        }
        let before = vgpu.kill()?;
        if number % 2 == 0 {
            thread::sleep(Duration::from_millis(number * 3));
        }
        vgpu.vgpud.end(Signal::SIGKILL)?;
        vgpu.vgpud.start_again()?;
        vgpu.await_next(before)?;
        channel.wait_idle()?;
        ensure!(spin.launches()? == KERNELS, "{} of {KERNELS} kernels", spin.launches()?);
        let charged = vgpu.charged()?;
        channel.run(&methods)?;
        thread::sleep(Duration::from_millis(500));
        let more = vgpu.charged()? - charged;
        println!("after {number}: charged {charged} ns, and {more} ns for one kernel");
        ensure!(more > 0, "the manager does not charge the worker that follows");
    }
    Ok(())
}
