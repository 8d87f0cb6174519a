//! Time since programs last rang a doorbell page.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Clock of rings, which one thread sets and others read.
#[derive(Debug)]
pub struct RingClock {
    start: Instant,
    /// Time of the last ring since the start, in nanoseconds.
    last_ring: AtomicU64,
}

impl Default for RingClock {
    fn default() -> Self {
        Self { start: Instant::now(), last_ring: AtomicU64::new(0) }
    }
}

impl RingClock {
    /// Notes a ring.
    pub fn note_ring(&self) {
        self.last_ring.store(self.start.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    /// Returns the time since the last ring, or since the clock was created.
    pub fn quiet_for(&self) -> Duration {
        let last = Duration::from_nanos(self.last_ring.load(Ordering::Relaxed));
        self.start.elapsed().saturating_sub(last)
    }
}
