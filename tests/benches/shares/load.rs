//! Loads of guests: rings kept full, filled in bursts, or filled with pauses.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Result;
use mdev_core::gpu::EngineKind;
use vgpu_guest::GuestError;
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::Work;
use vgpu_guest::work::spin::Spin;

/// Entries of a load's ring.
const ENTRIES: u32 = 1024;
/// Limit of queued work.
const QUEUE: Duration = Duration::from_millis(200);
/// Poll interval of a short ring: short enough, with little CPU, which the engine may need.
const LOOK: Duration = Duration::from_millis(4);
/// Poll interval of a long ring.
const LOOK_SELDOM: Duration = Duration::from_millis(20);

/// Load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Kernels of this length, with the queue topped up all the time.
    Steady(Duration),
    /// Kernels in bursts: the queue is refilled when nearly empty, so there is always work.
    Refilled(Duration),
    /// Work of this length at a time, with pauses of 50 to 250 ms.
    OnOff(Duration, Duration),
    /// One kernel of this length at each interval.
    Requests(Duration, Duration),
    /// No load.
    Idle,
}

/// A running load.
#[derive(Debug)]
pub struct Running {
    spin: Arc<Spin>,
    stop: Arc<AtomicBool>,
    paused: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), GuestError>>>,
}

impl Running {
    /// Starts a load; `None` for no load. `iterations` take 10 ms.
    pub fn start(device: &Device, load: Load, iterations: u32, seed: u64) -> Result<Option<Self>> {
        let (Load::Steady(kernel)
        | Load::Refilled(kernel)
        | Load::OnOff(kernel, _)
        | Load::Requests(kernel, _)) = load
        else {
            return Ok(None);
        };
        let steps = kernel.as_nanos() * u128::from(iterations) / 10_000_000;
        let spin = Arc::new(Spin::new(device, u32::try_from(steps)?.max(1))?);
        let (stop, paused) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let mut generator = Generator {
            channel: Channel::with_entries(device, EngineKind::Compute, ENTRIES)?,
            methods: Methods::new(),
            most: (QUEUE.as_nanos() / kernel.as_nanos().max(1)).clamp(4, u128::from(ENTRIES) - 4)
                as usize,
            look: if kernel * (ENTRIES - 4) < QUEUE { LOOK } else { LOOK_SELDOM },
            queued: VecDeque::new(),
            stop: Arc::clone(&stop),
            paused: Arc::clone(&paused),
        };
        spin.push(&mut generator.methods);
        let thread = thread::spawn(move || match load {
            Load::OnOff(_, work) => {
                let kernels = (work.as_nanos() / kernel.as_nanos()).max(1);
                generator.now_and_then(kernels as usize, seed)
            }
            Load::Requests(_, interval) => generator.at_intervals(interval),
            Load::Refilled(_) => generator.always(generator.most / 4),
            _ => generator.always(generator.most - 1),
        });
        Ok(Some(Self { spin, stop, paused, thread: Some(thread) }))
    }

    /// Returns the work done since the load began.
    pub fn work(&self) -> f64 {
        // Blocks: a reading may come in the middle of a launch.
        f64::from(self.spin.blocks()) * f64::from(self.spin.iterations())
    }

    /// Pauses or resumes submissions.
    pub fn pause(&self, paused: bool) {
        self.paused.store(paused, Ordering::Relaxed);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.take().map(JoinHandle::join) {
            None | Some(Ok(Ok(()))) => {}
            Some(Ok(Err(error))) => eprintln!("shares: a load has failed: {error}"),
            Some(Err(_)) => eprintln!("shares: a load has panicked"),
        }
    }
}

struct Generator {
    channel: Channel,
    methods: Methods,
    /// Limit of queued launches.
    most: usize,
    look: Duration,
    queued: VecDeque<vgpu_guest::fence::Fence>,
    stop: Arc<AtomicBool>,
    paused: Arc<AtomicBool>,
}

impl Generator {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Queues up to `count` further launches and returns their number.
    fn fill(&mut self, count: usize) -> Result<usize, GuestError> {
        let room = self.most.saturating_sub(self.queued.len()).min(count);
        for _ in 0..room {
            self.queued.push_back(self.channel.submit(&self.methods)?);
        }
        Ok(room)
    }

    fn forget_done(&mut self) {
        while self.queued.front().is_some_and(|fence| self.channel.is_done(*fence)) {
            self.queued.pop_front();
        }
    }

    /// Fills the queue when at most `low` launches are left.
    fn always(&mut self, low: usize) -> Result<(), GuestError> {
        while !self.stopped() {
            self.forget_done();
            if self.queued.len() <= low && !self.paused.load(Ordering::Relaxed) {
                self.fill(usize::MAX)?;
            }
            thread::sleep(self.look);
        }
        Ok(())
    }

    /// Submits one launch at each interval.
    fn at_intervals(&mut self, interval: Duration) -> Result<(), GuestError> {
        let mut due = Instant::now();
        while !self.stopped() {
            self.forget_done();
            if !self.paused.load(Ordering::Relaxed) {
                self.fill(1)?;
            }
            due += interval;
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        Ok(())
    }

    /// Submits bursts of this many launches.
    fn now_and_then(&mut self, launches: usize, seed: u64) -> Result<(), GuestError> {
        // The pauses are the same in every run.
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        while !self.stopped() {
            let mut left = launches;
            while !self.stopped() && (left > 0 || !self.queued.is_empty()) {
                self.forget_done();
                left -= self.fill(left)?;
                thread::sleep(LOOK);
            }
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            thread::sleep(Duration::from_millis(50 + random % 200));
        }
        Ok(())
    }
}
