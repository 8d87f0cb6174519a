//! Detection of kernels that do not end while other vGPUs wait.
//!
//! A context may be resident on the compute engine for long because no other context has work, or
//! because it runs many kernels in a row. Neither is a hang. A hang is a residency longer than the
//! hang limit during which other vGPUs waited and the engine did not change to the
//! [`SwitchProbe`](super::observers::switch_probe::SwitchProbe), although the probe asked for it.
//!
//! Residencies are those of the GPU's log. Whether GPFIFO entries are fetched can only be read in
//! memory of the guest, and so is a hint: without fetches, the probe has to wait for a shorter
//! time. A guest with an endless kernel that writes `GP_GET` itself is found later, and it is
//! found.
//!
//! The detector returns the time of the next check, so a hang is found as soon as the limit is
//! reached.

use std::time::{Duration, Instant};

use super::observers::switch_probe::{Probed, Request};

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

/// What may excuse a long residency.
#[derive(Clone, Copy, Debug)]
pub struct Hints {
    /// Time for which the engine has fetched no entry, according to the guest's memory.
    pub since_fetch: Duration,
    /// Time slice of the vGPU, for which the probe may have to wait.
    pub timeslice: Duration,
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
    /// Request to the probe for the suspected residency.
    request: Option<Request>,
    /// When the engine was last found to change to the probe.
    passed_at: Option<Instant>,
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
            request: None,
            passed_at: None,
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

    /// Returns whether other vGPUs have work.
    pub fn is_contended(&self) -> bool {
        self.contended_since.is_some()
    }

    /// Checks for a hang. Calls `residency` and `probe` only if their results matter. `probe` makes
    /// a request, or takes one that was made, and returns its state. None without a probe.
    pub fn check(
        &mut self,
        now: Instant,
        hints: Hints,
        residency: impl FnOnce() -> Option<Residency>,
        probe: impl FnOnce(Option<Request>) -> Option<Probed>,
    ) -> Verdict {
        let (Some(limit), Some(contended_since)) = (self.limit, self.contended_since) else {
            return Verdict::NotHung;
        };
        // The first of two checks, early enough that the log has settled when the limit is reached.
        let notice = limit / 2;
        let since = self.passed_at.map_or(contended_since, |at| at.max(contended_since));
        let waited = now.saturating_duration_since(since);
        if waited < notice {
            return self.read_log_after(now, notice.saturating_sub(waited));
        }
        // A request makes the GPU switch contexts twice. A vGPU that shows progress seldom pays.
        let pause = self.passed_at.map_or(Duration::ZERO, |at| {
            (limit * 2).saturating_sub(now.saturating_duration_since(at))
        });
        if !pause.is_zero() && hints.since_fetch < notice {
            return Verdict::CheckAfter(pause.min(notice.saturating_sub(hints.since_fetch)));
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
        self.judge(now, limit, hints, (residency, stalled), probe)
    }

    /// Judges a residency during which other vGPUs have waited for some time.
    fn judge(
        &mut self,
        now: Instant,
        limit: Duration,
        hints: Hints,
        (residency, stalled): (Residency, Duration),
        probe: impl FnOnce(Option<Request>) -> Option<Probed>,
    ) -> Verdict {
        // Without new records since the last hang, the log still shows the residency of that hang.
        if self.switches_at_hang.is_some_and(|at| residency.switches <= at + 1) {
            return self.read_log_after(now, limit / 2);
        }
        let unchanged = |(before, _): &(Residency, Instant)| {
            (before.since_ns, before.switches) == (residency.since_ns, residency.switches)
        };
        let suspect = self.suspect.filter(unchanged).unwrap_or((residency, now));
        let (_, first_seen) = *self.suspect.insert(suspect);
        let probed = probe(self.request);
        self.request = probed.map(|probed| probed.request);
        let shows_progress = hints.since_fetch < limit;
        let remaining = match probed {
            Some(probed) if probed.served => {
                self.passed_at = Some(now);
                return self.read_log_after(now, limit / 2);
            }
            Some(probed) => {
                let pending = now.saturating_duration_since(probed.requested_at);
                let slice = hints.timeslice.min(limit);
                let needed = if shows_progress { limit + slice } else { slice.max(limit / 3) };
                needed.saturating_sub(pending.min(residency.duration))
            }
            None => limit.saturating_sub(hints.since_fetch),
        };
        let remaining = limit
            .saturating_sub(stalled)
            .max(LOG_SETTLED.saturating_sub(now.saturating_duration_since(first_seen)))
            .max(remaining);
        if !remaining.is_zero() {
            // Meanwhile the guest may cease to show progress.
            let until_stalled = limit.saturating_sub(hints.since_fetch);
            let next = if shows_progress { remaining.min(until_stalled) } else { remaining };
            return Verdict::CheckAfter(next);
        }
        self.switches_at_hang = Some(residency.switches);
        self.suspect = None;
        self.request = None;
        Verdict::Hung
    }

    /// Ends the suspicion, and lets the next check read the log after a time.
    fn read_log_after(&mut self, now: Instant, after: Duration) -> Verdict {
        self.suspect = None;
        self.request = None;
        self.read_log_at = Some(now + after);
        Verdict::CheckAfter(after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const LIMIT: Duration = Duration::from_millis(150);
    const TIMESLICE: Duration = Duration::from_millis(12);

    /// Run of a detector, with a probe that the engine serves after a time, or never.
    struct Run {
        detector: HangDetector,
        start: Instant,
        served_after: Option<Duration>,
        requested_at: Option<Instant>,
        requests: u32,
    }

    impl Run {
        fn new(limit: Option<Duration>, served_after: Option<Duration>) -> Self {
            let (detector, start) = (HangDetector::new(limit), Instant::now());
            Self { detector, start, served_after, requested_at: None, requests: 0 }
        }

        fn check(
            &mut self,
            at: Duration,
            since_fetch: Duration,
            residency: Option<Residency>,
        ) -> Verdict {
            let now = self.start + at;
            let hints = Hints { since_fetch, timeslice: TIMESLICE };
            let Self { detector, served_after, requested_at, requests, .. } = self;
            detector.check(
                now,
                hints,
                || residency,
                |previous| {
                    if previous.is_none() {
                        *requests += 1;
                        *requested_at = Some(now);
                    }
                    let requested_at = requested_at.unwrap();
                    let served = served_after.is_some_and(|after| requested_at + after <= now);
                    Some(Probed { request: Request(*requests), requested_at, served })
                },
            )
        }

        /// Checks at least every `interval` until a hang is found. Returns when that is.
        fn time_to_hang(
            &mut self,
            interval: Duration,
            since_fetch: impl Fn(Duration) -> Duration,
            residency: impl Fn(Duration) -> Option<Residency>,
        ) -> Option<Duration> {
            self.start = Instant::now();
            self.detector.set_contended(true, self.start);
            let mut at = Duration::ZERO;
            while at < 1000 * MS {
                at += match self.check(at, since_fetch(at), residency(at)) {
                    Verdict::NotHung => interval,
                    Verdict::CheckAfter(after) => after.min(interval).max(MS),
                    Verdict::Hung => return Some(at),
                };
            }
            None
        }
    }

    fn never_fetches(at: Duration) -> Duration {
        at
    }

    #[allow(clippy::unnecessary_wraps, reason = "passed as a function")]
    fn endless(at: Duration) -> Option<Residency> {
        Some(Residency { since_ns: 7, duration: at, switches: 1 })
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
                let mut run = Run::new(Some(LIMIT), None);
                let found = run.time_to_hang(interval * MS, never_fetches, residency).unwrap();
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
        assert_eq!(Run::new(Some(LIMIT), None).time_to_hang(50 * MS, never_fetches, long), None);
        let late = |at: Duration| {
            let switches = at.as_millis() as u64 / 20;
            Some(Residency { since_ns: 7, duration: at, switches })
        };
        assert_eq!(Run::new(Some(LIMIT), None).time_to_hang(50 * MS, never_fetches, late), None);
    }

    #[test]
    fn without_contention_or_just_reset_nothing_hangs() {
        let mut run = Run::new(None, None);
        assert_eq!(run.time_to_hang(5 * MS, never_fetches, endless), None, "no limit");
        let mut run = Run::new(Some(LIMIT), None);
        let verdict = run.check(1000 * MS, 1000 * MS, endless(1000 * MS));
        assert_eq!(verdict, Verdict::NotHung, "no other vGPU waits");
        assert!(run.time_to_hang(5 * MS, never_fetches, endless).is_some());
        let again = run.time_to_hang(5 * MS, never_fetches, endless);
        assert_eq!(again, None, "no new log records");
    }

    #[test]
    fn a_guest_that_shows_fetches_is_found_if_the_engine_does_not_change() {
        let mut run = Run::new(Some(LIMIT), None);
        let found = run.time_to_hang(5 * MS, |_| MS, endless).unwrap();
        let latest = LIMIT / 2 + LIMIT + TIMESLICE + 2 * MS;
        assert!((LIMIT..=latest).contains(&found), "{found:?}");
    }

    #[test]
    fn an_engine_that_changes_to_the_probe_does_not_hang_whatever_the_guest_shows() {
        for served_after in [0, 1, 40] {
            let mut run = Run::new(Some(LIMIT), Some(served_after * MS));
            let found = run.time_to_hang(5 * MS, never_fetches, endless);
            assert_eq!(found, None, "idle, or no fetch shown; served after {served_after} ms");
            let mut run = Run::new(Some(LIMIT), Some(served_after * MS));
            assert_eq!(run.time_to_hang(5 * MS, |_| MS, endless), None);
            assert!(run.requests <= 4, "{} requests in a second", run.requests);
        }
        // A long kernel that ends, and shows fetches meanwhile.
        let mut run = Run::new(Some(LIMIT), Some(140 * MS));
        assert_eq!(run.time_to_hang(5 * MS, |_| MS, endless), None);
    }

    #[test]
    fn a_kernel_that_begins_after_the_probe_was_served_is_found_at_the_limit() {
        for begun in (150..400).step_by(7) {
            let begun = begun * MS;
            let mut run = Run::new(Some(LIMIT), Some(MS));
            run.detector.set_contended(true, run.start);
            let (mut at, mut found) = (Duration::ZERO, None);
            while at < begun + 1000 * MS && found.is_none() {
                let is_endless = at >= begun;
                run.served_after = (!is_endless).then_some(MS);
                // Each kernel before is short, and the last fetch starts the endless one.
                let since_fetch = at.saturating_sub(begun);
                at += match run.check(at, since_fetch, endless(at)) {
                    Verdict::NotHung => 5 * MS,
                    Verdict::CheckAfter(after) => after.min(5 * MS).max(MS),
                    Verdict::Hung => {
                        found = Some(at);
                        MS
                    }
                };
            }
            let found = found.unwrap().checked_sub(begun).unwrap();
            assert!((LIMIT..=LIMIT + LIMIT / 2).contains(&found), "{begun:?} {found:?}");
        }
    }
}
