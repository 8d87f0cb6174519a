//! Guests under load, and the engine time that the GPU gave them.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;
use vgpu_guest::bench::{self, Load, Measured};
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::{Work, spin::Spin};

use crate::Vgpud;
use crate::ram::Ram;
use crate::vfio_user_guest::VfioUserGuest;

/// Part of an interval in which a vGPU must have used or wanted the engine to count as busy.
const BUSY: f64 = 0.75;

/// Runs a guest on a vGPU for some seconds. The guest compares every result with the CPU's.
pub fn work(vgpud: &Vgpud, uuid: &str, seconds: u64) -> Result<JoinHandle<Result<Measured>>> {
    let ram = Ram::new(64 * MIB, 64 * MIB)?;
    let device = Device::open(Box::new(VfioUserGuest::attach(&vgpud.vfio_socket(uuid), ram)?))?;
    let load = Load { duration: Duration::from_secs(seconds), ..Load::default() };
    Ok(thread::spawn(move || Ok(bench::run(&device, &load)?)))
}

/// Checks that a load ended and that every result was right.
pub fn verified(work: JoinHandle<Result<Measured>>) -> Result<()> {
    let measured = work.join().ok().context("The load panicked")??;
    assert!(measured.verified > 0, "{measured:?}");
    Ok(())
}

/// A guest with endless work that needs no CPU: a kernel that never ends.
///
/// The vGPU needs `hang_timeout=off`. Dropping the value ends the kernel.
#[derive(Debug)]
pub struct Endless {
    _channel: Channel,
    _spin: Spin,
}

impl Endless {
    /// Starts the kernel.
    pub fn start(vgpud: &Vgpud, uuid: &str) -> Result<Self> {
        let ram = Ram::new(16 * MIB, 16 * MIB)?;
        let device = Device::open(Box::new(VfioUserGuest::attach(&vgpud.vfio_socket(uuid), ram)?))?;
        let mut channel = Channel::new(&device, EngineKind::Compute)?;
        let spin = Spin::new(&device, u32::MAX)?;
        let mut methods = Methods::new();
        spin.push(&mut methods);
        channel.submit(&methods)?;
        Ok(Self { _channel: channel, _spin: spin })
    }
}

/// Usage of one vGPU so far, in seconds.
#[derive(Clone, Copy, Debug)]
struct Used {
    engine: f64,
    /// Time in which the vGPU used or wanted the engine, including time that the host took from the
    /// engine.
    wanted: f64,
}

/// Reads the usage of each vGPU, in the order of `uuids`.
fn used(vgpud: &Vgpud, uuids: &[String]) -> Result<Vec<Used>> {
    let stats = vgpud.get("/v1/stats")?;
    let vgpus = stats["vgpus"].as_array().context("No statistics")?;
    let used = |uuid: &String| {
        let one = vgpus.iter().find(|one| one["uuid"] == uuid.as_str());
        let one = one.context("No such vGPU")?;
        let seconds = |name: &str| one[name].as_f64().map(|ns| ns / 1e9).context("No time");
        let engine = seconds("engine_ns")?;
        Ok(Used { engine, wanted: engine + seconds("wait_ns")? + seconds("stolen_ns")? })
    };
    uuids.iter().map(used).collect()
}

/// Returns the first vGPU's part of the engine time, in percent, while all vGPUs wanted the engine.
///
/// A share is promised to a vGPU that has work. On a loaded host a guest may fail to submit work;
/// such intervals do not count.
pub fn share(vgpud: &Vgpud, uuids: &[String]) -> Result<f64> {
    share_while(vgpud, uuids, uuids.len())
}

/// Returns the first vGPU's part while the first `wanting` vGPUs wanted the engine.
pub fn share_while(vgpud: &Vgpud, uuids: &[String], wanting: usize) -> Result<f64> {
    let (mut first, mut all, mut counted) = (0.0, 0.0, 0);
    for _ in 0..7 {
        let (begun, before) = (Instant::now(), used(vgpud, uuids)?);
        thread::sleep(Duration::from_millis(500));
        let after = used(vgpud, uuids)?;
        let wanted = begun.elapsed().as_secs_f64() * BUSY;
        let used: Vec<f64> = after.iter().zip(&before).map(|(a, b)| a.engine - b.engine).collect();
        let mut both = after.iter().zip(&before).take(wanting);
        if both.all(|(after, before)| after.wanted - before.wanted >= wanted) {
            first += used[0];
            all += used.iter().sum::<f64>();
            counted += 1;
        }
        if counted == 4 {
            break;
        }
    }
    ensure!(counted > 0, "The VMs never wanted the engine at the same time");
    Ok(first * 100.0 / all)
}
