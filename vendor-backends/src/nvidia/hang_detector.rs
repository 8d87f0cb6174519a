//! Detection of kernels that do not end while other vGPUs wait.
//!
//! A context may be resident on the compute engine for long because no other context has work, or
//! because it runs many kernels in a row. Neither is a hang. A hang is a residency longer than the
//! hang limit during which other vGPUs waited and no GPFIFO entry was fetched.
//!
//! The detector returns the time of the next check, so a hang is found as soon as the limit is
//! reached.

use std::time::{Duration, Instant};

/// Time without new records after which the context switch log is taken as complete. Records arrive
/// in batches, and some may be lost.
const LOG_SETTLED: Duration = Duration::from_millis(30);

/// Current residency of a context on the compute engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residency {
    /// Start, in nanoseconds of the GPU's clock.
    pub since_ns: u64,
    /// Time since the start.
    pub duration: Duration,
    /// Number of context switches logged so far, of all contexts.
    pub switches: u64,
}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No hang. The next check may wait for the next event.
    NotHung,
    /// Check again after this time.
    CheckAfter(Duration),
    /// The kernel hangs.
    Hung,
}

/// Hang detector for the compute engine of one vGPU.
#[derive(Debug)]
pub struct HangDetector {
    limit: Option<Duration>,
    /// When other vGPUs began to wait.
    contended_since: Option<Instant>,
    /// The residency that is suspected, and when it was first seen in this state.
    suspect: Option<(Residency, Instant)>,
    /// Number of context switches at the last hang.
    switches_at_hang: Option<u64>,
}

impl HangDetector {
    /// Creates a detector with a hang limit. Without a limit, nothing counts as a hang.
    pub fn new(limit: Option<Duration>) -> Self {
        Self { limit, contended_since: None, suspect: None, switches_at_hang: None }
    }

    /// Sets whether other vGPUs have work from `now` on.
    pub fn set_contended(&mut self, contended: bool, now: Instant) {
        self.contended_since = contended.then(|| self.contended_since.unwrap_or(now));
    }

    /// Returns whether other vGPUs have work.
    pub fn is_contended(&self) -> bool {
        self.contended_since.is_some()
    }

    /// Checks for a hang. The engine has fetched no entry for `since_fetch`. Calls `residency` only
    /// if its result matters.
    pub fn check(
        &mut self,
        now: Instant,
        since_fetch: Duration,
        residency: impl FnOnce() -> Option<Residency>,
    ) -> Verdict {
        let (Some(limit), Some(contended_since)) = (self.limit, self.contended_since) else {
            return Verdict::NotHung;
        };
        // The first of two checks, early enough that the log has settled when the limit is reached.
        let notice = limit / 2;
        let stalled = now.saturating_duration_since(contended_since).min(since_fetch);
        let residency = if stalled < notice { None } else { residency() };
        let Some(residency) = residency else {
            self.suspect = None;
            // The entry that was fetched last may have started a long kernel.
            let remaining = notice.saturating_sub(stalled);
            return if remaining.is_zero() {
                Verdict::NotHung
            } else {
                Verdict::CheckAfter(remaining)
            };
        };
        let remaining = notice.saturating_sub(residency.duration);
        if !remaining.is_zero() {
            self.suspect = None;
            return Verdict::CheckAfter(remaining);
        }
        let unchanged = |(before, _): &(Residency, Instant)| {
            (before.since_ns, before.switches) == (residency.since_ns, residency.switches)
        };
        let suspect = self.suspect.filter(unchanged).unwrap_or((residency, now));
        let (_, first_seen) = *self.suspect.insert(suspect);
        let remaining = limit
            .saturating_sub(stalled.min(residency.duration))
            .max(LOG_SETTLED.saturating_sub(now.saturating_duration_since(first_seen)));
        if !remaining.is_zero() {
            return Verdict::CheckAfter(remaining);
        }
        // Without new records since the last hang, the log still shows the residency of that hang.
        if self.switches_at_hang.is_some_and(|at| residency.switches <= at + 1) {
            return Verdict::NotHung;
        }
        self.switches_at_hang = Some(residency.switches);
        self.suspect = None;
        Verdict::Hung
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const LIMIT: Duration = Duration::from_millis(150);

    /// Checks at least every `interval` until a hang is found. Returns when that is.
    fn time_to_hang(
        detector: &mut HangDetector,
        interval: Duration,
        residency: impl Fn(Duration) -> Option<Residency>,
    ) -> Option<Duration> {
        let start = Instant::now();
        detector.set_contended(true, start);
        let mut at = Duration::ZERO;
        while at < 1000 * MS {
            at += match detector.check(start + at, at, || residency(at)) {
                Verdict::NotHung => interval,
                Verdict::CheckAfter(after) => after.min(interval).max(MS),
                Verdict::Hung => return Some(at),
            };
        }
        None
    }

    #[test]
    fn a_hang_is_found_at_the_limit_whenever_the_kernel_began() {
        for begun in 0..60u32 {
            let begun = begun * MS;
            let residency = |at: Duration| {
                let duration = at.checked_sub(begun)?;
                Some(Residency { since_ns: 7, duration, switches: 1 })
            };
            for interval in [5, 20, 50] {
                let mut detector = HangDetector::new(Some(LIMIT));
                let found = time_to_hang(&mut detector, interval * MS, residency).unwrap();
                let expected = LIMIT + begun..=LIMIT + begun + 2 * MS;
                assert!(expected.contains(&found), "{begun:?} {found:?}");
            }
        }
    }

    #[test]
    fn kernels_that_end_are_not_hangs_however_late_the_log_is() {
        // Kernels of 140 ms in a row, then kernels of 20 ms without a record of their end.
        let long = |at: Duration| {
            let kernels = at.as_millis() as u64 / 140;
            let duration = Duration::from_millis(at.as_millis() as u64 % 140);
            Some(Residency { since_ns: kernels, duration, switches: 2 * kernels })
        };
        let mut detector = HangDetector::new(Some(LIMIT));
        assert_eq!(time_to_hang(&mut detector, 50 * MS, long), None);
        let late = |at: Duration| {
            let switches = at.as_millis() as u64 / 20;
            Some(Residency { since_ns: 7, duration: at, switches })
        };
        let mut detector = HangDetector::new(Some(LIMIT));
        assert_eq!(time_to_hang(&mut detector, 50 * MS, late), None);
    }

    #[test]
    fn a_vgpu_without_contention_or_with_fetches_or_just_reset_is_not_hung() {
        let endless = |at: Duration| Some(Residency { since_ns: 7, duration: at, switches: 1 });
        assert_eq!(time_to_hang(&mut HangDetector::new(None), 5 * MS, endless), None);
        let mut detector = HangDetector::new(Some(LIMIT));
        let start = Instant::now();
        let verdict = detector.check(start, 1000 * MS, || endless(1000 * MS));
        assert_eq!(verdict, Verdict::NotHung, "no other vGPU waits");
        assert!(time_to_hang(&mut detector, 5 * MS, endless).is_some());
        assert_eq!(time_to_hang(&mut detector, 5 * MS, endless), None, "no new log records");
        let mut detector = HangDetector::new(Some(LIMIT));
        detector.set_contended(true, start);
        for at in 0..1000u32 {
            let since_fetch = (at % 100) * MS;
            let verdict = detector.check(start + at * MS, since_fetch, || endless(at * MS));
            assert_ne!(verdict, Verdict::Hung, "entries are fetched");
        }
    }
}
