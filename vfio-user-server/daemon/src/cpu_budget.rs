//! Budgets of CPU time for the requests of others.
//!
//! What counts is the CPU time that this process spends on requests, since requests differ by a
//! factor of a thousand. A budget begins with a reserve, and fills up at a constant rate. Requests
//! without a budget wait until it has [`QUANTUM`] again.

use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

/// Limit of a budget.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// CPU time per time, in percent of a CPU.
    pub percent: u32,
    /// Reserve.
    pub reserve: Duration,
}

/// CPU time that has to be there before waiting requests are served. Longer waits are rarer.
const QUANTUM: Duration = Duration::from_millis(5);

/// Longest debt. A process that is killed while it waits is noticed after its wait, at most 0.6 s.
const MAX_DEBT: Duration = Duration::from_millis(150);

/// Budget of CPU time.
#[derive(Debug)]
pub struct Budget {
    limit: Limit,
    /// What is left, in nanoseconds. Negative if the last request took more.
    left_ns: i64,
    updated: Instant,
}

/// Returns the CPU time that the calling thread has used.
pub fn thread_cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

fn nanoseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

impl Budget {
    /// Creates a full budget.
    pub fn new(limit: Limit, now: Instant) -> Self {
        Self { limit, left_ns: nanoseconds(limit.reserve), updated: now }
    }

    /// Limits what is left to what another budget has left.
    #[must_use]
    pub fn at_most(mut self, other: &Self) -> Self {
        self.left_ns = self.left_ns.min(other.left_ns);
        self
    }

    /// Adds what has become available until `now`.
    fn update(&mut self, now: Instant) {
        let passed = nanoseconds(now.saturating_duration_since(self.updated));
        let earned = passed.saturating_mul(i64::from(self.limit.percent)) / 100;
        let reserve = nanoseconds(self.limit.reserve);
        self.left_ns = self.left_ns.saturating_add(earned).min(reserve);
        self.updated = now;
    }

    /// Takes the time that a request has used.
    pub fn charge(&mut self, used: Duration, now: Instant) {
        self.update(now);
        let left = self.left_ns.saturating_sub(nanoseconds(used));
        self.left_ns = left.max(-nanoseconds(MAX_DEBT));
    }

    /// Returns whether requests have to wait.
    pub fn is_exhausted(&self) -> bool {
        self.left_ns <= 0
    }

    /// Returns whether at least half of the reserve is left.
    pub fn is_ample(&self) -> bool {
        self.left_ns >= nanoseconds(self.limit.reserve) / 2
    }

    /// Returns whether the whole reserve is left.
    pub fn is_full(&mut self, now: Instant) -> bool {
        self.update(now);
        self.left_ns >= nanoseconds(self.limit.reserve)
    }

    /// Returns how long waiting requests have to wait from `now` on, if at all.
    pub fn wait(&mut self, now: Instant) -> Option<Duration> {
        self.update(now);
        let missing = nanoseconds(QUANTUM).saturating_sub(self.left_ns);
        let missing = u64::try_from(missing).ok().filter(|missing| *missing > 0)?;
        Some(Duration::from_nanos(missing.saturating_mul(100) / u64::from(self.limit.percent)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUARTER: Limit = Limit { percent: 25, reserve: Duration::from_secs(1) };
    const HALF: Limit = Limit { percent: 50, reserve: Duration::from_secs(4) };
    const REQUEST: Duration = Duration::from_micros(20);

    /// Returns the CPU time that a flood of requests gets in `time`, after its reserve is used up.
    fn flood(limit: Limit, time: Duration) -> Duration {
        let start = Instant::now();
        let mut budget = Budget::new(limit, start);
        budget.charge(limit.reserve, start);
        let (mut now, mut used) = (start, Duration::ZERO);
        while now < start + time {
            if budget.is_exhausted() {
                now += budget.wait(now).unwrap();
                assert_eq!(budget.wait(now), None);
            }
            now += REQUEST;
            used += REQUEST;
            budget.charge(REQUEST, now);
        }
        used
    }

    #[test]
    fn a_flood_gets_its_part_of_a_cpu() {
        for limit in [QUARTER, HALF] {
            let time = Duration::from_secs(10);
            let used = flood(limit, time);
            let percent = used.as_secs_f64() / time.as_secs_f64() * 100.0;
            assert!((percent - f64::from(limit.percent)).abs() < 1.0, "{percent}");
        }
    }

    #[test]
    fn a_start_does_not_wait() {
        let start = Instant::now();
        let mut budget = Budget::new(QUARTER, start);
        for request in 1..=10_000 {
            budget.charge(REQUEST, start + REQUEST * request);
            assert!(!budget.is_exhausted());
        }
        assert!(budget.is_ample());
        // The reserve is there again later, and no more.
        assert!(!budget.is_full(start + REQUEST * 10_000));
        assert!(budget.is_full(start + Duration::from_secs(100)));
        assert_eq!(budget.left_ns, nanoseconds(QUARTER.reserve));
    }

    #[test]
    fn a_long_request_is_paid_for_afterwards() {
        let start = Instant::now();
        let mut budget = Budget::new(QUARTER, start);
        budget.charge(QUARTER.reserve + Duration::from_millis(95), start);
        assert_eq!(budget.wait(start), Some(Duration::from_millis(400)));
        let wait = MAX_DEBT + QUANTUM;
        budget.charge(Duration::from_secs(9), start);
        assert_eq!(budget.wait(start), Some(wait * 4));
        // A new budget does not get around one that it is part of.
        assert!(Budget::new(QUARTER, start).at_most(&budget).is_exhausted());
    }
}
