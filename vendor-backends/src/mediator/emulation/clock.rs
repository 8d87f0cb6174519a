//! Clocks of the engine.

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime};

/// Returns `CLOCK_MONOTONIC` in nanoseconds. Semaphore timestamps use this clock too.
pub fn now_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, nanoseconds)
}

/// Returns the CPU time of the calling thread in nanoseconds. The clock stops while the host runs
/// something else on the thread's core.
pub fn thread_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(0, nanoseconds)
}

/// Returns how often the calling thread has slept.
pub fn thread_sleeps() -> i64 {
    getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.voluntary_context_switches())
}

fn nanoseconds(time: TimeSpec) -> u64 {
    time.tv_sec().cast_unsigned() * 1_000_000_000 + time.tv_nsec().cast_unsigned()
}
