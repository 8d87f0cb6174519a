//! A cap on engine time, and the meter that holds a group to it: credit and debt are carried, so that the average is
//! exact whatever a turn really took.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Periods of credit that a group with work may carry while it is kept waiting.
const CARRY: i64 = 4;

/// Debt beyond this is forgiven, so that one accident is not paid for ever.
const MAX_DEBT_NS: i64 = 1_000_000_000;

/// At most `time` of engine time in each `period`, on average.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Budget {
    /// Engine time, in nanoseconds: not 0, and less than the period.
    pub time_ns: u64,
    /// Wall time, in nanoseconds: 1 to 30 ms.
    pub period_ns: u64,
}

impl Budget {
    /// `part` (above 0) of the GPU in each `period`; none where that is all of it.
    pub fn part(part: f64, period: Duration) -> Option<Self> {
        let period_ns = period.as_nanos() as u64;
        let time_ns = period.mul_f64(part.clamp(0.0, 1.0)).as_nanos() as u64;
        (time_ns < period_ns).then_some(Self { time_ns: time_ns.max(1), period_ns })
    }

    /// True where it means something: a budget that came over a wire may not.
    pub fn is_valid(&self) -> bool {
        (1_000_000..=30_000_000).contains(&self.period_ns)
            && (1..self.period_ns).contains(&self.time_ns)
    }

    /// As a part of the GPU.
    pub fn as_part(&self) -> f64 {
        self.time_ns as f64 / self.period_ns as f64
    }
}

/// Holds one group to its budget.
///
/// Credit comes in continuously. The meter closes when it is used up, and opens again when there is enough of it for
/// the group to run without a break until the same point of the next period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meter {
    budget: Budget,
    credit_ns: i64,
    /// What of a nanosecond of credit came in already, in parts of a period.
    rest: u64,
    at_ns: u64,
    open: bool,
}

impl Meter {
    /// A full and open one. A budget that is not valid is moved to the nearest one that is.
    pub fn new(budget: Budget, now_ns: u64) -> Self {
        let period_ns = budget.period_ns.clamp(1_000_000, 30_000_000);
        let time_ns = budget.time_ns.clamp(1, period_ns - 1);
        let budget = Budget { time_ns, period_ns };
        Self { budget, credit_ns: time_ns.cast_signed(), rest: 0, at_ns: now_ns, open: true }
    }

    /// What it holds the group to.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// Another budget from now on. What was saved or owed under the old one is kept, within the new one's bounds.
    pub fn set_budget(&mut self, budget: Budget, now_ns: u64) {
        self.advance(now_ns, true);
        let credit_ns = self.credit_ns;
        *self = Self::new(budget, self.at_ns);
        self.credit_ns = credit_ns.min(self.credit_ns);
        self.open = self.credit_ns > 0;
    }

    /// Lets time pass. A group without work saves up one period's time at most.
    pub fn advance(&mut self, now_ns: u64, has_work: bool) {
        let elapsed = now_ns.saturating_sub(self.at_ns);
        self.at_ns = self.at_ns.max(now_ns);
        let parts = u128::from(elapsed) * u128::from(self.budget.time_ns) + u128::from(self.rest);
        let period = u128::from(self.budget.period_ns);
        self.rest = (parts % period) as u64;
        let came = i64::try_from(parts / period).unwrap_or(i64::MAX);
        let time = self.budget.time_ns.cast_signed();
        let most = if has_work { time * CARRY } else { time };
        self.credit_ns = self.credit_ns.saturating_add(came).min(most);
        if self.credit_ns >= self.reopens_at() {
            self.open = true;
        }
    }

    /// Takes engine time that was used: measured, not granted.
    pub fn charge(&mut self, used_ns: u64) {
        let used = i64::try_from(used_ns).unwrap_or(i64::MAX);
        self.credit_ns = self.credit_ns.saturating_sub(used).max(-MAX_DEBT_NS);
        if self.credit_ns <= 0 {
            self.open = false;
        }
    }

    /// True while the group may run.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Engine time saved up, or owed where negative.
    pub fn credit_ns(&self) -> i64 {
        self.credit_ns
    }

    /// For how long it may run from now on: what comes in meanwhile counts. 0 where it is closed.
    pub fn left_ns(&self) -> u64 {
        if !self.open {
            return 0;
        }
        let Budget { time_ns, period_ns } = self.budget;
        let credit = u128::from(self.credit_ns.max(1).cast_unsigned());
        let left = credit * u128::from(period_ns) / u128::from(period_ns - time_ns);
        u64::try_from(left).unwrap_or(u64::MAX).max(1)
    }

    /// When it opens, if nothing is charged until then; now where it is open.
    pub fn opens_at_ns(&self) -> u64 {
        let missing = self.reopens_at().saturating_sub(self.credit_ns);
        if self.open || missing <= 0 {
            return self.at_ns;
        }
        let Budget { time_ns, period_ns } = self.budget;
        let parts = u128::from(missing.cast_unsigned()) * u128::from(period_ns);
        let parts = parts.saturating_sub(u128::from(self.rest));
        let wait = u64::try_from(parts.div_ceil(u128::from(time_ns))).unwrap_or(u64::MAX);
        self.at_ns.saturating_add(wait)
    }

    /// So much that running it off takes the budget's time, and earning it again the rest of the period.
    fn reopens_at(&self) -> i64 {
        let Budget { time_ns, period_ns } = self.budget;
        let idle = u128::from(period_ns - time_ns);
        let credit = u128::from(time_ns) * idle / u128::from(period_ns);
        (credit as i64).max(1)
    }
}
