//! Meter that enforces a budget of engine time.
//!
//! The meter carries credit and debt, so the average is exact however long a slice really took.

pub use crate::gpu::Budget;

/// Wall time for which a group that waits with work keeps its credit, at least.
pub const CARRY_NS: u64 = 100_000_000;

/// Limit of a debt. Debt beyond the limit is forgiven.
const MAX_DEBT_NS: i64 = 1_000_000_000;

/// Meter that enforces the budget of one group.
///
/// Credit accrues continuously. The meter closes when the credit is used up. The meter opens when
/// the group has enough credit to run without a break until the same point of the next period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meter {
    budget: Budget,
    credit_ns: i64,
    /// Accrued fraction of a nanosecond of credit, in parts of a period.
    rest: u64,
    at_ns: u64,
    carry_ns: u64,
    open: bool,
}

impl Meter {
    /// Creates an open meter with the credit of one period. Clamps an invalid budget to the bounds.
    pub fn new(budget: Budget, now_ns: u64) -> Self {
        let period_ns = budget.period_ns.clamp(1_000_000, 30_000_000);
        let time_ns = budget.time_ns.clamp(1, period_ns - 1);
        let budget = Budget { time_ns, period_ns };
        let credit_ns = time_ns.cast_signed();
        Self { budget, credit_ns, rest: 0, at_ns: now_ns, carry_ns: CARRY_NS, open: true }
    }

    /// Keeps the credit of a waiting group for `wait_ns`, if longer than [`CARRY_NS`].
    #[must_use]
    pub fn carrying(self, wait_ns: u64) -> Self {
        Self { carry_ns: wait_ns.clamp(CARRY_NS, MAX_DEBT_NS.cast_unsigned()), ..self }
    }

    /// Returns the budget.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// Replaces the budget.
    ///
    /// Credit and debt are limited to one period of the new budget, which is therefore in force
    /// after one period.
    pub fn set_budget(&mut self, budget: Budget, now_ns: u64) {
        self.advance(now_ns, true);
        let credit_ns = self.credit_ns;
        *self = Self::new(budget, self.at_ns).carrying(self.carry_ns);
        let most = self.credit_ns;
        self.credit_ns = credit_ns.clamp(-most, most);
        self.open = self.credit_ns > 0;
    }

    /// Lets time pass. A group without work accrues the credit of one period at most.
    pub fn advance(&mut self, now_ns: u64, has_work: bool) {
        self.settle(now_ns, 0, has_work);
    }

    /// Lets time pass in which the group used `used_ns` of engine time, as measured.
    pub fn settle(&mut self, now_ns: u64, used_ns: u64, has_work: bool) {
        let elapsed = now_ns.saturating_sub(self.at_ns);
        self.at_ns = self.at_ns.max(now_ns);
        let parts = u128::from(elapsed) * u128::from(self.budget.time_ns) + u128::from(self.rest);
        let period = u128::from(self.budget.period_ns);
        self.rest = (parts % period) as u64;
        let accrued = i64::try_from(parts / period).unwrap_or(i64::MAX);
        let time = self.budget.time_ns;
        let carry = u128::from(self.carry_ns) * u128::from(time) / period;
        let most = if has_work { time.max(carry as u64) } else { time };
        let used = i64::try_from(used_ns).unwrap_or(i64::MAX);
        let credit = self.credit_ns.saturating_add(accrued).saturating_sub(used);
        self.credit_ns = credit.clamp(-MAX_DEBT_NS, most.cast_signed());
        if self.credit_ns <= 0 {
            self.open = false;
        }
        if self.credit_ns >= self.reopens_at() {
            self.open = true;
        }
    }

    /// Charges engine time that was used before the last [`Meter::advance`].
    pub fn charge(&mut self, used_ns: u64) {
        self.settle(self.at_ns, used_ns, true);
    }

    /// Gives back engine time that was charged and not used.
    pub fn refund(&mut self, unused_ns: u64) {
        let unused = i64::try_from(unused_ns).unwrap_or(i64::MAX);
        let most = self.budget.time_ns.cast_signed().max(self.credit_ns);
        self.credit_ns = self.credit_ns.saturating_add(unused).min(most);
        self.open |= self.credit_ns >= self.reopens_at();
    }

    /// Returns true while the group may run.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Returns the credit in engine time; negative for a debt.
    pub fn credit_ns(&self) -> i64 {
        self.credit_ns
    }

    /// Returns the time for which the group may run from now on: 0 while the meter is closed.
    ///
    /// Credit that accrues meanwhile counts.
    pub fn left_ns(&self) -> u64 {
        if !self.open {
            return 0;
        }
        let Budget { time_ns, period_ns } = self.budget;
        let credit = u128::from(self.credit_ns.max(1).cast_unsigned());
        let left = credit * u128::from(period_ns) / u128::from(period_ns - time_ns);
        u64::try_from(left).unwrap_or(u64::MAX).max(1)
    }

    /// Returns the time at which the meter opens if nothing is charged: now if the meter is open.
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

    /// Returns the credit at which the meter opens.
    ///
    /// Running the credit off takes the budget's time. Accruing it again takes the rest of the
    /// period.
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

    use std::time::Duration;

    use super::*;

    const MS: u64 = 1_000_000;

    fn quarter() -> Budget {
        Budget::part(0.25, Duration::from_millis(10)).unwrap()
    }

    #[test]
    fn a_meter_opens_and_closes_once_in_a_period() {
        let mut meter = Meter::new(quarter(), 0);
        // Use up the initial credit.
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
    fn the_whole_gpu_has_no_budget_and_an_invalid_budget_is_clamped() {
        assert_eq!(Budget::part(1.0, Duration::from_millis(10)), None);
        assert!(quarter().is_valid());
        for (time_ns, period_ns) in [(0, 10 * MS), (10 * MS, 10 * MS), (1, 0), (1, 31 * MS)] {
            let bad = Budget { time_ns, period_ns };
            assert!(!bad.is_valid());
            assert!(Meter::new(bad, 0).budget().is_valid());
        }
    }

    #[test]
    fn a_new_budget_is_in_force_within_its_period_despite_debt() {
        let mut meter = Meter::new(quarter(), 0);
        meter.charge(100 * MS);
        meter.set_budget(Budget::part(0.5, Duration::from_millis(10)).unwrap(), 20 * MS);
        assert_eq!(meter.credit_ns(), -5_000_000);
        // The debt is repaid within one period, and then credit for a slice accrues.
        meter.advance(20 * MS + 14 * MS, true);
        assert!(!meter.is_open());
        meter.advance(20 * MS + 15 * MS, true);
        assert!(meter.is_open());
        // A smaller budget limits saved credit.
        meter.advance(1000 * MS, true);
        meter.set_budget(quarter(), 1000 * MS);
        assert_eq!(meter.credit_ns(), 2_500_000);
    }

    proptest! {
        /// A busy group gets its part, for any length of slices and any delay of checks.
        #[test]
        fn the_average_is_exact(
            part in 0.01..0.99_f64,
            period in 1..=30_u64,
            slices in prop::collection::vec((0..2_000_000_u64, 0..300_000_u64), 1..50),
        ) {
            let budget = Budget::part(part, Duration::from_millis(period)).unwrap();
            let mut meter = Meter::new(budget, 0);
            let (mut now, mut used) = (0_u64, 0_u64);
            for (slice, late) in slices.iter().cycle().take(20_000) {
                if !meter.is_open() {
                    now = meter.opens_at_ns() + late;
                    meter.advance(now, true);
                }
                // A slice ends up to 100 us late.
                let ran = meter.left_ns().min(*slice) + late / 3;
                now += ran;
                used += ran;
                meter.settle(now, ran, true);
                let part = budget.time_ns as f64 / budget.period_ns as f64;
                prop_assert!(meter.credit_ns() as f64 <= part * 1e8 + 1.0);
            }
            let due = u128::from(now) * u128::from(budget.time_ns) / u128::from(budget.period_ns);
            let off = u128::from(used).abs_diff(due);
            prop_assert!(off <= 100_000_000, "{used} of {due}");
        }

        #[test]
        fn any_budget_and_time_is_accepted_without_panic(
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
