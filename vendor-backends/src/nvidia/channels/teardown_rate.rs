//! Limit of the rate at which a guest destroys channels that have work.
//!
//! The GPU stops for a moment while a group with work is reset. Programs that end in the midst of
//! work are ordinary, so the limit is a rate and has no memory: a program that was refused can try
//! again after [`INTERVAL`].

use std::time::{Duration, Instant};

/// Mean time between teardowns that a guest can make continuously.
const INTERVAL: Duration = Duration::from_millis(125);

/// Number of teardowns that may follow each other without a pause: those of all groups of a vGPU.
const BURST: u32 = 32;

/// Rate of teardowns of one engine's groups.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TeardownRate {
    /// When all teardowns so far are worked off at one per [`INTERVAL`].
    pub(super) settled_at: Option<Instant>,
}

impl TeardownRate {
    /// Counts a teardown.
    pub(super) fn count(&mut self, now: Instant) {
        self.settled_at = Some(self.settled_at.map_or(now, |at| at.max(now)) + INTERVAL);
    }

    /// Returns whether the next group has to wait.
    pub(super) fn must_wait(&self, now: Instant) -> bool {
        self.settled_at.is_some_and(|at| at.saturating_duration_since(now) > INTERVAL * (BURST - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tries a teardown every `step` for a minute. Returns the numbers of teardowns and refusals.
    fn minute(step: Duration) -> (u32, u32) {
        let (mut rate, start) = (TeardownRate::default(), Instant::now());
        let (mut now, mut made, mut refused) = (start, 0, 0);
        while now < start + Duration::from_secs(60) {
            if rate.must_wait(now) {
                refused += 1;
            } else {
                rate.count(now);
                made += 1;
            }
            now += step;
        }
        (made, refused)
    }

    #[test]
    fn eight_programs_a_second_end_in_the_midst_of_work_without_a_pause() {
        assert_eq!(minute(INTERVAL), (480, 0));
    }

    #[test]
    fn a_guest_that_does_nothing_else_is_held_to_the_rate() {
        let (made, refused) = minute(Duration::from_millis(1));
        assert!((505..=515).contains(&made), "{made} in a minute");
        assert_eq!(made + refused, 60_000);
    }
}
