//! Histogram of times in constant space.
//!
//! Buckets are an eighth of a power of two wide, so percentiles are within an eighth.

/// Number of buckets for one power of two.
const STEPS: u64 = 8;

/// Histogram of times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: Vec<u32>,
    total: u64,
}

impl Histogram {
    /// Counts a time.
    pub fn record(&mut self, ns: u64) {
        let bucket = bucket(ns);
        if self.counts.len() <= bucket {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] = self.counts[bucket].saturating_add(1);
        self.total += 1;
    }

    /// Adds the counts of another histogram.
    pub fn add(&mut self, other: &Self) {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*more);
        }
        self.total += other.total;
    }

    /// Returns the number of times counted.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the upper bound, in nanoseconds, of the bucket with the quantile `part` (0 to 1).
    pub fn quantile(&self, part: f64) -> u64 {
        let wanted = part * self.total as f64;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += u64::from(*count);
            if seen > 0 && seen as f64 >= wanted {
                return last_of(bucket as u64);
            }
        }
        0
    }
}

/// Returns the bucket of a time.
fn bucket(ns: u64) -> usize {
    if ns < STEPS {
        return ns as usize;
    }
    let power = u64::from(ns.ilog2()) - 3;
    (power * STEPS + (ns >> power)) as usize
}

/// Returns the longest time of a bucket.
fn last_of(bucket: u64) -> u64 {
    if bucket < 2 * STEPS {
        return bucket;
    }
    let power = bucket / STEPS - 1;
    let first = (bucket % STEPS + STEPS) << power;
    first + ((1 << power) - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn percentiles_are_accurate() {
        let mut waits = Histogram::default();
        for us in 1..=1000 {
            waits.record(us * 1000);
        }
        assert_eq!(waits.total(), 1000);
        for (part, us) in [(0.5, 500.0), (0.99, 990.0), (1.0, 1000.0)] {
            let got = waits.quantile(part) as f64 / 1e3;
            assert!((got / us - 1.0).abs() < 0.13, "{part}: {got}");
        }
        assert_eq!(Histogram::default().quantile(0.5), 0);
    }

    proptest! {
        #[test]
        fn a_time_is_in_its_bucket(ns in any::<u64>()) {
            let at = bucket(ns) as u64;
            prop_assert!(last_of(at) >= ns);
            prop_assert!(at == 0 || last_of(at - 1) < ns);
            prop_assert!(at < STEPS * 64);
        }
    }
}
