//! Time, and how much of it an operation may still use.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime};

/// `CLOCK_MONOTONIC` in nanoseconds: also what semaphores are stamped with.
pub fn now_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, nanoseconds)
}

/// CPU time of the calling thread in nanoseconds: stands still while the host runs something else on its core.
pub fn thread_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(0, nanoseconds)
}

fn nanoseconds(time: TimeSpec) -> u64 {
    time.tv_sec().cast_unsigned() * 1_000_000_000 + time.tv_nsec().cast_unsigned()
}

/// A turn on the engine. Operations ask between chunks of at most about 20 us whether it is over.
#[derive(Debug)]
pub struct Turn<'a> {
    /// When it ends, in [`now_ns`]'s time.
    pub end_ns: u64,
    /// Control requests that wait for the vGPU's lock.
    pub waiting: &'a AtomicU32,
    /// The vGPU's gate.
    pub gate_open: &'a AtomicBool,
}

impl Turn<'_> {
    /// Whether the engine must be given up at once.
    pub fn expired(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) != 0
            || !self.gate_open.load(Ordering::Relaxed)
            || now_ns() >= self.end_ns
    }
}
