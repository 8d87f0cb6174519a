//! Pace of a vGPU's rings: how often the thread may ring, and when it expects the next entry.

use std::time::{Duration, Instant};

use super::{RING_BURST, RING_INTERVAL};

/// Allowance of rings: one every [`RING_INTERVAL`] on average, and [`RING_BURST`] at once.
#[derive(Debug)]
pub(super) struct Allowance {
    /// Time from which the thread may ring again.
    pub next: Instant,
}

impl Allowance {
    /// Takes rings out of the allowance.
    pub fn take(&mut self, rings: u32, now: Instant) {
        let saved = RING_INTERVAL * RING_BURST;
        let full = now.checked_sub(saved).unwrap_or(now);
        self.next = self.next.max(full) + RING_INTERVAL * rings;
    }
}

/// Number of intervals that a prediction considers.
const MEMORY: usize = 8;
/// Time by which a sleep is usually too long.
const OVERSHOOT: Duration = Duration::from_micros(10);
/// Shortest sleep that is worth its system call.
const SHORTEST_SLEEP: Duration = Duration::from_micros(20);
/// Longest time before the shortest recent interval's end from which the thread spins.
const LONGEST_MARGIN: Duration = Duration::from_micros(40);
/// Longest sleep on a prediction, which can be wrong.
const LONGEST_SLEEP: Duration = Duration::from_micros(100);

/// Recent intervals between rings. A guest that waits for a kernel of 200 us before it submits the
/// next one does not ring in between, and the thread need not spin for it.
#[derive(Debug)]
pub(super) struct Pace {
    intervals: [Duration; MEMORY],
    next: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self { intervals: [Duration::ZERO; MEMORY], next: 0 }
    }
}

impl Pace {
    /// Records the time between two rings.
    pub fn record(&mut self, interval: Duration) {
        self.intervals[self.next] = interval;
        self.next = (self.next + 1) % MEMORY;
    }

    /// Returns for how long the thread may sleep `quiet` after the last ring: no ring is expected
    /// before 15/16 of the shortest interval, or [`LONGEST_MARGIN`] before its end. None if that is
    /// too soon for a sleep.
    pub fn sleep(&self, quiet: Duration) -> Option<Duration> {
        let shortest = self.intervals.iter().min().copied().unwrap_or_default();
        let expected = (shortest * 15 / 16).max(shortest.saturating_sub(LONGEST_MARGIN));
        let left = expected.checked_sub(quiet + OVERSHOOT)?;
        (left >= SHORTEST_SLEEP).then(|| left.min(LONGEST_SLEEP))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn a_burst_is_allowed_and_the_mean_rate_is_kept() {
        let start = Instant::now();
        let mut allowance = Allowance { next: start };
        let (mut now, mut rings) = (start + RING_INTERVAL * 100, 0);
        let end = now + RING_INTERVAL * 1000;
        let mut at_once = 0;
        while now < end {
            if now >= allowance.next {
                allowance.take(1, now);
                rings += 1;
            } else {
                at_once = if at_once == 0 { rings } else { at_once };
                now += US;
            }
        }
        assert_eq!(at_once, RING_BURST + 1);
        assert!((1000..=1000 + RING_BURST + 1).contains(&rings), "{rings}");
    }

    #[test]
    fn the_thread_sleeps_only_where_no_ring_is_expected() {
        let mut pace = Pace::default();
        assert_eq!(pace.sleep(Duration::ZERO), None, "nothing is known");
        (0..MEMORY).for_each(|_| pace.record(160 * US));
        assert_eq!(pace.sleep(Duration::ZERO), Some(LONGEST_SLEEP));
        assert_eq!(pace.sleep(110 * US), Some(30 * US));
        assert_eq!(pace.sleep(125 * US), None, "a ring is due");
        assert_eq!(pace.sleep(400 * US), None, "a ring is late");
        (0..MEMORY).for_each(|_| pace.record(2000 * US));
        assert_eq!(pace.sleep(1900 * US), Some(50 * US), "spins for the last 50 us");
        pace.record(8 * US);
        assert_eq!(pace.sleep(Duration::ZERO), None, "one short interval suffices");
    }
}
