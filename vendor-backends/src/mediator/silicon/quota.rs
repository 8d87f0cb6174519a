//! Submissions per second: a token bucket. Pure: it is told the time.

use std::num::NonZeroU32;

/// Nanoseconds of one second: one submission is so many parts of a token.
const SECOND: u64 = 1_000_000_000;
/// Submissions of 1/20 s may come at once.
const BURSTS_PER_SECOND: u64 = 20;

/// A bucket that is full at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    rate: u64,
    /// Tokens times [`SECOND`].
    level: u64,
    at_ns: u64,
}

impl Bucket {
    /// For so many per second.
    pub fn new(rate: NonZeroU32, now_ns: u64) -> Self {
        let mut bucket = Self { rate: rate.get().into(), level: 0, at_ns: now_ns };
        bucket.level = bucket.full();
        bucket
    }

    fn full(&self) -> u64 {
        // Two at least, so that a slow rate loses nothing to a look that comes late.
        (self.rate / BURSTS_PER_SECOND).max(2) * SECOND
    }

    /// Lets time pass.
    pub fn advance(&mut self, now_ns: u64) {
        let elapsed = now_ns.saturating_sub(self.at_ns);
        self.at_ns = self.at_ns.max(now_ns);
        self.level = self.level.saturating_add(elapsed.saturating_mul(self.rate)).min(self.full());
    }

    /// Whether one more may come.
    pub fn has_one(&self) -> bool {
        self.level >= SECOND
    }

    /// Takes one; false where there is none.
    pub fn take(&mut self) -> bool {
        let has = self.has_one();
        if has {
            self.level -= SECOND;
        }
        has
    }

    /// Nanoseconds until there is one.
    pub fn wait_ns(&self) -> u64 {
        SECOND.saturating_sub(self.level).div_ceil(self.rate)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_slow_rate_is_kept_exactly() {
        let mut bucket = Bucket::new(NonZeroU32::new(3).unwrap(), 0);
        let (mut now, mut taken) = (0, 0);
        while now < 100 * SECOND {
            bucket.advance(now);
            taken += u64::from(bucket.take());
            now += bucket.wait_ns().max(1);
        }
        assert_eq!(taken, 301, "two at once, and the 300th comes at the very end");
    }

    proptest! {
        #[test]
        fn no_more_than_the_rate_and_a_burst(
            rate in 1u32..2_000_000,
            steps in proptest::collection::vec((0u64..SECOND, 0u32..100_000), 1..50),
        ) {
            let mut bucket = Bucket::new(NonZeroU32::new(rate).unwrap(), 7);
            let (mut now, mut taken) = (7u64, 0u64);
            for (idle, asked) in steps {
                now += idle;
                bucket.advance(now);
                taken += u64::from(asked).min((0..asked).take_while(|_| bucket.take()).count() as u64);
                let most = (now - 7) as f64 * f64::from(rate) / 1e9
                    + (f64::from(rate) / 20.0).max(2.0);
                prop_assert!(taken as f64 <= most + 1e-6);
            }
        }
    }
}
