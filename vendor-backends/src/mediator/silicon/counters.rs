//! What is counted of a vGPU: written by the engine, read by anyone without a lock.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use mdev_core::gpu::Usage;

/// As [`Usage`], field by field.
#[derive(Debug, Default)]
pub struct Counters {
    /// Nanoseconds on the engine.
    pub engine_ns: AtomicU64,
    /// Of that, for copies.
    pub copy_ns: AtomicU64,
    /// And for kernels.
    pub compute_ns: AtomicU64,
    /// Nanoseconds with work, but without the engine.
    pub wait_ns: AtomicU64,
    /// Of that, held back by its gate or its budget.
    pub gated_ns: AtomicU64,
    /// Times that began.
    pub gate_closings: AtomicU64,
    /// Engine time used after it.
    pub gate_cost_ns: AtomicU64,
    /// GPFIFO entries done.
    pub submissions: AtomicU64,
    /// Doorbells found by looking.
    pub polled_doorbells: AtomicU64,
    /// Wake-ups from sleep.
    pub wakeups: AtomicU64,
    /// Times it lost the engine with work left.
    pub preemptions: AtomicU64,
    /// Turns that ended too late.
    pub slice_overruns: AtomicU64,
    /// Nanoseconds by which they did.
    pub overrun_ns: AtomicU64,
    /// Nanoseconds that the host took of its turns.
    pub stolen_ns: AtomicU64,
    /// Channels that faulted.
    pub faults: AtomicU64,
    /// Channels that hung.
    pub hang_resets: AtomicU64,
    /// Submissions that waited for their quota.
    pub throttled: AtomicU64,
    /// Whether it has work.
    pub runnable: AtomicBool,
    /// Imported bytes.
    pub imported_bytes: AtomicU64,
    /// Channels that exist.
    pub channels: AtomicU32,
}

impl Counters {
    /// Adds to one of them.
    pub fn add(counter: &AtomicU64, more: u64) {
        counter.fetch_add(more, Ordering::Relaxed);
    }

    /// A reading of all.
    pub fn usage(&self) -> Usage {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Usage {
            engine_ns: read(&self.engine_ns),
            copy_ns: read(&self.copy_ns),
            compute_ns: read(&self.compute_ns),
            wait_ns: read(&self.wait_ns),
            gated_ns: read(&self.gated_ns),
            gate_closings: read(&self.gate_closings),
            gate_cost_ns: read(&self.gate_cost_ns),
            submissions: read(&self.submissions),
            polled_doorbells: read(&self.polled_doorbells),
            wakeups: read(&self.wakeups),
            preemptions: read(&self.preemptions),
            slice_overruns: read(&self.slice_overruns),
            overrun_ns: read(&self.overrun_ns),
            stolen_ns: read(&self.stolen_ns),
            faults: read(&self.faults),
            hang_resets: read(&self.hang_resets),
            throttled: read(&self.throttled),
            runnable: self.runnable.load(Ordering::Relaxed),
            imported_bytes: read(&self.imported_bytes),
            channels: self.channels.load(Ordering::Relaxed),
        }
    }
}
