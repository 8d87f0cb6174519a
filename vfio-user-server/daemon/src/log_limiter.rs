//! Rate limit for log lines that a client can cause.

use std::fmt;
use std::time::{Duration, Instant};

/// Lines per period, if no other number is given.
const BURST: u32 = 10;
/// Period of the limit.
const PERIOD: Duration = Duration::from_secs(10);

/// Rate limiter: passes a number of lines per [`PERIOD`] and counts the suppressed ones.
#[derive(Debug)]
pub struct LogLimiter {
    burst: u32,
    period_start: Instant,
    passed: u32,
    suppressed: u32,
}

impl LogLimiter {
    /// Creates a limiter of [`BURST`] lines whose first period begins at `now`.
    pub fn new(now: Instant) -> Self {
        Self::with_burst(now, BURST)
    }

    /// Creates a limiter of `burst` lines whose first period begins at `now`.
    pub fn with_burst(now: Instant, burst: u32) -> Self {
        Self { burst, period_start: now, passed: 0, suppressed: 0 }
    }

    /// Returns `None` if a line at `now` is to be suppressed, or else the number of lines
    /// suppressed since the last one that passed.
    pub fn pass(&mut self, now: Instant) -> Option<u32> {
        if now.duration_since(self.period_start) >= PERIOD {
            (self.period_start, self.passed) = (now, 0);
        }
        if self.passed == self.burst {
            self.suppressed += 1;
            return None;
        }
        self.passed += 1;
        Some(std::mem::take(&mut self.suppressed))
    }

    /// Returns a line to log now, with the number of those suppressed before it.
    pub fn line(&mut self, line: fmt::Arguments<'_>) -> Option<String> {
        Some(match self.pass(Instant::now())? {
            0 => line.to_string(),
            suppressed => format!("{line} ({suppressed} lines were suppressed before)"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_a_burst_and_counts_suppressed_lines() {
        let start = Instant::now();
        let mut limiter = LogLimiter::new(start);
        let passed = (0..25).filter(|_| limiter.pass(start).is_some()).count();
        assert_eq!(passed, BURST as usize);
        assert_eq!(limiter.pass(start + PERIOD), Some(15));
        assert_eq!(limiter.pass(start + PERIOD), Some(0));
    }
}
