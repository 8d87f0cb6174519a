//! Stolen time: time in which the host ran something else on the engine's core.
//!
//! A thread without its core has lost it to the host, or has given it up to sleep. The engine never
//! sleeps of its own accord while it has work. It sleeps in page faults: in those of a vGPU's
//! imported memory, which a hostile client can make long by punching holes into the file. Such time
//! is the vGPU's own. The kernel counts both cases: a sleep is a voluntary context switch.

use crate::mediator::emulation::clock::{thread_ns, thread_sleeps};

/// Time without the core that is too short to look for its cause. Not counted as stolen.
const SHORT_NS: u64 = 10_000;

/// Stolen time in nanoseconds. No vGPU is charged for it.
#[derive(Debug, Default)]
pub(super) struct StolenTime {
    /// Whether the CPU is the engine. Time of other engines cannot be stolen.
    on_cpu: bool,
    wall_ns: u64,
    cpu_ns: u64,
    /// Voluntary context switches of the thread.
    sleeps: i64,
    total_ns: u64,
}

/// Time in which the engine's thread did not run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WithoutCore {
    /// Nanoseconds that the host took.
    pub stolen_ns: u64,
    /// Nanoseconds of sleep.
    pub slept_ns: u64,
}

impl StolenTime {
    pub fn new(on_cpu: bool) -> Self {
        Self { on_cpu, ..Self::default() }
    }

    /// Returns the wall time of the last reading.
    pub fn last_reading_ns(&self) -> u64 {
        self.wall_ns
    }

    /// Reads the clocks. Returns the time without the core since the last reading. All of it is
    /// sleep if the thread has slept: what the host took besides cannot be told apart.
    pub fn read(&mut self, wall_ns: u64) -> WithoutCore {
        let cpu_ns = thread_ns();
        let without_core =
            wall_ns.saturating_sub(self.wall_ns).saturating_sub(cpu_ns - self.cpu_ns);
        let mut time = WithoutCore::default();
        if self.on_cpu && without_core > SHORT_NS {
            let sleeps = thread_sleeps();
            let slept = sleeps != self.sleeps;
            *(if slept { &mut time.slept_ns } else { &mut time.stolen_ns }) = without_core;
            self.sleeps = sleeps;
        }
        *self = Self { wall_ns, cpu_ns, total_ns: self.total_ns + time.stolen_ns, ..*self };
        time
    }

    /// Reads the clocks after a sleep. Only the delay of the wake-up counts as stolen.
    pub fn read_after_sleep(&mut self, wall_ns: u64, late_ns: u64) {
        let late_ns = if self.on_cpu { late_ns } else { 0 };
        let total_ns = self.total_ns + late_ns;
        *self = Self { wall_ns, cpu_ns: thread_ns(), sleeps: thread_sleeps(), total_ns, ..*self };
    }

    /// Returns wall time without stolen time. Budgets refill by this clock, so that a share of the
    /// GPU is a share of its available time.
    pub fn available_ns(&self, wall_ns: u64) -> u64 {
        wall_ns.saturating_sub(self.total_ns)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::mediator::emulation::clock::now_ns;

    #[test]
    fn sleep_is_not_stolen() {
        let mut time = StolenTime::new(true);
        time.read_after_sleep(now_ns(), 0);
        thread::sleep(Duration::from_millis(5));
        let read = time.read(now_ns());
        assert_eq!(read.stolen_ns, 0);
        assert!(read.slept_ns >= 4_000_000, "{read:?}");
        assert_eq!(time.available_ns(7), 7);
    }

    #[test]
    fn time_without_sleep_and_without_the_core_is_stolen() {
        let mut time = StolenTime::new(true);
        time.read_after_sleep(now_ns(), 0);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(5) {
            thread::yield_now();
        }
        // As if the host had taken a second.
        let wall = now_ns() + 1_000_000_000;
        assert!(time.read(wall).stolen_ns >= 999_000_000);
        assert!(time.available_ns(wall) < wall - 999_000_000);
        let mut device = StolenTime::new(false);
        assert_eq!(device.read(now_ns()), WithoutCore::default(), "only the CPU can be stolen");
    }
}
