//! Times in records.

use std::time::{Duration, Instant};

use nix::time::ClockId;
use serde::{Deserialize, Serialize};

/// Time of the monotonic clock in nanoseconds, which means the same in each process of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Moment(u64);

impl Moment {
    /// Returns the present.
    pub fn now() -> Self {
        let now = ClockId::CLOCK_MONOTONIC.now().map(Duration::from).unwrap_or_default();
        Self(now.as_nanos() as u64)
    }

    /// Returns the moment of an instant.
    pub fn of(instant: Instant) -> Self {
        let Self(now) = Self::now();
        let present = Instant::now();
        let ago = present.saturating_duration_since(instant).as_nanos() as u64;
        let ahead = instant.saturating_duration_since(present).as_nanos() as u64;
        Self(now.saturating_sub(ago).saturating_add(ahead))
    }

    /// Returns the instant. One that is too early or too late for this process is the present.
    pub fn instant(self) -> Instant {
        let (now, present) = (Self::now(), Instant::now());
        let moved = match self.0.checked_sub(now.0) {
            Some(ahead) => present.checked_add(Duration::from_nanos(ahead)),
            None => present.checked_sub(Duration::from_nanos(now.0 - self.0)),
        };
        moved.unwrap_or(present)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instant_keeps_its_place_in_time() {
        let now = Instant::now();
        for instant in
            [now, now.checked_sub(Duration::from_secs(3)).unwrap(), now + Duration::from_secs(7)]
        {
            let same = Moment::of(instant).instant();
            let apart = same.max(instant).duration_since(same.min(instant));
            assert!(apart < Duration::from_millis(50), "{apart:?}");
        }
        let _ = Moment(u64::MAX).instant();
        let _ = Moment(0).instant();
    }
}
