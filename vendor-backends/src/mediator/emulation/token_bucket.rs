//! Token bucket for submissions per second. Pure: the caller passes the time.

use std::num::NonZeroU32;

/// Nanoseconds per second, and parts of a token.
const SECOND: u64 = 1_000_000_000;
/// Inverse of the burst: submissions of 1/20 s may come at once.
const BURSTS_PER_SECOND: u64 = 20;

/// A token bucket, initially full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBucket {
    rate: u64,
    /// Tokens times [`SECOND`].
    level: u64,
    at_ns: u64,
}

impl TokenBucket {
    /// Creates a bucket for `rate` tokens per second.
    pub fn new(rate: NonZeroU32, now_ns: u64) -> Self {
        let mut bucket = Self { rate: rate.get().into(), level: 0, at_ns: now_ns };
        bucket.level = bucket.full();
        bucket
    }

    fn full(&self) -> u64 {
        // At least two, so that a late poll loses no token at a slow rate.
        (self.rate / BURSTS_PER_SECOND).max(2) * SECOND
    }

    /// Adds the tokens of the elapsed time.
    pub fn refill(&mut self, now_ns: u64) {
        let elapsed = now_ns.saturating_sub(self.at_ns);
        self.at_ns = self.at_ns.max(now_ns);
        self.level = self.level.saturating_add(elapsed.saturating_mul(self.rate)).min(self.full());
    }

    /// Returns whether a token is available.
    pub fn has_token(&self) -> bool {
        self.level >= SECOND
    }

    /// Takes a token. Returns false if none is available.
    pub fn take(&mut self) -> bool {
        let has = self.has_token();
        if has {
            self.level -= SECOND;
        }
        has
    }

    /// Returns the nanoseconds until a token is available.
    pub fn wait_ns(&self) -> u64 {
        SECOND.saturating_sub(self.level).div_ceil(self.rate)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_slow_rate_is_exact() {
        let mut bucket = TokenBucket::new(NonZeroU32::new(3).unwrap(), 0);
        let (mut now, mut taken) = (0, 0);
        while now < 100 * SECOND {
            bucket.refill(now);
            taken += u64::from(bucket.take());
            now += bucket.wait_ns().max(1);
        }
        assert_eq!(taken, 301, "a burst of two, and the 300th token at the end");
    }

    proptest! {
        #[test]
        fn tokens_never_exceed_the_rate_and_a_burst(
            rate in 1u32..2_000_000,
            steps in proptest::collection::vec((0u64..SECOND, 0u32..100_000), 1..50),
        ) {
            let mut bucket = TokenBucket::new(NonZeroU32::new(rate).unwrap(), 7);
            let (mut now, mut taken) = (7u64, 0u64);
            for (idle, asked) in steps {
                now += idle;
                bucket.refill(now);
                taken += u64::from(asked).min((0..asked).take_while(|_| bucket.take()).count() as u64);
                let most = (now - 7) as f64 * f64::from(rate) / 1e9
                    + (f64::from(rate) / 20.0).max(2.0);
                prop_assert!(taken as f64 <= most + 1e-6);
            }
        }
    }
}
