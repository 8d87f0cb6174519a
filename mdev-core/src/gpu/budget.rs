//! Budget of engine time.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Limit of engine time in each period, on average.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Budget {
    /// Engine time, in nanoseconds: 1 to less than the period.
    pub time_ns: u64,
    /// Wall time, in nanoseconds: 1 to 30 ms.
    pub period_ns: u64,
}

impl Budget {
    /// Returns the budget for `part` (above 0) of the GPU in each `period`.
    ///
    /// Returns `None` for the whole GPU.
    pub fn part(part: f64, period: Duration) -> Option<Self> {
        let period_ns = period.as_nanos() as u64;
        let time_ns = period.mul_f64(part.clamp(0.0, 1.0)).as_nanos() as u64;
        (time_ns < period_ns).then_some(Self { time_ns: time_ns.max(1), period_ns })
    }

    /// Returns true if time and period are within their bounds. A received budget may be invalid.
    pub fn is_valid(&self) -> bool {
        (1_000_000..=30_000_000).contains(&self.period_ns)
            && (1..self.period_ns).contains(&self.time_ns)
    }
}
