//! What is measured on: a GPU, its guests with their loads, the scheduler as the manager runs it, and the clocks.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mdev_core::gpu::{EngineKind, Gpu, UsageReport};
use mdev_core::sched::{Action, Config, Event, Scheduler, Share};
use mdev_core::units::MIB;
use system_tests::parent::{Guest, Parent, Vgpu};
use vgpu_guest::GuestError;
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::Work;
use vgpu_guest::work::spin::Spin;

/// How often the manager reads the counters.
const PERIOD: Duration = Duration::from_millis(100);
/// Entries of a load's ring.
const ENTRIES: u32 = 1024;
/// Most work that a load queues.
const QUEUE: Duration = Duration::from_millis(200);

/// What a guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Kernels of that length, the queue topped up all the time.
    Steady(Duration),
    /// The same, in bursts: the queue is filled when it is nearly empty.
    Bursty(Duration),
    /// Nothing.
    Idle,
}

/// One guest and its load.
#[derive(Debug)]
pub struct Tenant {
    /// The guest.
    pub guest: Guest,
    thread: Option<JoinHandle<Result<(), GuestError>>>,
    spin: Option<Arc<Spin>>,
}

impl Tenant {
    /// Work done since the load began.
    fn work(&self) -> f64 {
        let Some(spin) = &self.spin else { return 0.0 };
        // Blocks, since a reading may come in the middle of a launch.
        f64::from(spin.blocks()) * f64::from(spin.iterations())
    }
}

/// A GPU with guests.
#[derive(Debug)]
pub struct Bed {
    parent: Parent,
    /// The manager's scheduler.
    scheduler: Scheduler,
    /// Its guests.
    pub tenants: Vec<Tenant>,
    stop: Arc<AtomicBool>,
    engine: String,
}

/// What one window showed.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// Hundredths of the engine time that was used, of each guest.
    pub shares: Vec<f64>,
    /// Hundredths of the time that the host gave the engine.
    pub used: f64,
    /// Work done by each, per nanosecond that the host gave the engine.
    pub rates: Vec<f64>,
    /// Hundredths of the time in which the engine waited for a core.
    pub stolen: f64,
}

struct Reading {
    usage: UsageReport,
    work: Vec<f64>,
    at: Instant,
    delay: u64,
}

impl Bed {
    /// Guests with shares and loads, which begin at once. `iterations` is what takes 10 ms.
    pub fn new(guests: &[(Share, Load)], iterations: u32) -> Result<Self> {
        let before = engine_threads()?;
        let parent = Parent::start(256 * MIB)?;
        let engine = engine_threads()?.into_iter().find(|engine| !before.contains(engine));
        let engine = engine.context("There is no engine")?;
        let gpu = parent.gpu.describe();
        let config = Config::new(gpu.default_timeslice);
        let scheduler = Scheduler::new(config, gpu.capabilities.into());
        let stop = Arc::new(AtomicBool::new(false));
        let mut bed = Self { parent, scheduler, tenants: Vec::new(), stop, engine };
        let small = Vgpu { vram: 8 * MIB, ram: 16 * MIB, piece: 64 << 10, ..Vgpu::default() };
        for (share, _) in guests {
            let guest = bed.parent.guest(small)?;
            let started = Event::VgpuStarted { id: guest.id, share: *share, max_instances: 16 };
            let actions = bed.scheduler.handle(started)?;
            bed.apply(&actions)?;
            bed.tenants.push(Tenant { guest, thread: None, spin: None });
        }
        for (tenant, (_, load)) in bed.tenants.iter_mut().zip(guests) {
            let (Load::Steady(kernel) | Load::Bursty(kernel)) = *load else { continue };
            let steps = kernel.as_nanos() * u128::from(iterations) / 10_000_000;
            let steps = u32::try_from(steps)?.max(1);
            let spin = Arc::new(Spin::new(&tenant.guest.device, steps)?);
            let bursty = matches!(load, Load::Bursty(_));
            let (device, stop) = (tenant.guest.device.clone(), Arc::clone(&bed.stop));
            tenant.spin = Some(Arc::clone(&spin));
            tenant.thread =
                Some(thread::spawn(move || generate(&device, &spin, kernel, bursty, &stop)));
        }
        Ok(bed)
    }

    /// Lets the loads run for so long.
    pub fn tick(&mut self, time: Duration) -> Result<()> {
        let start = Instant::now();
        while start.elapsed() < time {
            thread::sleep(PERIOD.min(time.saturating_sub(start.elapsed())));
            let usage = self.parent.gpu.usage()?;
            let actions = self.scheduler.handle(Event::UsageReport(&usage))?;
            self.apply(&actions)?;
        }
        Ok(())
    }

    /// Measures over a window, after a time to settle.
    pub fn measure(&mut self, settle: Duration, window: Duration) -> Result<Window> {
        self.tick(settle)?;
        let before = self.read()?;
        self.tick(window)?;
        let after = self.read()?;
        let wall = (after.at - before.at).as_nanos() as f64;
        let delay = (after.delay - before.delay) as f64;
        let available = (wall - delay).max(1.0);
        let used: Vec<f64> = self
            .engine_ns(&after.usage)
            .iter()
            .zip(self.engine_ns(&before.usage))
            .map(|(a, b)| a - b)
            .collect();
        let total: f64 = used.iter().sum();
        let rates = after.work.iter().zip(&before.work).map(|(a, b)| (a - b) / available);
        Ok(Window {
            shares: used.iter().map(|used| used / total.max(1.0) * 100.0).collect(),
            used: total / available * 100.0,
            rates: rates.collect(),
            stolen: delay / wall * 100.0,
        })
    }

    /// Changes a share while everything runs.
    pub fn change(&mut self, index: usize, share: Share) -> Result<()> {
        let id = self.tenants[index].guest.id;
        let actions = self.scheduler.handle(Event::ShareChanged { id, share })?;
        self.apply(&actions)
    }

    /// Engine time of each guest so far, in nanoseconds.
    pub fn used(&mut self) -> Result<Vec<f64>> {
        let usage = self.parent.gpu.usage()?;
        Ok(self.engine_ns(&usage))
    }

    fn engine_ns(&self, usage: &UsageReport) -> Vec<f64> {
        let of = |tenant: &Tenant| {
            let found = usage.vgpus.iter().find(|(id, _)| *id == tenant.guest.id);
            found.map_or(0.0, |(_, usage)| usage.engine_ns as f64)
        };
        self.tenants.iter().map(of).collect()
    }

    fn read(&mut self) -> Result<Reading> {
        let usage = self.parent.gpu.usage()?;
        let work = self.tenants.iter().map(Tenant::work).collect();
        Ok(Reading { usage, work, at: Instant::now(), delay: run_delay(&self.engine)? })
    }

    fn apply(&mut self, actions: &[Action]) -> Result<()> {
        for action in actions {
            match *action {
                Action::SetTimeslice(id, slice) => self.parent.gpu.set_timeslice(id, slice)?,
                Action::SetBudget(id, budget) => self.parent.gpu.set_budget(id, budget)?,
                Action::Gate(id, open) => self.parent.gpu.set_gate(id, open)?,
            }
        }
        Ok(())
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for tenant in &mut self.tenants {
            if let Some(thread) = tenant.thread.take() {
                match thread.join() {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => eprintln!("shares: a load has failed: {error}"),
                    Err(_) => eprintln!("shares: a load has panicked"),
                }
            }
        }
    }
}

/// Iterations of a spin's thread that take 10 ms of engine time.
pub fn calibrate() -> Result<u32> {
    let mut parent = Parent::start(16 * MIB)?;
    let guest = parent.guest(Vgpu { vram: 8 * MIB, ram: 16 * MIB, ..Vgpu::default() })?;
    let mut channel = Channel::new(&guest.device, EngineKind::Compute)?;
    let mut spin = Spin::new(&guest.device, 1)?;
    spin.calibrate(&mut channel, Duration::from_millis(10))?;
    Ok(spin.iterations())
}

/// Keeps a ring full without using much of a core, which the engine may need.
fn generate(
    device: &Device,
    spin: &Spin,
    kernel: Duration,
    bursty: bool,
    stop: &AtomicBool,
) -> Result<(), GuestError> {
    let mut channel = Channel::with_entries(device, EngineKind::Compute, ENTRIES)?;
    let mut methods = Methods::new();
    spin.push(&mut methods);
    let most =
        (QUEUE.as_nanos() / kernel.as_nanos().max(1)).clamp(4, u128::from(ENTRIES) - 4) as usize;
    let low = if bursty { most / 4 } else { most - 1 };
    let mut queued = std::collections::VecDeque::new();
    while !stop.load(Ordering::Relaxed) {
        while queued.front().is_some_and(|fence| channel.is_done(*fence)) {
            queued.pop_front();
        }
        if queued.len() <= low {
            while queued.len() < most {
                queued.push_back(channel.submit(&methods)?);
            }
        }
        thread::sleep(Duration::from_millis(4));
    }
    Ok(())
}

/// Engines of this process: GPUs that are in use, and some that are about to end.
fn engine_threads() -> Result<Vec<String>> {
    let mut engines = Vec::new();
    for task in fs::read_dir("/proc/self/task")? {
        let path = task?.path().display().to_string();
        let comm = fs::read_to_string(format!("{path}/comm")).unwrap_or_default();
        if comm.trim() == "soft-engine" {
            engines.push(path);
        }
    }
    Ok(engines)
}

/// For how long a thread has waited for a core, in nanoseconds.
fn run_delay(task: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("{task}/schedstat"))?;
    Ok(text.split_whitespace().nth(1).context("No run delay")?.parse()?)
}
