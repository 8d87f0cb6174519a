//! VMs at work on a daemon's vGPUs, and what the GPU gave them.

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
use crate::stranger::Stranger;

/// A vGPU that had or wanted the engine for this part of a time had work all the time.
const BUSY: f64 = 0.75;

/// A VM on a vGPU, working for some seconds; every result it gets is compared with the CPU's.
pub fn work(vgpud: &Vgpud, uuid: &str, seconds: u64) -> Result<JoinHandle<Result<Measured>>> {
    let ram = Ram::new(64 * MIB, 64 * MIB)?;
    let device = Device::open(Box::new(Stranger::attach(&vgpud.vfio_socket(uuid), ram)?))?;
    let load = Load { duration: Duration::from_secs(seconds), ..Load::default() };
    Ok(thread::spawn(move || Ok(bench::run(&device, &load)?)))
}

/// That it came to its end, and every result was right.
pub fn verified(work: JoinHandle<Result<Measured>>) -> Result<()> {
    let measured = work.join().ok().context("The work panicked")??;
    assert!(measured.verified > 0, "{measured:?}");
    Ok(())
}

/// A VM on a vGPU that always has work, and needs no CPU to hand it in: a kernel that never ends.
///
/// Its vGPU has `hang_timeout=off`. It ends when this is dropped.
#[derive(Debug)]
pub struct Endless {
    _channel: Channel,
    _spin: Spin,
}

impl Endless {
    /// Starts it.
    pub fn start(vgpud: &Vgpud, uuid: &str) -> Result<Self> {
        let ram = Ram::new(16 * MIB, 16 * MIB)?;
        let device = Device::open(Box::new(Stranger::attach(&vgpud.vfio_socket(uuid), ram)?))?;
        let mut channel = Channel::new(&device, EngineKind::Compute)?;
        let spin = Spin::new(&device, u32::MAX)?;
        let mut methods = Methods::new();
        spin.push(&mut methods);
        channel.submit(&methods)?;
        Ok(Self { _channel: channel, _spin: spin })
    }
}

/// What one vGPU has had so far, in seconds.
#[derive(Clone, Copy, Debug)]
struct Used {
    engine: f64,
    /// Time in which it had or wanted the engine. What the host took of its turns is among it.
    wanted: f64,
}

/// What each vGPU has had, in the order of their names.
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

/// What part of the engine's time the first vGPU had while all of them wanted it, in percent.
///
/// A share is promised to a vGPU that has work. On a host whose CPUs are taken, a VM may not get to hand any in; such
/// moments do not count.
pub fn share(vgpud: &Vgpud, uuids: &[String]) -> Result<f64> {
    share_while(vgpud, uuids, uuids.len())
}

/// The same while the first so many of them wanted it, whatever the others did.
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
