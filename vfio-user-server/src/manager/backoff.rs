//! How long to wait before something that died is started again.

use std::time::Duration;

/// The pause after the second death in a row; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Whatever lives this long counts as healthy, and its earlier deaths are forgotten.
const HEALTHY: Duration = Duration::from_secs(30);

/// Deaths in a row.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    deaths: u32,
}

impl Backoff {
    /// Counts a death after `lived`, and says how long to wait. The first restart is immediate.
    pub fn after_death(&mut self, lived: Duration) -> Duration {
        if lived >= HEALTHY {
            self.deaths = 0;
        }
        self.deaths = self.deaths.saturating_add(1);
        match self.deaths - 1 {
            0 => Duration::ZERO,
            n => FIRST_PAUSE.saturating_mul(1 << (n - 1).min(16)).min(LONGEST_PAUSE),
        }
    }

    /// How many deaths in a row there were.
    pub fn deaths(self) -> u32 {
        self.deaths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_are_forgotten_after_a_healthy_life() {
        let mut backoff = Backoff::default();
        let pauses: Vec<_> =
            (0..12).map(|_| backoff.after_death(Duration::from_millis(1)).as_millis()).collect();
        assert_eq!(pauses[..5], [0, 100, 200, 400, 800]);
        assert_eq!(pauses[11], 10_000);
        assert_eq!(backoff.after_death(HEALTHY), Duration::ZERO);
        assert_eq!(backoff.deaths(), 1);
    }
}
