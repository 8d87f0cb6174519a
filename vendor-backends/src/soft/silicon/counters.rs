//! What is counted of a vGPU: written by the engine, read by anyone without a lock.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use mdev_core::gpu::Usage;

/// As [`Usage`], field by field.
#[derive(Debug, Default)]
pub struct Counters {
    /// Nanoseconds on the engine.
    pub engine_ns: AtomicU64,
    /// Nanoseconds with work, but without the engine.
    pub wait_ns: AtomicU64,
    /// GPFIFO entries done.
    pub submissions: AtomicU64,
    /// Doorbells found by looking.
    pub polled_doorbells: AtomicU64,
    /// Wake-ups from sleep.
    pub wakeups: AtomicU64,
    /// Times it lost the engine with work left.
    pub preemptions: AtomicU64,
    /// Channels that faulted.
    pub faults: AtomicU64,
    /// Whether it has work.
    pub runnable: AtomicBool,
    /// Imported bytes.
    pub imported_bytes: AtomicU64,
    /// Channels that exist.
    pub channels: AtomicU32,
}

impl Counters {
    /// A reading of all.
    pub fn usage(&self) -> Usage {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Usage {
            engine_ns: read(&self.engine_ns),
            wait_ns: read(&self.wait_ns),
            submissions: read(&self.submissions),
            polled_doorbells: read(&self.polled_doorbells),
            wakeups: read(&self.wakeups),
            preemptions: read(&self.preemptions),
            faults: read(&self.faults),
            runnable: self.runnable.load(Ordering::Relaxed),
            imported_bytes: read(&self.imported_bytes),
            channels: self.channels.load(Ordering::Relaxed),
        }
    }
}
