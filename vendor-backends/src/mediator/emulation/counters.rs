//! Counters of a vGPU. The engine writes them; any thread reads them without a lock.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use mdev_core::gpu::{Usage, Waits};

/// Counters of a vGPU, with the fields of [`Usage`].
#[derive(Debug, Default)]
pub struct Counters {
    /// Nanoseconds on the engine.
    pub engine_ns: AtomicU64,
    /// Nanoseconds of `engine_ns` for copies.
    pub copy_ns: AtomicU64,
    /// Nanoseconds of `engine_ns` for kernels.
    pub compute_ns: AtomicU64,
    /// Nanoseconds with work but without the engine.
    pub wait_ns: AtomicU64,
    /// Nanoseconds of `wait_ns` caused by the gate or the budget.
    pub gated_ns: AtomicU64,
    /// Number of waits that the gate or the budget caused.
    pub gate_closings: AtomicU64,
    /// Engine time used after the gate closed or the budget ended.
    pub gate_cost_ns: AtomicU64,
    /// Retired GPFIFO entries.
    pub submissions: AtomicU64,
    /// Doorbells found by polling.
    pub polled_doorbells: AtomicU64,
    /// Wake-ups from sleep.
    pub wakeups: AtomicU64,
    /// Number of times that another group ran while work was left.
    pub preemptions: AtomicU64,
    /// Runs that exceeded their limit.
    pub slice_overruns: AtomicU64,
    /// Nanoseconds beyond the limit.
    pub overrun_ns: AtomicU64,
    /// Nanoseconds of runs that the host took.
    pub stolen_ns: AtomicU64,
    /// Channels that faulted.
    pub faults: AtomicU64,
    /// Channels that were reset because of a hang.
    pub hang_resets: AtomicU64,
    /// Submissions that the quota delayed.
    pub throttled: AtomicU64,
    /// Whether the vGPU has work.
    pub runnable: AtomicBool,
    /// Bytes of imported memory.
    pub imported_bytes: AtomicU64,
    /// Number of channels.
    pub channels: AtomicU32,
    /// Waits for the engine.
    pub waits: WaitCounters,
}

/// Waits for the engine, counted by their length: the buckets of [`Waits`].
#[derive(Debug)]
pub struct WaitCounters([AtomicU32; Waits::BUCKETS]);

impl Default for WaitCounters {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU32::new(0)))
    }
}

impl WaitCounters {
    /// Counts a wait of `ns` nanoseconds.
    pub fn record(&self, ns: u64) {
        self.0[Waits::bucket(ns)].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the counts.
    pub fn counts(&self) -> Waits {
        Waits::from_counts(std::array::from_fn(|bucket| self.0[bucket].load(Ordering::Relaxed)))
    }
}

impl Counters {
    /// Adds to a counter.
    pub fn add(counter: &AtomicU64, more: u64) {
        counter.fetch_add(more, Ordering::Relaxed);
    }

    /// Returns the values of all counters.
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
            busy_groups: 0,
            waits: self.waits.counts(),
        }
    }
}
