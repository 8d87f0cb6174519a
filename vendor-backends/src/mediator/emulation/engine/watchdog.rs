//! Watchdog: ends accesses to a vGPU's memory that hold the engine.
//!
//! Each step of the engine takes microseconds, but a client can make a page fault last for as long
//! as it likes ([`mdev_core::sigbus::held`]). While the engine works, the watchdog looks whether
//! steps end. After [`LOOKS`] looks at the same step, it ends each access that lasts longer than
//! [`RELEASE_INTERVAL`] and in which the engine sleeps. The client is then dropped like one that
//! has truncated its memory.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, Thread};
use std::time::Duration;

use mdev_core::sigbus::held::HeldThread;

/// Time between two looks at the engine while it works.
const INTERVAL: Duration = Duration::from_millis(100);
/// Looks at the same step after which its accesses are ended. Memory that the host swaps in holds
/// the engine for less.
const LOOKS: u32 = 4;
/// Time between two looks at an access in such a step.
const RELEASE_INTERVAL: Duration = Duration::from_millis(10);
/// Looks at an engine without work after which the watchdog sleeps, too.
const IDLE_LOOKS: u32 = 10;

/// Value of [`Steps::current`] while the engine sleeps.
const ASLEEP: u64 = u64::MAX;

/// Steps of the engine.
#[derive(Debug)]
pub(super) struct Steps {
    /// Number of the current step.
    current: AtomicU64,
    /// Whether the watchdog sleeps until the engine wakes up.
    parked: AtomicBool,
    stop: AtomicBool,
    watchdog: OnceLock<Thread>,
}

impl Steps {
    /// Returns the steps of an engine that sleeps.
    pub fn new() -> Self {
        Self {
            current: AtomicU64::new(ASLEEP),
            parked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            watchdog: OnceLock::new(),
        }
    }

    /// Begins step `number`.
    pub fn begin(&self, number: u64) {
        self.current.store(number, Ordering::Relaxed);
    }

    /// Says that the engine sleeps.
    pub fn sleep(&self) {
        self.current.store(ASLEEP, Ordering::Relaxed);
    }

    /// Begins step `number` after a sleep.
    pub fn wake(&self, number: u64) {
        // The watchdog says that it sleeps, and then looks at the step once more.
        self.current.store(number, Ordering::SeqCst);
        if self.parked.swap(false, Ordering::SeqCst) {
            self.unpark();
        }
    }

    fn unpark(&self) {
        self.watchdog.get().inspect(|thread| thread.unpark());
    }
}

/// Handle of the running watchdog. Dropping it ends its thread.
#[derive(Debug)]
pub(super) struct Watchdog {
    steps: Arc<Steps>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts the watchdog of the calling thread, which is the engine.
    pub fn start(steps: Arc<Steps>) -> io::Result<Self> {
        let engine = HeldThread::current()?;
        let watched = Arc::clone(&steps);
        let name = "gpu-watchdog".to_owned();
        let thread = thread::Builder::new().name(name).spawn(move || watch(&watched, engine))?;
        // The only place that sets it.
        let _ = steps.watchdog.set(thread.thread().clone());
        Ok(Self { steps, thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.steps.stop.store(true, Ordering::SeqCst);
        self.steps.unpark();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn watch(steps: &Steps, engine: HeldThread) {
    let (mut seen, mut looks) = (ASLEEP, 0);
    while !steps.stop.load(Ordering::SeqCst) {
        let step = steps.current.load(Ordering::SeqCst);
        looks = if step == seen { looks + 1 } else { 0 };
        seen = step;
        if step == ASLEEP && looks >= IDLE_LOOKS {
            steps.parked.store(true, Ordering::SeqCst);
            if steps.current.load(Ordering::SeqCst) == ASLEEP && !steps.stop.load(Ordering::SeqCst)
            {
                thread::park();
            }
            steps.parked.store(false, Ordering::SeqCst);
            looks = 0;
        } else if step != ASLEEP && looks >= LOOKS {
            engine.release();
            thread::park_timeout(RELEASE_INTERVAL);
        } else {
            thread::park_timeout(INTERVAL);
        }
    }
}
