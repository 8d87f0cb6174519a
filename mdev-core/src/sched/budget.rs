//! A cap on engine time, and the meter that holds a group to it: credit and debt are carried, so that the average is
//! exact whatever a turn really took.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A group with work that is kept waiting by others may catch up on so much wall time's worth of its budget, at least.
pub const CARRY_NS: u64 = 100_000_000;

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
    carry_ns: u64,
    open: bool,
}

impl Meter {
    /// A full and open one. A budget that is not valid is moved to the nearest one that is.
    pub fn new(budget: Budget, now_ns: u64) -> Self {
        let period_ns = budget.period_ns.clamp(1_000_000, 30_000_000);
        let time_ns = budget.time_ns.clamp(1, period_ns - 1);
        let budget = Budget { time_ns, period_ns };
        let credit_ns = time_ns.cast_signed();
        Self { budget, credit_ns, rest: 0, at_ns: now_ns, carry_ns: CARRY_NS, open: true }
    }

    /// One for silicon that keeps a group waiting for so long, where that is longer than [`CARRY_NS`].
    #[must_use]
    pub fn carrying(self, wait_ns: u64) -> Self {
        Self { carry_ns: wait_ns.clamp(CARRY_NS, MAX_DEBT_NS.cast_unsigned()), ..self }
    }

    /// What it holds the group to.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// Another budget from now on. What was saved or owed under the old one is kept as far as it is worth one period
    /// of the new one, so that the change is in force after that.
    pub fn set_budget(&mut self, budget: Budget, now_ns: u64) {
        self.advance(now_ns, true);
        let credit_ns = self.credit_ns;
        *self = Self::new(budget, self.at_ns).carrying(self.carry_ns);
        let most = self.credit_ns;
        self.credit_ns = credit_ns.clamp(-most, most);
        self.open = self.credit_ns > 0;
    }

    /// Lets time pass. A group without work saves up one period's time at most.
    pub fn advance(&mut self, now_ns: u64, has_work: bool) {
        self.settle(now_ns, 0, has_work);
    }

    /// Lets time pass in which the group used so much engine time: measured, not granted.
    pub fn settle(&mut self, now_ns: u64, used_ns: u64, has_work: bool) {
        let elapsed = now_ns.saturating_sub(self.at_ns);
        self.at_ns = self.at_ns.max(now_ns);
        let parts = u128::from(elapsed) * u128::from(self.budget.time_ns) + u128::from(self.rest);
        let period = u128::from(self.budget.period_ns);
        self.rest = (parts % period) as u64;
        let came = i64::try_from(parts / period).unwrap_or(i64::MAX);
        let time = self.budget.time_ns;
        let carry = u128::from(self.carry_ns) * u128::from(time) / period;
        let most = if has_work { time.max(carry as u64) } else { time };
        let used = i64::try_from(used_ns).unwrap_or(i64::MAX);
        let credit = self.credit_ns.saturating_add(came).saturating_sub(used);
        self.credit_ns = credit.clamp(-MAX_DEBT_NS, most.cast_signed());
        if self.credit_ns <= 0 {
            self.open = false;
        }
        if self.credit_ns >= self.reopens_at() {
            self.open = true;
        }
    }

    /// Takes engine time that was used until the last [`Meter::advance`].
    pub fn charge(&mut self, used_ns: u64) {
        self.settle(self.at_ns, used_ns, true);
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    fn quarter() -> Budget {
        Budget::part(0.25, Duration::from_millis(10)).unwrap()
    }

    #[test]
    fn it_opens_and_closes_once_in_a_period() {
        let mut meter = Meter::new(quarter(), 0);
        // What was saved up at first is used up.
        meter.charge(5 * MS / 2);
        assert!(!meter.is_open());
        let (mut now, mut used) = (0, 0);
        for period in 1..=100 {
            now = meter.opens_at_ns();
            meter.advance(now - 1, true);
            assert!(!meter.is_open());
            meter.advance(now, true);
            let left = meter.left_ns();
            now += left;
            used += left;
            meter.advance(now, true);
            meter.charge(left);
            assert!(!meter.is_open());
            assert!(now.abs_diff(period * 10 * MS) < 10, "{now}");
        }
        assert!(used.abs_diff(now / 4) < 10, "{used} of {now}");
    }

    #[test]
    fn the_whole_needs_no_budget_and_a_bad_one_is_made_good() {
        assert_eq!(Budget::part(1.0, Duration::from_millis(10)), None);
        assert!(quarter().is_valid());
        for (time_ns, period_ns) in [(0, 10 * MS), (10 * MS, 10 * MS), (1, 0), (1, 31 * MS)] {
            let bad = Budget { time_ns, period_ns };
            assert!(!bad.is_valid());
            assert!(Meter::new(bad, 0).budget().is_valid());
        }
    }

    #[test]
    fn another_budget_is_in_force_within_its_period_whatever_was_owed() {
        let mut meter = Meter::new(quarter(), 0);
        meter.charge(100 * MS);
        meter.set_budget(Budget::part(0.5, Duration::from_millis(10)).unwrap(), 20 * MS);
        assert_eq!(meter.credit_ns(), -5_000_000);
        // The debt is paid within one period, and then enough comes in for a turn.
        meter.advance(20 * MS + 14 * MS, true);
        assert!(!meter.is_open());
        meter.advance(20 * MS + 15 * MS, true);
        assert!(meter.is_open());
        // What was saved is worth no more under a smaller one.
        meter.advance(1000 * MS, true);
        meter.set_budget(quarter(), 1000 * MS);
        assert_eq!(meter.credit_ns(), 2_500_000);
    }

    proptest! {
        /// Whatever a turn really takes, and whenever somebody looks, a busy group has its part.
        #[test]
        fn the_average_is_exact(
            part in 0.01..0.99_f64,
            period in 1..=30_u64,
            turns in prop::collection::vec((0..2_000_000_u64, 0..300_000_u64), 1..50),
        ) {
            let budget = Budget::part(part, Duration::from_millis(period)).unwrap();
            let mut meter = Meter::new(budget, 0);
            let (mut now, mut used) = (0_u64, 0_u64);
            for (turn, late) in turns.iter().cycle().take(20_000) {
                if !meter.is_open() {
                    now = meter.opens_at_ns() + late;
                    meter.advance(now, true);
                }
                // A turn ends where it likes, up to 100 us over.
                let ran = meter.left_ns().min(*turn) + late / 3;
                now += ran;
                used += ran;
                meter.settle(now, ran, true);
                prop_assert!(meter.credit_ns() as f64 <= budget.as_part() * 1e8 + 1.0);
            }
            let due = u128::from(now) * u128::from(budget.time_ns) / u128::from(budget.period_ns);
            let off = u128::from(used).abs_diff(due);
            prop_assert!(off <= 100_000_000, "{used} of {due}");
        }

        #[test]
        fn nothing_makes_it_panic(
            time_ns in any::<u64>(),
            period_ns in any::<u64>(),
            steps in prop::collection::vec((any::<u64>(), any::<u64>(), any::<bool>()), 0..50),
        ) {
            let mut meter = Meter::new(Budget { time_ns, period_ns }, 0);
            for (now, used, has_work) in steps {
                meter.advance(now, has_work);
                meter.charge(used);
                let _ = (meter.left_ns(), meter.opens_at_ns());
                if has_work {
                    meter.set_budget(Budget { time_ns: used, period_ns: now }, now);
                }
            }
        }
    }
}
