//! Budget of CPU time for the control requests of one vGPU.
//!
//! A guest can cause requests in a loop. They run on a thread of the vGPU's own, beside the engine,
//! and are no engine time. Beyond the budget the thread pauses, and the guest with it.

use std::time::Duration;

/// CPU time that may be used at once.
const BURST_NS: i64 = 500_000_000;
/// Part of the wall clock by which the budget grows: a twentieth.
const SHARE: i64 = 20;
/// Longest pause after one request, so that the worker still answers the manager.
const MAX_PAUSE_NS: i64 = 100_000_000;

/// CPU time that is left.
#[derive(Debug)]
pub(super) struct RequestBudget {
    /// Nanoseconds; below 0 beyond the budget.
    left: i64,
    /// Clocks at the last request, in nanoseconds.
    cpu: u64,
    wall: u64,
}

impl RequestBudget {
    /// Creates a full budget. Takes the thread's CPU time and the wall time.
    pub fn new(cpu_ns: u64, wall_ns: u64) -> Self {
        Self { left: BURST_NS, cpu: cpu_ns, wall: wall_ns }
    }

    /// Charges the CPU time since the last call. Returns how long the thread has to pause.
    pub fn charge(&mut self, cpu_ns: u64, wall_ns: u64) -> Option<Duration> {
        let since = |now: u64, before: u64| {
            i64::try_from(now.saturating_sub(before)).unwrap_or(i64::MAX / SHARE)
        };
        let earned = since(wall_ns, self.wall) / SHARE;
        let left = self.left.saturating_add(earned).min(BURST_NS);
        self.left = left.saturating_sub(since(cpu_ns, self.cpu)).max(-BURST_NS);
        (self.cpu, self.wall) = (cpu_ns, wall_ns);
        let pause_ns = self.left.min(0).saturating_mul(-SHARE).min(MAX_PAUSE_NS);
        (pause_ns > 0).then(|| Duration::from_nanos(pause_ns.unsigned_abs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the CPU time that requests of `request_ns` get in ten minutes, in per cent.
    fn used(request_ns: u64) -> f64 {
        let (mut cpu, mut wall) = (0, 0);
        let mut budget = RequestBudget::new(cpu, wall);
        while wall < 600_000_000_000 {
            cpu += request_ns;
            wall += request_ns;
            wall += budget.charge(cpu, wall).map_or(0, |pause| pause.as_nanos() as u64);
        }
        cpu as f64 * 100.0 / wall as f64
    }

    #[test]
    fn requests_without_end_get_a_twentieth_of_a_cpu() {
        for request_ns in [20_000, 1_000_000, 5_000_000] {
            let used = used(request_ns);
            assert!((5.0..5.2).contains(&used), "{request_ns}: {used}");
        }
    }

    #[test]
    fn the_requests_of_a_driver_that_starts_are_not_delayed() {
        let mut budget = RequestBudget::new(7, 7);
        assert!((1..=10_000).all(|n| budget.charge(7 + n * 50_000, 7 + n * 50_000).is_none()));
        // Time without requests fills the budget again, but not beyond.
        assert_eq!(budget.charge(500_000_007, u64::MAX), None);
        assert_eq!(budget.left, BURST_NS);
    }
}
