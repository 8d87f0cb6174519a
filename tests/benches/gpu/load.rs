//! Load with queues that never run empty, and its progress over time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use mdev_core::gpu::EngineKind;
use serde::{Deserialize, Serialize};
use vgpu_guest::GuestError;
use vgpu_guest::channel::Channel;
use vgpu_guest::copy;
use vgpu_guest::device::Device;
use vgpu_guest::memory::Buffer;
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::Work;

use crate::solo::spin;

/// Entries of a load's ring.
const ENTRIES: u32 = 1024;
/// Limit of queued work.
const QUEUE: Duration = Duration::from_millis(100);
/// Poll interval.
const LOOK: Duration = Duration::from_millis(1);

/// Load to create.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadSpec {
    /// Duration of a kernel.
    pub kernel: Option<Duration>,
    /// Nanoseconds of 1000 iterations.
    pub pace: f64,
    /// Bytes of copies in video memory beside the kernels.
    pub copy: Option<u64>,
}

/// Work done in a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Seconds of kernels, at the speed of a GPU without other load.
    pub kernels: f64,
    /// Bytes copied.
    pub bytes: f64,
    /// Longest time in which no kernel ended (without kernels: no copy), in milliseconds.
    pub stall_ms: f64,
}

/// Window of time whose edges are ramps: a unit of work in a ramp counts in part. So a vGPU whose
/// work comes in slices is measured well, whether or not the edges cut a slice.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Window {
    /// Time between the load's start and the window.
    pub settle: Duration,
    /// Length, from the middle of one ramp to the middle of the other.
    pub length: Duration,
    /// Length of each ramp.
    pub ramp: Duration,
}

impl Window {
    /// Creates a window with ramps of a fifth of its length.
    pub fn new(settle: Duration, length: Duration) -> Self {
        Self { settle, length, ramp: length / 5 }
    }

    /// Returns the part of a unit that counts if the unit ends so long after the window's start.
    fn weight(&self, at: Duration) -> f64 {
        let left = (self.length + self.ramp).saturating_sub(at);
        (at.min(left).as_secs_f64() / self.ramp.as_secs_f64()).min(1.0)
    }
}

/// A running load; ended when dropped.
#[derive(Debug)]
pub struct Load {
    kernels: Option<Lane>,
    copies: Option<Lane>,
    stop: Arc<AtomicBool>,
}

/// Times and numbers of completed units.
type Log = Arc<Mutex<Vec<(Instant, u64)>>>;

/// A channel of a load.
#[derive(Debug)]
struct Lane {
    log: Log,
    /// Size of a unit.
    unit: f64,
    thread: Option<JoinHandle<Result<(), GuestError>>>,
}

impl Load {
    /// Starts the load and waits until it makes progress.
    pub fn start(device: &Device, spec: &LoadSpec) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut load = Self { kernels: None, copies: None, stop: stop.clone() };
        if let Some(kernel) = spec.kernel {
            let iterations = iterations(kernel, spec.pace);
            let (device, stop) = (device.clone(), stop.clone());
            let most = queue_length(kernel);
            load.kernels = Some(Lane::start(kernel.as_secs_f64(), move |log| {
                let spin = spin(&device, iterations)?;
                let mut methods = Methods::new();
                spin.push(&mut methods);
                let mut channel = Channel::with_entries(&device, EngineKind::Compute, ENTRIES)?;
                keep_busy(&mut channel, &methods, most, log, &stop)
            }));
        }
        if let Some(bytes) = spec.copy {
            let device = device.clone();
            load.copies = Some(Lane::start(bytes as f64, move |log| {
                let (to, from) = (Buffer::video(&device, bytes)?, Buffer::video(&device, bytes)?);
                let mut methods = Methods::new();
                copy::linear(&mut methods, to.va(), from.va(), bytes);
                let mut channel = Channel::with_entries(&device, EngineKind::Copy, ENTRIES)?;
                keep_busy(&mut channel, &methods, 64, log, &stop)
            }));
        }
        let begun = Instant::now();
        for lane in load.lanes() {
            while lane.log.lock().unwrap_or_else(PoisonError::into_inner).len() < 2 {
                if lane.has_ended() || begun.elapsed() > Duration::from_secs(20) {
                    bail!("A load does not run: {}", load.ending());
                }
                thread::sleep(LOOK);
            }
        }
        Ok(load)
    }

    fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.kernels.iter().chain(&self.copies)
    }

    /// Waits for the end of the window that begins now and returns the work done in it.
    pub fn measure(&self, window: Duration) -> Result<Progress> {
        let from = Instant::now();
        thread::sleep(window);
        let to = Instant::now();
        // A unit that ends after the window counts in part.
        thread::sleep(Duration::from_millis(50));
        if self.lanes().any(Lane::has_ended) {
            bail!("A load has ended: {}", self.ending());
        }
        let done = |lane: &Option<Lane>| lane.as_ref().map_or(0.0, |lane| lane.done(from, to));
        let first = self.lanes().next();
        Ok(Progress {
            kernels: done(&self.kernels),
            bytes: done(&self.copies),
            stall_ms: first.map_or(0.0, |lane| lane.stall(from, to).as_secs_f64() * 1e3),
        })
    }

    /// Waits for the end of a window and returns the seconds of kernels per second.
    pub fn rate(&self, window: Window) -> Result<f64> {
        thread::sleep(window.settle);
        let from = Instant::now();
        thread::sleep(window.length + window.ramp + LOOK);
        if self.lanes().any(Lane::has_ended) {
            bail!("A load has ended: {}", self.ending());
        }
        Ok(self.kernels.as_ref().map_or(0.0, |lane| lane.rate(from, &window)))
    }

    /// Records the progress of each channel until stopped.
    fn ending(&self) -> String {
        let lanes = [("kernels", &self.kernels), ("copies", &self.copies)];
        let told = lanes.iter().filter_map(|(name, lane)| {
            let lane = lane.as_ref()?;
            let log = lane.log.lock().unwrap_or_else(PoisonError::into_inner);
            let how = match log.last() {
                None => "has no channel".to_owned(),
                Some((_, done)) => format!("did {done}"),
            };
            let end = if lane.has_ended() { " and ended" } else { "" };
            Some(format!("{name}: {how}{end}"))
        });
        told.collect::<Vec<_>>().join(", ")
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for lane in [&mut self.kernels, &mut self.copies].into_iter().flatten() {
            if let Some(Ok(Err(error))) = lane.thread.take().map(JoinHandle::join) {
                eprintln!("gpu: a load has failed: {error}");
            }
        }
    }
}

impl Lane {
    fn start(
        unit: f64,
        body: impl FnOnce(&Log) -> Result<(), GuestError> + Send + 'static,
    ) -> Self {
        let log = Log::default();
        let theirs = log.clone();
        Self { log, unit, thread: Some(thread::spawn(move || body(&theirs))) }
    }

    fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Returns the work between two times. A unit in progress counts in proportion, assuming even
    /// progress since the previous unit.
    fn done(&self, from: Instant, to: Instant) -> f64 {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let at = |time: Instant| {
            let next = log.partition_point(|(when, _)| *when <= time);
            match (next.checked_sub(1).and_then(|before| log.get(before)), log.get(next)) {
                (Some((t0, n0)), Some((t1, n1))) => {
                    let part = (time - *t0).as_secs_f64() / (*t1 - *t0).as_secs_f64();
                    *n0 as f64 + part * (*n1 - *n0) as f64
                }
                (Some((_, n)), None) => *n as f64,
                _ => 0.0,
            }
        };
        (at(to) - at(from)) * self.unit
    }

    /// Returns the work per second of a window.
    fn rate(&self, from: Instant, window: &Window) -> f64 {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let done = log.windows(2).map(|two| {
            let [(_, before), (when, now)] = two else { return 0.0 };
            window.weight(when.saturating_duration_since(from)) * (now - before) as f64
        });
        done.sum::<f64>() * self.unit / window.length.as_secs_f64()
    }

    /// Returns the longest time between ends of units.
    fn stall(&self, from: Instant, to: Instant) -> Duration {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let inside = log.iter().map(|(when, _)| *when).filter(|when| (from..to).contains(when));
        let mut last = from;
        let mut worst = Duration::ZERO;
        for when in inside.chain([to]) {
            worst = worst.max(when - last);
            last = when;
        }
        worst
    }
}

/// Returns the iterations per thread of a spin of this duration, if 1000 take `pace` nanoseconds.
#[allow(clippy::cast_sign_loss, reason = "neither is negative")]
pub fn iterations(kernel: Duration, pace: f64) -> u32 {
    ((kernel.as_nanos() as f64 / pace * 1000.0) as u32).max(1)
}

fn queue_length(kernel: Duration) -> usize {
    let most = QUEUE.as_nanos() / kernel.as_nanos().max(1);
    most.clamp(4, u128::from(ENTRIES) - 4) as usize
}

/// Keeps a ring full with little CPU, which a software GPU may need.
fn keep_busy(
    channel: &mut Channel,
    methods: &Methods,
    most: usize,
    log: &Log,
    stop: &AtomicBool,
) -> Result<(), GuestError> {
    let note = |done| {
        log.lock().unwrap_or_else(PoisonError::into_inner).push((Instant::now(), done));
    };
    let (mut queued, mut done) = (VecDeque::new(), 0u64);
    let mut asked = Instant::now();
    note(0);
    while !stop.load(Ordering::Relaxed) {
        let before = done;
        while queued.front().is_some_and(|fence| channel.is_done(*fence)) {
            queued.pop_front();
            done += 1;
        }
        if done > before {
            note(done);
            asked = Instant::now();
        } else if asked.elapsed() > Duration::from_millis(500) {
            channel.check()?;
            asked = Instant::now();
        }
        while queued.len() < most {
            queued.push_back(channel.submit(methods)?);
        }
        thread::sleep(LOOK);
    }
    Ok(())
}
