//! Stolen time: time in which the host ran something else on the engine's core.

use crate::mediator::emulation::clock::thread_ns;

/// Stolen time in nanoseconds. No vGPU is charged for it.
#[derive(Debug, Default)]
pub(super) struct StolenTime {
    /// Whether the CPU is the engine. Time of other engines cannot be stolen.
    on_cpu: bool,
    wall_ns: u64,
    cpu_ns: u64,
    total_ns: u64,
}

impl StolenTime {
    pub fn new(on_cpu: bool) -> Self {
        Self { on_cpu, ..Self::default() }
    }

    /// Returns the wall time of the last reading.
    pub fn last_reading_ns(&self) -> u64 {
        self.wall_ns
    }

    /// Reads the clocks. Returns the time stolen since the last reading.
    pub fn read(&mut self, wall_ns: u64) -> u64 {
        let cpu_ns = thread_ns();
        let stolen = (wall_ns - self.wall_ns).saturating_sub(cpu_ns - self.cpu_ns);
        let stolen = if self.on_cpu { stolen } else { 0 };
        *self = Self { wall_ns, cpu_ns, total_ns: self.total_ns + stolen, ..*self };
        stolen
    }

    /// Reads the clocks after a sleep. Only the delay of the wake-up counts as stolen.
    pub fn read_after_sleep(&mut self, wall_ns: u64, late_ns: u64) {
        let late_ns = if self.on_cpu { late_ns } else { 0 };
        let total_ns = self.total_ns + late_ns;
        *self = Self { wall_ns, cpu_ns: thread_ns(), total_ns, ..*self };
    }

    /// Returns wall time without stolen time. Budgets refill by this clock, so that a share of the
    /// GPU is a share of its available time.
    pub fn available_ns(&self, wall_ns: u64) -> u64 {
        wall_ns.saturating_sub(self.total_ns)
    }
}
