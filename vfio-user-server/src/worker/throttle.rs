//! A limit on log lines that somebody else can cause.

use std::time::{Duration, Instant};

/// Lines that may come at once.
const BURST: u32 = 10;
/// How long until as many may come again.
const PERIOD: Duration = Duration::from_secs(10);

/// Lets a burst of lines through, and says how many it held back since.
#[derive(Debug)]
pub struct Throttle {
    since: Instant,
    passed: u32,
    held: u32,
}

impl Throttle {
    /// Nothing has passed yet.
    pub fn new(now: Instant) -> Self {
        Self { since: now, passed: 0, held: 0 }
    }

    /// Whether a line may be written at `now`; the number is of those that were not, before it.
    pub fn pass(&mut self, now: Instant) -> Option<u32> {
        if now.duration_since(self.since) >= PERIOD {
            (self.since, self.passed) = (now, 0);
        }
        if self.passed == BURST {
            self.held += 1;
            return None;
        }
        self.passed += 1;
        Some(std::mem::take(&mut self.held))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_the_rest_is_counted() {
        let start = Instant::now();
        let mut throttle = Throttle::new(start);
        let passed = (0..25).filter(|_| throttle.pass(start).is_some()).count();
        assert_eq!(passed, BURST as usize);
        assert_eq!(throttle.pass(start + PERIOD), Some(15));
        assert_eq!(throttle.pass(start + PERIOD), Some(0));
    }
}
