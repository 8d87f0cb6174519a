//! Detection of kernels that do not end while other vGPUs wait.
//!
//! A context may be resident on the compute engine for long because no other context has work, or
//! because it runs many kernels in a row. Neither is a hang. A hang is a residency longer than the
//! hang limit during which other vGPUs waited and the context could not be preempted.
//!
//! Residencies are those of the GPU's log. Whether GPFIFO entries are fetched can only be read in
//! memory of the guest, so that is a hint: a guest that shows no fetch says that it hangs. A guest
//! that shows fetches has to give up the engine when it is preempted. Otherwise a guest with an
//! endless kernel would write `GP_GET` itself and keep the engine.
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
    /// Hung if the group cannot be preempted within this time. The caller tries that, and calls
    /// [`HangDetector::hung`] or [`HangDetector::preempted`].
    MustPreempt(Duration),
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
    /// When the group was last preempted.
    preempted_at: Option<Instant>,
    /// When to read the log next.
    read_log_at: Option<Instant>,
}

impl HangDetector {
    /// Creates a detector with a hang limit. Without a limit, nothing counts as a hang.
    pub fn new(limit: Option<Duration>) -> Self {
        Self {
            limit,
            contended_since: None,
            suspect: None,
            switches_at_hang: None,
            preempted_at: None,
            read_log_at: None,
        }
    }

    /// Sets whether other vGPUs have work from `now` on.
    pub fn set_contended(&mut self, contended: bool, now: Instant) {
        self.contended_since = contended.then(|| self.contended_since.unwrap_or(now));
        if !contended {
            self.read_log_at = None;
        }
    }

    /// Records that the group could be preempted at `now`: its kernels end.
    pub fn preempted(&mut self, now: Instant) {
        self.preempted_at = Some(now);
        self.suspect = None;
    }

    /// Records that the group could not be preempted.
    pub fn hung(&mut self) {
        self.switches_at_hang = self.suspect.take().map(|(residency, _)| residency.switches);
    }

    /// Returns whether other vGPUs have work.
    pub fn is_contended(&self) -> bool {
        self.contended_since.is_some()
    }

    /// Checks for a hang. According to the guest's memory, the engine has fetched no entry for
    /// `since_fetch`. Calls `residency` only if its result matters.
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
        let since = self.preempted_at.map_or(contended_since, |at| at.max(contended_since));
        let waited = now.saturating_duration_since(since);
        if waited < notice {
            return self.read_log_after(now, notice.saturating_sub(waited));
        }
        if let Some(at) = self.read_log_at.filter(|at| *at > now) {
            return Verdict::CheckAfter(at.saturating_duration_since(now));
        }
        let Some(residency) = residency() else {
            // A residency that begins now is noticed in time.
            return self.read_log_after(now, notice);
        };
        let stalled = waited.min(residency.duration);
        if stalled < notice {
            return self.read_log_after(now, notice.saturating_sub(stalled));
        }
        let unchanged = |(before, _): &(Residency, Instant)| {
            (before.since_ns, before.switches) == (residency.since_ns, residency.switches)
        };
        let suspect = self.suspect.filter(unchanged).unwrap_or((residency, now));
        let (_, first_seen) = *self.suspect.insert(suspect);
        let remaining = limit
            .saturating_sub(stalled)
            .max(LOG_SETTLED.saturating_sub(now.saturating_duration_since(first_seen)));
        if !remaining.is_zero() {
            return Verdict::CheckAfter(remaining);
        }
        // Without new records since the last hang, the log still shows the residency of that hang.
        if self.switches_at_hang.is_some_and(|at| residency.switches <= at + 1) {
            return Verdict::NotHung;
        }
        if since_fetch < limit {
            // The guest's memory shows fetches. A kernel that has begun after the last one is found
            // without a preemption, which stops the engine for a moment.
            let remaining = (limit * 2).saturating_sub(stalled);
            return if remaining.is_zero() {
                Verdict::MustPreempt(limit)
            } else {
                Verdict::CheckAfter(remaining.min(limit.saturating_sub(since_fetch)))
            };
        }
        self.hung();
        Verdict::Hung
    }

    /// Nothing is suspect, and the log need not be read before `after`.
    fn read_log_after(&mut self, now: Instant, after: Duration) -> Verdict {
        self.suspect = None;
        self.read_log_at = Some(now + after);
        Verdict::CheckAfter(after)
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
                Verdict::MustPreempt(_) => return None,
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

    #[test]
    fn a_guest_that_shows_fetches_is_preempted_to_prove_them() {
        let endless = |at: Duration| Some(Residency { since_ns: 7, duration: at, switches: 1 });
        let mut detector = HangDetector::new(Some(LIMIT));
        let start = Instant::now();
        detector.set_contended(true, start);
        let mut preempted = Vec::new();
        for at in 0..1000u32 {
            match detector.check(start + at * MS, MS, || endless(at * MS)) {
                Verdict::MustPreempt(timeout) => {
                    assert_eq!(timeout, LIMIT);
                    preempted.push(at);
                    detector.preempted(start + at * MS);
                }
                Verdict::Hung => panic!("not without a preemption"),
                Verdict::NotHung | Verdict::CheckAfter(_) => {}
            }
        }
        assert_eq!(preempted, [300, 600, 900], "twice the limit after the last preemption");
    }
}
