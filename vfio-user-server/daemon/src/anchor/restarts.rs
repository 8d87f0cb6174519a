//! Limit of the rate at which an anchor starts workers.
//!
//! A worker that was taken over can end again and again. Each one costs the host a process, and may
//! fill the log anew. Workers that die of a driver or of kills, even hundreds in a row, are
//! replaced at once.

use std::time::{Duration, Instant};

/// Number of workers that may follow each other at once.
const BURST: u32 = 300;
/// Time in which one more may be started.
const PERIOD: Duration = Duration::from_millis(500);

/// Workers that may be started.
#[derive(Debug)]
pub struct Restarts {
    /// When all of [`BURST`] may be started again.
    full_at: Instant,
}

impl Restarts {
    /// Creates the limit.
    pub fn new(now: Instant) -> Self {
        Self { full_at: now }
    }

    /// Counts a start at `now`. Returns the pause before it.
    pub fn pause(&mut self, now: Instant) -> Duration {
        self.full_at = self.full_at.max(now) + PERIOD;
        (self.full_at - now).saturating_sub(PERIOD * BURST)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hundreds_of_workers_follow_each_other_at_once_and_then_two_a_second() {
        let mut now = Instant::now();
        let mut restarts = Restarts::new(now);
        for _ in 0..BURST {
            assert_eq!(restarts.pause(now), Duration::ZERO);
        }
        for _ in 0..100 {
            let pause = restarts.pause(now);
            assert_eq!(pause, PERIOD);
            now += pause;
        }
        // After a rest, the first ones are immediate again.
        now += Duration::from_secs(10);
        for _ in 0..20 {
            assert_eq!(restarts.pause(now), Duration::ZERO);
        }
    }

    proptest! {
        #[test]
        fn no_more_start_than_the_limit_in_any_time(
            lives in prop::collection::vec(0_u64..2_000, 1..2_000)
        ) {
            let start = Instant::now();
            let (mut now, mut restarts) = (start, Restarts::new(start));
            for (number, lived_ms) in (1..).zip(lives) {
                now += Duration::from_millis(lived_ms);
                now += restarts.pause(now);
                let periods = (now - start).as_millis() / PERIOD.as_millis();
                prop_assert!(number <= u128::from(BURST) + periods + 1);
            }
        }
    }
}
