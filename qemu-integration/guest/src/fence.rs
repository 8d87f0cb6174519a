//! Fences: a growing word in memory, and the policy for waits on it.

use std::hint::spin_loop;
use std::time::{Duration, Instant};

/// Number of a submission, which is completed once the channel's semaphore has reached it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence {
    pub(crate) number: u32,
    /// The vGPU interrupts once the submission is completed.
    pub(crate) interrupts: bool,
}

impl Fence {
    /// Returns the fence of a submission without an interrupt.
    pub(crate) const fn new(number: u32) -> Self {
        Self { number, interrupts: false }
    }

    /// Returns whether a semaphore that reads `current` has reached this fence. Numbers wrap
    /// around.
    pub const fn reached(self, current: u32) -> bool {
        current.wrapping_sub(self.number).cast_signed() >= 0
    }
}

/// Policy for waits: spin first for short work, then sleep to free the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitPolicy {
    /// Time to spin before the first sleep.
    pub spin: Duration,
    /// Longest sleep between two reads of the semaphore.
    pub nap: Duration,
    /// Interval of checks for a channel error.
    pub check_interval: Duration,
    /// Timeout of the wait.
    pub limit: Duration,
}

impl Default for WaitPolicy {
    fn default() -> Self {
        Self {
            spin: Duration::from_micros(30),
            nap: Duration::from_millis(1),
            check_interval: Duration::from_millis(100),
            limit: Duration::from_secs(30),
        }
    }
}

impl WaitPolicy {
    /// Returns a policy that never sleeps, for measurements.
    pub fn spinning() -> Self {
        Self { spin: Duration::from_secs(3600), ..Self::default() }
    }

    /// Waits until `done` returns true. Calls `check` at intervals and returns its error. `pause`
    /// sleeps for at most the time it gets.
    ///
    /// Returns false on timeout.
    pub fn wait<E>(
        &self,
        mut done: impl FnMut() -> bool,
        mut check: impl FnMut() -> Result<(), E>,
        pause: impl Fn(Duration),
    ) -> Result<bool, E> {
        // Reads first without the clock, because a clock read can cost a VM exit.
        for _ in 0..64 {
            if done() {
                return Ok(true);
            }
            spin_loop();
        }
        let (start, mut next_check) = (Instant::now(), self.check_interval);
        let mut nap = Duration::from_micros(20);
        loop {
            for _ in 0..32 {
                if done() {
                    return Ok(true);
                }
                spin_loop();
            }
            let waited = start.elapsed();
            if waited >= next_check {
                check()?;
                next_check = waited + self.check_interval;
            }
            if waited >= self.limit {
                return Ok(done());
            }
            if waited >= self.spin {
                pause(nap);
                nap = (nap * 2).min(self.nap);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fences_survive_the_wrap() {
        assert!(Fence::new(5).reached(5));
        assert!(!Fence::new(6).reached(5));
        assert!(Fence::new(u32::MAX).reached(2));
        assert!(!Fence::new(2).reached(u32::MAX));
    }

    #[test]
    fn wait_times_out_and_checks_at_intervals() {
        let limit = Duration::from_millis(50);
        let policy = WaitPolicy {
            check_interval: Duration::from_millis(10),
            limit,
            ..WaitPolicy::default()
        };
        let mut asked = 0;
        let done = policy.wait(
            || false,
            || -> Result<(), ()> {
                asked += 1;
                Ok(())
            },
            std::thread::sleep,
        );
        assert_eq!(done, Ok(false));
        assert!((1..=5).contains(&asked), "asked {asked} times");
    }
}
