//! Pause before a process that died is started again.

use std::time::Duration;

/// Pause after the second death in a row. It doubles with each further death.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause.
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// Lifetime after which a process counts as healthy and its earlier deaths no longer count.
const HEALTHY_LIFETIME: Duration = Duration::from_secs(30);

/// Exponential backoff over deaths in a row.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    deaths: u32,
}

impl Backoff {
    /// Counts the death of a process that lived for `lifetime`, and returns the pause. The first
    /// restart is immediate.
    pub fn after_death(&mut self, lifetime: Duration) -> Duration {
        if lifetime >= HEALTHY_LIFETIME {
            self.deaths = 0;
        }
        self.deaths = self.deaths.saturating_add(1);
        match self.deaths - 1 {
            0 => Duration::ZERO,
            n => FIRST_PAUSE.saturating_mul(1 << (n - 1).min(16)).min(MAX_PAUSE),
        }
    }

    /// Returns the number of deaths in a row.
    pub fn deaths(self) -> u32 {
        self.deaths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_restart_after_a_healthy_lifetime() {
        let mut backoff = Backoff::default();
        let pauses: Vec<_> =
            (0..12).map(|_| backoff.after_death(Duration::from_millis(1)).as_millis()).collect();
        assert_eq!(pauses[..5], [0, 100, 200, 400, 800]);
        assert_eq!(pauses[11], 10_000);
        assert_eq!(backoff.after_death(HEALTHY_LIFETIME), Duration::ZERO);
        assert_eq!(backoff.deaths(), 1);
    }
}
