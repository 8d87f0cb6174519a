//! What is measured on: a daemon with a software GPU, its vGPUs with their guests and loads, and the clocks.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mdev_core::gpu::{EngineKind, Gpu, UsageReport};
use mdev_core::ids::VgpuId;
use mdev_core::sched::Share;
use mdev_core::units::MIB;
use serde_json::{Value, json};
use system_tests::Vgpud;
use system_tests::ram::Ram;
use system_tests::stranger::Stranger;
use uuid::Uuid;
use vendor_backends::mediator::MediatedGpu;
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::work::spin::Spin;

use super::load::{Load, Running};

/// How often counters are looked at: who has work is known so exactly.
const LOOK: Duration = Duration::from_millis(5);

/// One vGPU with its guest.
#[derive(Debug)]
pub struct Tenant {
    uuid: String,
    id: VgpuId,
    /// The guest's device.
    pub device: Device,
    share: Share,
    /// Its load, where it has one.
    pub load: Option<Running>,
}

/// A GPU with guests.
#[derive(Debug)]
pub struct Bed {
    /// Its guests.
    pub tenants: Vec<Tenant>,
    /// A connection to the silicon besides the manager's, for its counters.
    gpu: MediatedGpu,
    /// The engine's thread, in `/proc`.
    engine: String,
    vgpud: Vgpud,
}

/// What one window showed.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// Engine time that each used, in nanoseconds.
    pub used: Vec<f64>,
    /// Engine time that was due to each: at each moment, what was used then is divided among those that had work, by
    /// their shares.
    pub due: Vec<f64>,
    /// Work that each did.
    pub work: Vec<f64>,
    /// Nanoseconds that the window lasted.
    pub wall: f64,
    /// Of these, the engine waited for a core.
    pub delay: f64,
    /// Time in which each had work, in nanoseconds.
    pub busy: Vec<f64>,
}

impl Window {
    /// Nanoseconds that the host gave the engine.
    pub fn available(&self) -> f64 {
        (self.wall - self.delay).max(1.0)
    }

    /// Hundredths of the time in which the engine waited for a core.
    pub fn stolen(&self) -> f64 {
        self.delay / self.wall.max(1.0) * 100.0
    }

    /// Hundredths of the available time that were used.
    pub fn utilisation(&self) -> f64 {
        self.used.iter().sum::<f64>() / self.available() * 100.0
    }

    /// Hundredths of the time that was used, of each.
    pub fn shares(&self) -> Vec<f64> {
        let all: f64 = self.used.iter().sum::<f64>().max(1.0);
        self.used.iter().map(|used| used / all * 100.0).collect()
    }

    /// How far each is from what was due to it, in hundredths of what was used.
    pub fn errors(&self) -> Vec<f64> {
        let all: f64 = self.used.iter().sum::<f64>().max(1.0);
        self.used.iter().zip(&self.due).map(|(used, due)| (used - due) / all * 100.0).collect()
    }

    /// Work of all for each nanosecond available.
    pub fn rate(&self) -> f64 {
        self.work.iter().sum::<f64>() / self.available()
    }
}

/// The counters at a moment.
#[derive(Clone, Debug)]
pub struct Reading {
    /// When, by the GPU's clock.
    pub at_ns: u64,
    /// Engine time of each guest, in nanoseconds.
    pub engine: Vec<f64>,
    wait: Vec<f64>,
    work: Vec<f64>,
    /// For how long the engine has waited for a core, in nanoseconds.
    pub delay: f64,
}

impl Bed {
    /// Guests with shares and loads, which begin at once. `iterations` is what takes 10 ms.
    pub fn new(guests: &[(Share, Load)], iterations: u32) -> Result<Self> {
        let vgpud = Vgpud::start_with(&["--parent", "soft:soft0,vram=4G"])?;
        let admin = vgpud.run_dir().join("parents").join("soft0");
        // An answer comes once the parents have been started.
        let pid = vgpud.get("/v1/parents")?[0]["pid"].as_u64().context("The GPU has no process")?;
        let gpu = MediatedGpu::connect(&admin.join("admin.sock"))?;
        let mut bed = Self { tenants: Vec::new(), gpu, engine: engine_thread(pid)?, vgpud };
        for (share, _) in guests {
            let request =
                json!({ "mdev_type": "SOFT-256MQ", "attrs": attributes(*share), "run": true });
            let uuid = bed.vgpud.create(&request)?;
            let ram = Ram::new(16 * MIB, 64 << 10)?;
            let platform = Stranger::attach(&bed.vgpud.vfio_socket(&uuid), ram)?;
            let device = Device::open(Box::new(platform))?;
            let id = VgpuId(Uuid::parse_str(&uuid)?);
            bed.tenants.push(Tenant { uuid, id, device, share: *share, load: None });
        }
        for (seed, (tenant, (_, load))) in bed.tenants.iter_mut().zip(guests).enumerate() {
            tenant.load = Running::start(&tenant.device, *load, iterations, seed as u64 + 1)?;
        }
        Ok(bed)
    }

    /// Iterations of a spin's thread that take 10 ms of engine time.
    pub fn calibrate() -> Result<u32> {
        let bed = Self::new(&[(Share::of(None), Load::Idle)], 1)?;
        let device = &bed.tenants[0].device;
        let mut channel = Channel::new(device, EngineKind::Compute)?;
        let mut spin = Spin::new(device, 1)?;
        spin.calibrate(&mut channel, Duration::from_millis(10))?;
        Ok(spin.iterations())
    }

    /// Measures over a window, after a time to settle.
    pub fn measure(&mut self, settle: Duration, window: Duration) -> Result<Window> {
        thread::sleep(settle);
        let first = self.read()?;
        let mut last = first.clone();
        let count = self.tenants.len();
        let (mut due, mut busy) = (vec![0.0; count], vec![0.0; count]);
        let start = Instant::now();
        while start.elapsed() < window {
            thread::sleep(LOOK.min(window.saturating_sub(start.elapsed())));
            let next = self.read()?;
            let elapsed = next.at_ns.saturating_sub(last.at_ns) as f64;
            let delta = |after: &[f64], before: &[f64], index: usize| after[index] - before[index];
            let used = |index| delta(&next.engine, &last.engine, index);
            let active =
                |index| (used(index) + delta(&next.wait, &last.wait, index)).clamp(0.0, elapsed);
            let weigh = |index: usize| self.weight(index) * active(index);
            let weight: f64 = (0..count).map(weigh).sum::<f64>().max(1.0);
            let all: f64 = (0..count).map(used).sum();
            for index in 0..count {
                due[index] += all * weigh(index) / weight;
                busy[index] += active(index);
            }
            last = next;
        }
        let since = |after: &[f64], before: &[f64]| -> Vec<f64> {
            after.iter().zip(before).map(|(after, before)| after - before).collect()
        };
        Ok(Window {
            used: since(&last.engine, &first.engine),
            due,
            work: since(&last.work, &first.work),
            wall: last.at_ns.saturating_sub(first.at_ns) as f64,
            delay: last.delay - first.delay,
            busy,
        })
    }

    fn weight(&self, index: usize) -> f64 {
        self.tenants[index].share.core.map_or(1.0, |core| f64::from(core.get()))
    }

    /// Changes a share while everything runs, as an operator does.
    pub fn change(&mut self, index: usize, share: Share) -> Result<()> {
        let tenant = &mut self.tenants[index];
        let change = json!({ "attrs": attributes(share), "target": "live" });
        self.vgpud.call("PATCH", &format!("/v1/vgpus/{}", tenant.uuid), Some(&change))?;
        tenant.share = share;
        Ok(())
    }

    /// Stops all loads from handing in work, or lets them go on.
    pub fn pause(&self, paused: bool) {
        for load in self.tenants.iter().filter_map(|tenant| tenant.load.as_ref()) {
            load.pause(paused);
        }
    }

    /// Reads all counters.
    pub fn read(&mut self) -> Result<Reading> {
        let usage = self.gpu.usage()?;
        let work =
            self.tenants.iter().map(|tenant| tenant.load.as_ref().map_or(0.0, Running::work));
        Ok(Reading {
            at_ns: usage.now_ns,
            engine: self.of(&usage, |usage| usage.engine_ns),
            wait: self.of(&usage, |usage| usage.wait_ns),
            work: work.collect(),
            delay: run_delay(&self.engine)?,
        })
    }

    fn of(&self, report: &UsageReport, field: impl Fn(&mdev_core::gpu::Usage) -> u64) -> Vec<f64> {
        let find = |tenant: &Tenant| {
            let found = report.vgpus.iter().find(|(id, _)| *id == tenant.id);
            found.map_or(0.0, |(_, usage)| field(usage) as f64)
        };
        self.tenants.iter().map(find).collect()
    }
}

/// A share as attributes of a definition.
fn attributes(share: Share) -> Value {
    let core = share.core.map(|core| json!({ "core": core.to_string() }));
    let mode = share.core.map(|_| json!({ "mode": share.mode.name() }));
    core.into_iter().chain(mode).collect()
}

/// The engine of a software GPU.
fn engine_thread(pid: u64) -> Result<String> {
    let since = Instant::now();
    // A thread has its name a moment after it is there.
    while since.elapsed() < Duration::from_secs(5) {
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let path = task?.path().display().to_string();
            if fs::read_to_string(format!("{path}/comm"))?.trim() == "gpu-engine" {
                return Ok(path);
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
    anyhow::bail!("The GPU has no engine")
}

/// For how long a thread has waited for a core, in nanoseconds.
fn run_delay(task: &str) -> Result<f64> {
    let text = fs::read_to_string(format!("{task}/schedstat"))?;
    Ok(text.split_whitespace().nth(1).context("No run delay")?.parse()?)
}
