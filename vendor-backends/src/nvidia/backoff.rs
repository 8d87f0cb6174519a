//! How soon a group is made again after a fault.
//!
//! Tearing a group down stops the engine for everybody: for a kernel's fault, some 0.14 s. A guest that faults, makes
//! its channel again and faults again would leave its neighbours next to nothing.

use std::time::{Duration, Instant};

/// The longest pause.
const LONGEST: Duration = Duration::from_secs(8);

/// A guest that behaved for so long starts afresh.
const FORGIVEN: Duration = Duration::from_secs(30);

/// When one engine's group may be made again.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    free: u32,
    first: Duration,
    faults: u32,
    last: Option<Instant>,
}

impl Backoff {
    /// Faults of kernels are dear: the second one in a row has to wait.
    pub fn for_kernels() -> Self {
        Self { free: 1, first: Duration::from_millis(500), faults: 0, last: None }
    }

    /// Faults of copies cost others little.
    pub fn for_copies() -> Self {
        Self { free: 16, first: Duration::from_millis(50), faults: 0, last: None }
    }

    /// Counts a fault.
    pub fn fault(&mut self, now: Instant) {
        if self.last.is_some_and(|last| now.duration_since(last) > FORGIVEN) {
            self.faults = 0;
        }
        self.faults = self.faults.saturating_add(1);
        self.last = Some(now);
    }

    /// Whether a group has to wait.
    pub fn wait(&self, now: Instant) -> bool {
        self.last.is_some_and(|last| now.duration_since(last) < self.pause())
    }

    fn pause(&self) -> Duration {
        match self.faults.checked_sub(self.free + 1) {
            None => Duration::ZERO,
            Some(doublings) => (self.first * (1 << doublings.min(8))).min(LONGEST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_free_and_a_storm_is_not() {
        let mut backoff = Backoff::for_kernels();
        let start = Instant::now();
        assert!(!backoff.wait(start));
        backoff.fault(start);
        assert!(!backoff.wait(start), "one mistake");
        let (mut now, mut faults) = (start, 1);
        while now.duration_since(start) < Duration::from_secs(60) {
            if !backoff.wait(now) {
                backoff.fault(now);
                faults += 1;
            }
            now += Duration::from_millis(10);
        }
        assert!(faults <= 12, "{faults} in a minute");
        assert!(!backoff.wait(now + FORGIVEN));
        backoff.fault(now + 2 * FORGIVEN);
        assert!(!backoff.wait(now + 2 * FORGIVEN), "it behaved for a while");
    }
}
