//! Waits for the engine, counted by their length.

use serde::{Deserialize, Serialize};

/// Buckets for one power of two.
const STEPS: usize = 4;
/// Powers of two with buckets of their own.
const POWERS: usize = 22;
/// Shortest time with a bucket of its own, in nanoseconds. Shorter times are in the first bucket.
const SHORTEST_NS: u64 = 1 << SHORTEST_POWER;
const SHORTEST_POWER: u32 = 12;

/// Waits of a vGPU's work for the engine, counted by their length since the vGPU's admission.
///
/// A wait begins when work is submitted to a vGPU without the engine, or when the vGPU loses the
/// engine with work left. A wait ends when the vGPU gets the engine. Buckets are a quarter of a
/// power of two wide, from 4 us to 16 s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    counts: [[u32; STEPS]; POWERS],
}

impl Waits {
    /// Number of buckets.
    pub const BUCKETS: usize = STEPS * POWERS;

    /// Returns counters with these counts in their buckets.
    pub fn from_counts(counts: [u32; Self::BUCKETS]) -> Self {
        let mut waits = Self::default();
        waits.counts.as_flattened_mut().copy_from_slice(&counts);
        waits
    }

    /// Returns the counts of the buckets.
    pub fn counts(&self) -> [u32; Self::BUCKETS] {
        std::array::from_fn(|bucket| self.counts.as_flattened()[bucket])
    }

    /// Returns the bucket of a wait of `ns` nanoseconds.
    pub fn bucket(ns: u64) -> usize {
        let ns = ns.clamp(SHORTEST_NS, (SHORTEST_NS << POWERS) - 1);
        let power = (ns.ilog2() - SHORTEST_POWER) as usize;
        let step = (ns >> (ns.ilog2() - STEPS.ilog2())) as usize % STEPS;
        power * STEPS + step
    }

    /// Counts a wait of `ns` nanoseconds.
    pub fn record(&mut self, ns: u64) {
        let count = &mut self.counts.as_flattened_mut()[Self::bucket(ns)];
        *count = count.wrapping_add(1);
    }

    /// Returns whether these can be a later state of the counters `earlier`: whether no count is
    /// lower.
    pub fn can_follow(&self, earlier: &Self) -> bool {
        let counts = self.counts.as_flattened().iter().zip(earlier.counts.as_flattened());
        // Counts wrap around.
        counts.into_iter().all(|(count, before)| count.wrapping_sub(*before) <= u32::MAX / 2)
    }

    /// Returns the waits counted since `earlier`, an earlier state of the same counters.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut waits = *self;
        let counts = waits.counts.as_flattened_mut().iter_mut();
        for (count, before) in counts.zip(earlier.counts.as_flattened()) {
            *count = count.wrapping_sub(*before);
        }
        waits
    }

    /// Returns the number of waits.
    pub fn total(&self) -> u64 {
        self.counts.as_flattened().iter().map(|count| u64::from(*count)).sum()
    }

    /// Returns the upper bound, in nanoseconds, of the bucket with the quantile `part` (0 to 1).
    /// None without waits.
    pub fn quantile(&self, part: f64) -> Option<u64> {
        let wanted = part * self.total() as f64;
        let mut seen = 0;
        let counts = self.counts.as_flattened().iter().enumerate();
        for (bucket, count) in counts.filter(|(_, count)| **count > 0) {
            seen += u64::from(*count);
            if seen as f64 >= wanted {
                let (power, step) = (bucket / STEPS, bucket % STEPS);
                return Some((SHORTEST_NS << power) / STEPS as u64 * (STEPS + step + 1) as u64);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantiles_are_those_of_the_waits_in_between() {
        let mut waits = Waits::default();
        assert_eq!(waits.quantile(0.5), None);
        waits.record(9_000_000_000);
        let earlier = waits;
        for ms in 1..=100 {
            waits.record(ms * 1_000_000);
        }
        let waits = waits.since(&earlier);
        assert_eq!(waits.total(), 100);
        let ms = |part| waits.quantile(part).unwrap() as f64 / 1e6;
        assert!((50.0..63.0).contains(&ms(0.5)), "{}", ms(0.5));
        assert!((99.0..126.0).contains(&ms(0.99)), "{}", ms(0.99));
        assert!(waits.can_follow(&Waits::default()) && !Waits::default().can_follow(&waits));
    }

    #[test]
    fn counts_wrap_around() {
        let mut counts = [0; Waits::BUCKETS];
        counts[Waits::bucket(1_000_000)] = u32::MAX;
        let earlier = Waits::from_counts(counts);
        let mut waits = earlier;
        waits.record(1_000_000);
        waits.record(1_000_000);
        assert!(waits.can_follow(&earlier));
        assert_eq!(waits.since(&earlier).total(), 2);
    }

    proptest! {
        #[test]
        fn a_quantile_exceeds_its_wait_by_a_quarter_at_most(ns in any::<u64>()) {
            let mut waits = Waits::default();
            waits.record(ns);
            let got = waits.quantile(1.0).unwrap();
            prop_assert!(got <= SHORTEST_NS << POWERS);
            if (SHORTEST_NS..SHORTEST_NS << POWERS).contains(&ns) {
                prop_assert!(got > ns && got <= ns + ns / 4 + 1, "{ns}: {got}");
            }
        }

        #[test]
        fn any_counts_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            if let Ok(waits) = serde_json::from_slice::<Waits>(&bytes) {
                waits.since(&Waits::default()).quantile(0.5);
            }
        }
    }
}
