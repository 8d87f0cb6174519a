//! Times that workers report beside their engine time: with copies, and with any work.

use std::time::{Duration, Instant};

use super::usage_reconcile::ReportLimit;

/// A total that a worker reports, as far as the total is plausible.
#[derive(Clone, Copy, Debug)]
pub struct ReportedTotal {
    /// Part of the total that is accounted, in nanoseconds.
    accounted_ns: u64,
    limit: ReportLimit,
}

impl ReportedTotal {
    /// Creates the total of a worker that starts at `start`.
    pub fn new(start: Instant) -> Self {
        Self { accounted_ns: 0, limit: ReportLimit::new(start) }
    }

    /// Counts what a worker reports that ran under a previous manager as accounted.
    pub fn take_over(&mut self, total_ns: u64) {
        self.accounted_ns = total_ns;
    }

    /// Takes a report, and returns what is new of it.
    pub fn take(&mut self, now: Instant, total_ns: u64) -> Duration {
        let new_ns = total_ns.saturating_sub(self.accounted_ns);
        self.accounted_ns = total_ns.max(self.accounted_ns);
        self.limit.admit(now, Duration::from_nanos(new_ns))
    }
}

/// Time in which a vGPU had work. The vGPU waited for the part of it without the engine.
#[derive(Clone, Copy, Debug)]
pub struct WorkTime {
    reported: ReportedTotal,
    had_work_ns: u64,
}

impl WorkTime {
    /// Creates the time of a worker that starts at `start`.
    pub fn new(start: Instant) -> Self {
        Self { reported: ReportedTotal::new(start), had_work_ns: 0 }
    }

    /// Takes over what a worker reports that ran under a previous manager, up to `most_ns`.
    pub fn take_over(&mut self, total_ns: u64, most_ns: u64) {
        self.reported.take_over(total_ns);
        self.had_work_ns = total_ns.min(most_ns);
    }

    /// Takes a report. `engine_ns` is what was charged so far.
    ///
    /// A charge that comes late may exceed the time with work. The excess hides no later wait.
    pub fn take(&mut self, now: Instant, total_ns: u64, engine_ns: u64) {
        let new_ns = self.reported.take(now, total_ns).as_nanos() as u64;
        self.had_work_ns = self.had_work_ns.saturating_add(new_ns).max(engine_ns);
    }

    /// Returns how long work has waited, beside the engine time `engine_ns`.
    pub fn wait_ns(&self, engine_ns: u64) -> u64 {
        self.had_work_ns.saturating_sub(engine_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_wait_counts_at_once_however_much_was_charged_late() {
        let start = Instant::now();
        let mut work = WorkTime::new(start);
        // While the vGPU was alone, its usage became known half a second late.
        work.take(start + Duration::from_secs(1), 500 * MS, 1000 * MS);
        assert_eq!(work.wait_ns(1000 * MS), 0);
        // It works beside another vGPU now.
        work.take(start + Duration::from_millis(1025), 525 * MS, 1005 * MS);
        assert_eq!(work.wait_ns(1005 * MS), 20 * MS);
    }

    #[test]
    fn no_report_makes_a_wait_longer_than_the_time() {
        let start = Instant::now();
        let mut work = WorkTime::new(start);
        work.take_over(7_000 * MS, 5_000 * MS);
        assert_eq!(work.wait_ns(0), 5_000 * MS);
        let mut work = WorkTime::new(start);
        work.take(start + Duration::from_millis(100), u64::MAX, 0);
        assert!(work.wait_ns(0) <= 1_000 * MS, "{}", work.wait_ns(0));
    }
}
