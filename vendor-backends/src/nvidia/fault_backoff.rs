//! Backoff before a channel group is recreated after a fault.
//!
//! Tearing down a group stops the engine for all vGPUs: about 0.14 s after a kernel's fault. A
//! guest that repeatedly faults and recreates its channel would otherwise starve the other vGPUs.

use std::time::{Duration, Instant};

/// Maximum pause after a fault.
const MAX_PAUSE: Duration = Duration::from_secs(8);

/// Time without faults after which the fault count restarts at 0.
const RESET_AFTER: Duration = Duration::from_secs(30);

/// Exponential backoff for the group of one engine.
#[derive(Clone, Copy, Debug)]
pub struct FaultBackoff {
    /// Number of faults without a pause.
    free_faults: u32,
    first_pause: Duration,
    faults: u32,
    last_fault: Option<Instant>,
}

impl FaultBackoff {
    /// Returns the backoff of the compute engine. A kernel's fault is expensive, so the second one
    /// in a row already causes a pause.
    pub fn for_kernels() -> Self {
        Self {
            free_faults: 1,
            first_pause: Duration::from_millis(500),
            faults: 0,
            last_fault: None,
        }
    }

    /// Returns the backoff of the copy engine, where faults cost other vGPUs little.
    pub fn for_copies() -> Self {
        Self {
            free_faults: 16,
            first_pause: Duration::from_millis(50),
            faults: 0,
            last_fault: None,
        }
    }

    /// Returns the number of faults in a row, and when the last one was.
    pub fn state(&self) -> (u32, Option<Instant>) {
        (self.faults, self.last_fault)
    }

    /// Adopts the faults of an earlier process.
    #[must_use]
    pub fn after(self, (faults, last_fault): (u32, Option<Instant>)) -> Self {
        Self { faults, last_fault, ..self }
    }

    /// Counts a fault.
    pub fn fault(&mut self, now: Instant) {
        if self.last_fault.is_some_and(|last| now.duration_since(last) > RESET_AFTER) {
            self.faults = 0;
        }
        self.faults = self.faults.saturating_add(1);
        self.last_fault = Some(now);
    }

    /// Returns whether the pause after the last fault still lasts.
    pub fn must_wait(&self, now: Instant) -> bool {
        self.last_fault.is_some_and(|last| now.duration_since(last) < self.pause())
    }

    fn pause(&self) -> Duration {
        match self.faults.checked_sub(self.free_faults + 1) {
            None => Duration::ZERO,
            Some(doublings) => (self.first_pause * (1 << doublings.min(8))).min(MAX_PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_fault_is_free_and_repeated_faults_are_not() {
        let mut backoff = FaultBackoff::for_kernels();
        let start = Instant::now();
        assert!(!backoff.must_wait(start));
        backoff.fault(start);
        assert!(!backoff.must_wait(start), "the first fault");
        let (mut now, mut faults) = (start, 1);
        while now.duration_since(start) < Duration::from_secs(60) {
            if !backoff.must_wait(now) {
                backoff.fault(now);
                faults += 1;
            }
            now += Duration::from_millis(10);
        }
        assert!(faults <= 12, "{faults} in a minute");
        assert!(!backoff.must_wait(now + RESET_AFTER));
        backoff.fault(now + 2 * RESET_AFTER);
        assert!(!backoff.must_wait(now + 2 * RESET_AFTER), "a fault after a quiet period");
    }
}
