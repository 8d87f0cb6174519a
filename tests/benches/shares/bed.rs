//! Test bed: a daemon with a software GPU, vGPUs with guests and loads, and clocks.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mdev_core::gpu::{EngineKind, Gpu, UsageReport};
use mdev_core::ids::VgpuId;
use mdev_core::sched::ShareRequest;
use mdev_core::units::MIB;
use serde_json::{Value, json};
use system_tests::Vgpud;
use system_tests::ram::Ram;
use system_tests::vfio_user_guest::VfioUserGuest;
use uuid::Uuid;
use vendor_backends::mediator::MediatedGpu;
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::work::spin::Spin;

use super::load::{Load, Running};

/// Poll interval of the counters: the resolution of who has work.
const LOOK: Duration = Duration::from_millis(5);

/// A vGPU with its guest.
#[derive(Debug)]
pub struct Tenant {
    uuid: String,
    id: VgpuId,
    /// The guest's device.
    pub device: Device,
    share: ShareRequest,
    /// The guest's load, if any.
    pub load: Option<Running>,
}

/// A GPU with guests.
#[derive(Debug)]
pub struct Bed {
    /// The guests.
    pub tenants: Vec<Tenant>,
    /// A connection to the GPU besides the manager's, for its counters.
    gpu: MediatedGpu,
    vgpud: Vgpud,
}

/// Measurements of a window.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// Engine time of each guest, in nanoseconds.
    pub used: Vec<f64>,
    /// Engine time due to each guest: at each moment, the used time divided among the guests with
    /// work, by shares.
    pub due: Vec<f64>,
    /// Work of each guest.
    pub work: Vec<f64>,
    /// Length of the window in nanoseconds.
    pub wall: f64,
    /// Time of the window in which the host ran something else in the guests' turns.
    pub delay: f64,
    /// Time in which each guest had work, in nanoseconds.
    pub busy: Vec<f64>,
}

impl Window {
    /// Returns the time that the host gave the engine, in nanoseconds.
    pub fn available(&self) -> f64 {
        (self.wall - self.delay).max(1.0)
    }

    /// Returns the percentage of time in which the host ran something else in the guests' turns.
    pub fn stolen(&self) -> f64 {
        self.delay / self.wall.max(1.0) * 100.0
    }

    /// Returns the percentage of available time that was used.
    pub fn utilisation(&self) -> f64 {
        self.used.iter().sum::<f64>() / self.available() * 100.0
    }

    /// Returns each guest's percentage of the used time.
    pub fn shares(&self) -> Vec<f64> {
        let all: f64 = self.used.iter().sum::<f64>().max(1.0);
        self.used.iter().map(|used| used / all * 100.0).collect()
    }

    /// Returns each guest's deviation from its due, in percent of the used time.
    pub fn errors(&self) -> Vec<f64> {
        let all: f64 = self.used.iter().sum::<f64>().max(1.0);
        self.used.iter().zip(&self.due).map(|(used, due)| (used - due) / all * 100.0).collect()
    }

    /// Returns the work of all guests per available nanosecond.
    pub fn rate(&self) -> f64 {
        self.work.iter().sum::<f64>() / self.available()
    }
}

/// Counters at a moment.
#[derive(Clone, Debug)]
pub struct Reading {
    /// Time by the GPU's clock.
    pub at_ns: u64,
    /// Engine time of each guest, in nanoseconds.
    pub engine: Vec<f64>,
    wait: Vec<f64>,
    work: Vec<f64>,
    /// Time in which the host has run something else in the guests' turns, in nanoseconds.
    pub delay: f64,
}

impl Bed {
    /// Starts guests with shares and loads at once. `iterations` take 10 ms.
    pub fn new(guests: &[(ShareRequest, Load)], iterations: u32) -> Result<Self> {
        let vgpud = Vgpud::start_with(&["--parent", "soft:soft0,vram=4G"])?;
        let admin = vgpud.run_dir().join("parents").join("soft0");
        // The daemon answers after the parents have started.
        vgpud.get("/v1/parents")?;
        let gpu = MediatedGpu::connect(&admin.join("admin.sock"))?;
        let mut bed = Self { tenants: Vec::new(), gpu, vgpud };
        for (share, _) in guests {
            let request =
                json!({ "mdev_type": "SOFT-256MQ", "attrs": attributes(*share), "run": true });
            let uuid = bed.vgpud.create(&request)?;
            let ram = Ram::new(16 * MIB, 64 << 10)?;
            let platform = VfioUserGuest::attach(&bed.vgpud.vfio_socket(&uuid), ram)?;
            let device = Device::open(Box::new(platform))?;
            let id = VgpuId(Uuid::parse_str(&uuid)?);
            bed.tenants.push(Tenant { uuid, id, device, share: *share, load: None });
        }
        for (seed, (tenant, (_, load))) in bed.tenants.iter_mut().zip(guests).enumerate() {
            tenant.load = Running::start(&tenant.device, *load, iterations, seed as u64 + 1)?;
        }
        Ok(bed)
    }

    /// Returns the iterations of a spin's thread that take 10 ms of engine time.
    pub fn calibrate() -> Result<u32> {
        let bed = Self::new(&[(ShareRequest::with_core(None), Load::Idle)], 1)?;
        let device = &bed.tenants[0].device;
        let mut channel = Channel::new(device, EngineKind::Compute)?;
        let mut spin = Spin::new(device, 1)?;
        spin.calibrate(&mut channel, Duration::from_millis(10))?;
        Ok(spin.iterations())
    }

    /// Measures a window, after a time to settle.
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

    /// Returns the 99th percentile of how long a guest's work waited in the last second or two.
    pub fn wait_p99(&self, index: usize) -> Result<Duration> {
        let stats = self.vgpud.get("/v1/stats")?;
        let vgpus = stats["vgpus"].as_array().context("No vGPUs")?;
        let of = vgpus.iter().find(|vgpu| vgpu["uuid"] == self.tenants[index].uuid.as_str());
        let waited = of.and_then(|vgpu| vgpu["wait_p99_us"].as_u64());
        Ok(Duration::from_micros(waited.context("The guest's work has not waited")?))
    }

    fn weight(&self, index: usize) -> f64 {
        self.tenants[index].share.core.map_or(1.0, |core| f64::from(core.get()))
    }

    /// Changes a share under load, as an operator does.
    pub fn change(&mut self, index: usize, share: ShareRequest) -> Result<()> {
        let tenant = &mut self.tenants[index];
        let change = json!({ "attrs": attributes(share), "target": "live" });
        self.vgpud.call("PATCH", &format!("/v1/vgpus/{}", tenant.uuid), Some(&change))?;
        tenant.share = share;
        Ok(())
    }

    /// Pauses or resumes all loads.
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
            // A guest whose turn the host uses has work as well.
            wait: self.of(&usage, |usage| usage.wait_ns + usage.stolen_ns),
            work: work.collect(),
            delay: self.of(&usage, |usage| usage.stolen_ns).iter().sum(),
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

/// Returns a share as attributes of a definition.
fn attributes(share: ShareRequest) -> Value {
    let core = share.core.map(|core| json!({ "core": core.to_string() }));
    let mode = share.core.map(|_| json!({ "mode": share.mode.name() }));
    core.into_iter().chain(mode).collect()
}
