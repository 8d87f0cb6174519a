//! Check of a vGPU that shows no work while its context is resident on the compute engine.
//!
//! An idle context stays resident until another context needs the engine, so residency alone is no
//! work. But what the rings show is the guest's word, and a guest with an engine time cap would
//! gain by showing empty rings. So the probe asks for the engine once. An idle context then leaves
//! the engine and does not come back without a ring. A context with work comes back, and one with a
//! long kernel does not leave.
//!
//! The next kernel of an idle vGPU then waits for a context switch, so a vGPU that shows the truth
//! is checked once a second at most.

use std::time::{Duration, Instant};

use crate::nvidia::observed_channels::ObservedChannels;
use crate::nvidia::observers::switch_probe::Request;

/// Time in which an idle context leaves the engine to the probe.
const LEAVES_WITHIN: Duration = Duration::from_millis(30);

/// Minimum time between two checks of a vGPU that shows the truth.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Time for which a vGPU is checked without pauses after it has hidden work.
const SUSPECT_FOR: Duration = Duration::from_secs(60);

/// A request to the probe, and what was known at that time.
#[derive(Clone, Copy, Debug)]
struct Asked {
    request: Request,
    at: Instant,
    rings: u64,
    /// Number of completed residencies.
    residencies: u64,
}

/// State of the check.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IdleCheck {
    asked: Option<Asked>,
    /// When the vGPU was last found to hide work.
    hidden_at: Option<Instant>,
}

impl IdleCheck {
    /// Returns whether a context that may be resident has work. `rings` is the number of rings so
    /// far.
    pub(super) fn has_work(
        &mut self,
        observed: &ObservedChannels,
        now: Instant,
        rings: u64,
    ) -> bool {
        let asked = self.asked.filter(|asked| asked.rings == rings);
        let Some((resident, residencies)) = observed.residencies(asked.is_some()) else {
            return false;
        };
        let Some(asked) = asked else {
            if resident && self.may_check(now) {
                self.ask(observed, now, rings, residencies);
            }
            return false;
        };
        let has_left = residencies > asked.residencies;
        if has_left && resident {
            // The context is back without a ring.
            self.ask(observed, now, rings, residencies);
            self.hidden_at = Some(now);
            return true;
        }
        let served = || observed.probe(Some(asked.request)).is_none_or(|probed| probed.served);
        // A long kernel is not hidden: it shows nothing.
        resident && now.duration_since(asked.at) > LEAVES_WITHIN && !served()
    }

    fn may_check(&self, now: Instant) -> bool {
        let within = |at: Option<Instant>, time| at.is_some_and(|at| now.duration_since(at) < time);
        let checked_at = self.asked.map(|asked| asked.at);
        within(self.hidden_at, SUSPECT_FOR) || !within(checked_at, CHECK_INTERVAL)
    }

    fn ask(&mut self, observed: &ObservedChannels, at: Instant, rings: u64, residencies: u64) {
        if let Some(probed) = observed.probe(None) {
            self.asked = Some(Asked { request: probed.request, at, rings, residencies });
        }
    }
}
