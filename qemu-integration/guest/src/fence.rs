//! Fences: a word in memory that only grows, and how to wait for it without wasting a CPU.

use std::hint::spin_loop;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// One submission of a channel: it is done once the channel's semaphore has reached this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence(pub(crate) u32);

impl Fence {
    /// Whether a semaphore that reads `current` has reached this fence. Numbers wrap around.
    pub const fn reached(self, current: u32) -> bool {
        current.wrapping_sub(self.0).cast_signed() >= 0
    }
}

/// How to wait: spin at first, for what is quick; then sleep, so that a CPU is left for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// How long to spin before the first sleep.
    pub spin: Duration,
    /// Longest sleep between two looks.
    pub nap: Duration,
    /// When to ask the device what is wrong, and then again each time as much later.
    pub ask: Duration,
    /// When to give up.
    pub limit: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            spin: Duration::from_micros(30),
            nap: Duration::from_millis(1),
            ask: Duration::from_millis(100),
            limit: Duration::from_secs(30),
        }
    }
}

impl Patience {
    /// Spins for as long as it takes: for measurements.
    pub fn spinning() -> Self {
        Self { spin: Duration::from_secs(3600), ..Self::default() }
    }

    /// Waits until `done`. Calls `ask` when it takes long, and ends early where that fails.
    ///
    /// Returns false at the limit.
    pub fn wait<E>(
        &self,
        mut done: impl FnMut() -> bool,
        mut ask: impl FnMut() -> Result<(), E>,
    ) -> Result<bool, E> {
        // A clock read can cost an exit in a VM: a few looks come first.
        for _ in 0..64 {
            if done() {
                return Ok(true);
            }
            spin_loop();
        }
        let (start, mut next_ask) = (Instant::now(), self.ask);
        let mut nap = Duration::from_micros(20);
        loop {
            for _ in 0..32 {
                if done() {
                    return Ok(true);
                }
                spin_loop();
            }
            let waited = start.elapsed();
            if waited >= next_ask {
                ask()?;
                next_ask = waited + self.ask;
            }
            if waited >= self.limit {
                return Ok(done());
            }
            if waited >= self.spin {
                sleep(nap);
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
        assert!(Fence(5).reached(5));
        assert!(!Fence(6).reached(5));
        assert!(Fence(u32::MAX).reached(2));
        assert!(!Fence(2).reached(u32::MAX));
    }

    #[test]
    fn gives_up_at_the_limit_and_asks_before() {
        let limit = Duration::from_millis(50);
        let patience = Patience { ask: Duration::from_millis(10), limit, ..Patience::default() };
        let mut asked = 0;
        let done = patience.wait(
            || false,
            || -> Result<(), ()> {
                asked += 1;
                Ok(())
            },
        );
        assert_eq!(done, Ok(false));
        assert!((1..=5).contains(&asked), "asked {asked} times");
    }
}
