//! Check of a vGPU that shows no work and may wait for the compute engine.
//!
//! The GPU fetches the entries of a waiting channel before the engine is free: the ring of a vGPU
//! that waits for another one's kernel can look as if all its work had been done. So a vGPU counts
//! as waiting if it lost the engine soon after its last sign of work, or has not had it since,
//! while another context keeps the engine from its
//! [`SwitchProbe`](crate::nvidia::observers::switch_probe::SwitchProbe).
//!
//! If the probe gets the engine twice and the vGPU does not, then the vGPU has no work: the GPU
//! gives every group with work its turn. A probe makes the GPU switch contexts twice, so it is used
//! seldom, and only while one context has kept the engine for some time.

use std::time::{Duration, Instant};

use crate::nvidia::observers::ctxsw_log::Seen;
use crate::nvidia::observers::switch_probe::{Probed, Request};

/// Time for which one context must have kept the engine before the probe asks for it.
const HELD_FOR: Duration = Duration::from_millis(20);

/// Time for which the probe must have waited before the vGPU counts as waiting.
const PROBE_WAITS: Duration = Duration::from_millis(20);

/// Minimum time between two checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Time after the last sign of work for which work may continue. A vGPU that had the engine for
/// longer than that has finished its work.
const MAY_CONTINUE: Duration = Duration::from_millis(100);

/// Number of times that the probe gets the engine in the turns of all groups.
const PASSES: u32 = 2;

/// A request to the probe, and what was known at that time.
#[derive(Clone, Copy, Debug)]
struct Asked {
    request: Request,
    at: Instant,
    residencies: u64,
}

/// State of the check.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WaitCheck {
    /// When the last sign of work was seen, unless that work is known to have been done.
    work_at: Option<Instant>,
    asked: Option<Asked>,
    /// When the last check began.
    begun_at: Option<Instant>,
    /// Number of requests in that check.
    requests: u32,
    /// How often the probe got the engine since the last sign of work, and the vGPU did not.
    passes: u32,
}

impl WaitCheck {
    /// Notes a new entry, or one that was fetched.
    pub(super) fn note_work(&mut self, now: Instant) {
        self.work_at = Some(now);
        self.passes = 0;
    }

    /// Returns whether there is anything to check. `is_busy` says whether the vGPU shows work.
    pub(super) fn is_needed(&self, is_busy: bool) -> bool {
        self.work_at.is_some() && (!is_busy || self.is_asking())
    }

    /// Returns whether there may be work that waits.
    pub(super) fn may_have_work(&self) -> bool {
        self.work_at.is_some()
    }

    /// Returns whether the probe has been asked, so that the next check should be soon.
    pub(super) fn is_asking(&self) -> bool {
        self.asked.is_some()
    }

    /// Returns whether the vGPU waits. `probe` makes a request, or takes one that was made, and
    /// returns its state.
    pub(super) fn waits(
        &mut self,
        now: Instant,
        seen: Seen,
        probe: impl Fn(Option<Request>) -> Option<Probed>,
    ) -> bool {
        let Some(work_at) = self.work_at else { return false };
        let since_work = now.saturating_duration_since(work_at);
        let had_turn = |asked: Asked| asked.residencies != seen.residencies;
        if seen.resident || self.asked.is_some_and(had_turn) {
            self.asked = None;
            self.passes = 0;
            if seen.resident && since_work > MAY_CONTINUE {
                self.work_at = None;
            }
            return false;
        }
        if let Some(asked) = self.asked {
            let Some(probed) = probe(Some(asked.request)) else {
                *self = Self::default();
                return false;
            };
            if !probed.served {
                return now.saturating_duration_since(asked.at) >= PROBE_WAITS;
            }
            self.asked = None;
            self.passes += 1;
        }
        if self.passes >= PASSES || since_work > seen.since_resident.saturating_add(MAY_CONTINUE) {
            self.work_at = None;
        } else if self.passes > 0 && self.requests < PASSES
            || seen.since_switch >= HELD_FOR && self.may_begin(now)
        {
            self.ask(now, seen.residencies, probe);
        }
        false
    }

    fn may_begin(&mut self, now: Instant) -> bool {
        let is_recent = |at: Instant| now.saturating_duration_since(at) < CHECK_INTERVAL;
        if self.begun_at.is_some_and(is_recent) {
            return false;
        }
        self.begun_at = Some(now);
        self.requests = 0;
        true
    }

    fn ask(
        &mut self,
        at: Instant,
        residencies: u64,
        probe: impl Fn(Option<Request>) -> Option<Probed>,
    ) {
        self.requests += 1;
        self.asked = probe(None).map(|Probed { request, .. }| Asked { request, at, residencies });
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Checks every 5 ms for a second. `seen` and `served_after` are those at a time since the last
    /// sign of work. Returns when the vGPU waited first, and how often the probe was asked.
    fn run(
        seen: impl Fn(Duration) -> Seen,
        served_after: impl Fn(Duration) -> Option<Duration>,
    ) -> (Option<Duration>, u32) {
        let (mut check, start, requests) = (WaitCheck::default(), Instant::now(), Cell::new(0));
        let asked_at = Cell::new(Duration::ZERO);
        check.note_work(start);
        let mut first = None;
        for at in (20..1000).step_by(5).map(|at| at * MS) {
            let probe = |request: Option<Request>| {
                if request.is_none() {
                    requests.set(requests.get() + 1);
                    asked_at.set(at);
                }
                let served = served_after(at).is_some_and(|after| at >= asked_at.get() + after);
                let requested_at = start + asked_at.get();
                Some(Probed { request: Request(requests.get()), requested_at, served })
            };
            let waits = check.is_needed(false) && check.waits(start + at, seen(at), probe);
            first = first.or(waits.then_some(at));
        }
        (first, requests.get())
    }

    /// The vGPU lost the engine `lost` after its last sign of work, if that was not before, and
    /// another context has kept it since.
    fn lost_engine(lost: Duration) -> impl Fn(Duration) -> Seen {
        move |at| Seen {
            resident: at < lost,
            residencies: u64::from(at >= lost),
            since_resident: at.saturating_sub(lost),
            since_switch: at.saturating_sub(lost),
        }
    }

    #[test]
    fn a_vgpu_without_the_engine_waits_while_the_probe_waits() {
        for lost in [0, 10, 60, 95] {
            let (first, _) = run(lost_engine(lost * MS), |_| None);
            let first = first.unwrap();
            assert!(first <= (lost + 50) * MS, "lost after {lost} ms, seen after {first:?}");
        }
        // Never resident, and the work of others before is no excuse.
        let never = |_| Seen {
            resident: false,
            residencies: 0,
            since_resident: Duration::from_secs(9),
            since_switch: Duration::from_secs(1),
        };
        assert!(run(never, |_| None).0.is_some());
    }

    #[test]
    fn finished_work_does_not_wait() {
        let (first, requests) = run(lost_engine(130 * MS), |_| None);
        assert_eq!((first, requests), (None, 0), "it had the engine for long enough");
        let (first, requests) = run(lost_engine(Duration::ZERO), |_| Some(2 * MS));
        assert_eq!((first, requests), (None, PASSES), "the probe gets the engine");
        let switching = |at| Seen { since_switch: 12 * MS, ..lost_engine(Duration::ZERO)(at) };
        assert_eq!(run(switching, |_| None), (None, 0), "others take turns");
    }

    #[test]
    fn a_kernel_between_two_turns_of_the_probe_is_noticed() {
        // The first request is served at once, and then the engine is held.
        let (first, requests) = run(lost_engine(Duration::ZERO), |at| (at < 30 * MS).then_some(MS));
        assert!(first.is_some_and(|first| first < 80 * MS) && requests == 2, "{first:?}");
    }

    #[test]
    fn a_vgpu_that_always_shows_signs_of_work_is_checked_seldom() {
        let (mut check, start, requests) = (WaitCheck::default(), Instant::now(), Cell::new(0));
        for at in (0..1000).step_by(5).map(|at| at * MS) {
            check.note_work(start + at);
            let probe = |request: Option<Request>| {
                requests.set(requests.get() + u32::from(request.is_none()));
                Some(Probed { request: Request(1), requested_at: start, served: true })
            };
            let seen = Seen { since_switch: MS * 50, ..lost_engine(Duration::ZERO)(at) };
            assert!(!check.waits(start + at, seen, probe));
        }
        assert!(requests.get() <= 10, "{} requests in a second", requests.get());
    }
}
