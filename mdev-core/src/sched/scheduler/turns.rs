//! How often vGPUs below their shares get the engine: short slices of the others let them have it
//! at once, and each time costs two switches.

/// Turns a second above which there are many, and below which there are not. With 400 requests a
/// second, switches take a seventh of the time of an NVIDIA GPU.
const MANY: f64 = 500.0;
const FEW: f64 = 250.0;
/// Time over which turns are averaged, in nanoseconds.
const AVERAGED_NS: f64 = 2e8;
/// The same for what shows that there are few: after a burst, slices are short again soon.
const RECENT_NS: f64 = 5e7;
/// Shortest and longest time for which there count as many, in nanoseconds.
const SHORTEST_NS: u64 = 500_000_000;
const LONGEST_NS: u64 = 16_000_000_000;

/// Turns of vGPUs below their shares.
///
/// While there are many, slices are longer, and so the number of turns falls: it does not show
/// whether there would be as many with short slices. So these are tried again after a time, which
/// doubles when there are too many at once.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turns {
    /// Turns a second, averaged over [`AVERAGED_NS`].
    rate: f64,
    /// The same, averaged over [`RECENT_NS`].
    recent: f64,
    /// Time until short slices are tried again, in nanoseconds. 0 while there are not many.
    left_ns: u64,
    /// The last such time, and the time since it.
    last_ns: u64,
    since_ns: u64,
}

impl Turns {
    /// Notes the turns in an interval of `elapsed_ns`.
    pub(super) fn count(&mut self, turns: u64, elapsed_ns: u64) {
        let length = elapsed_ns as f64;
        let now = turns as f64 * 1e9 / length;
        self.rate += (now - self.rate) * length / (length + AVERAGED_NS);
        self.recent += (now - self.recent) * length / (length + RECENT_NS);
        if self.left_ns > 0 {
            self.left_ns = self.left_ns.saturating_sub(elapsed_ns);
            if self.left_ns == 0 || self.recent < FEW {
                *self = Self { rate: 0.0, left_ns: 0, since_ns: 0, ..*self };
            }
            return;
        }
        self.since_ns = self.since_ns.saturating_add(elapsed_ns);
        if self.rate > MANY {
            let again = self.since_ns <= self.last_ns;
            let longer_ns = if again { self.last_ns.saturating_mul(2) } else { 0 };
            self.last_ns = longer_ns.clamp(SHORTEST_NS, LONGEST_NS);
            self.left_ns = self.last_ns;
        }
    }

    /// Returns whether there are so many turns that slices are to be longer.
    pub(super) fn are_many(&self) -> bool {
        self.left_ns > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL_NS: u64 = 25_000_000;

    /// Counts turns of so many seconds, at rates without and with long slices. Returns the part of
    /// the time in which there were many.
    fn many(turns: &mut Turns, seconds: u64, short: u64, long: u64) -> f64 {
        let intervals = seconds * 1_000_000_000 / INTERVAL_NS;
        let many = (0..intervals).filter(|_| {
            let rate = if turns.are_many() { long } else { short };
            turns.count(rate * INTERVAL_NS / 1_000_000_000, INTERVAL_NS);
            turns.are_many()
        });
        many.count() as f64 / intervals as f64
    }

    #[test]
    fn a_burst_of_turns_lengthens_slices_for_a_moment() {
        let mut turns = Turns::default();
        assert!(many(&mut turns, 10, 400, 400) <= 0.0);
        many(&mut turns, 1, 2000, 400);
        assert!(turns.are_many());
        // The same rate as before the burst.
        many(&mut turns, 2, 400, 400);
        assert!(many(&mut turns, 60, 400, 400) <= 0.0);
    }

    #[test]
    fn lasting_turns_lengthen_slices_nearly_always() {
        let mut turns = Turns::default();
        many(&mut turns, 60, 1000, 440);
        let part = many(&mut turns, 600, 1000, 440);
        assert!(part > 0.97, "{part}");
        // Without them, slices are short again at once.
        many(&mut turns, 1, 0, 0);
        assert!(!turns.are_many());
        assert!(many(&mut turns, 60, 400, 400) <= 0.0);
    }
}
