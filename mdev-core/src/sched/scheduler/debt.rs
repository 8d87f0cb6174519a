//! Debt of one vGPU: engine time that busy vGPUs owe each other, and its repayment.
//!
//! A debt is repaid by a longer or shorter slice. Where slices cannot repay it, or are not to
//! change, a [`Throttle`] closes the gate of the debtor.

use std::time::Duration;

/// Largest factor by which repayment lengthens or shortens a slice.
const MAX_CORRECTION: f64 = 8.0;
/// Limit of a debt, in nanoseconds. Debt beyond the limit is forgiven.
const MAX_DEBT_NS: f64 = 1e9;
/// Longest time between two checks of a closed gate: the others may have no work any more.
const LONGEST_CHECK: Duration = Duration::from_millis(50);
/// Time after which a throttle ends unless its gate was closed again.
const THROTTLE_NS: u64 = 1_000_000_000;

/// Numbers of turns by which a vGPU is ahead when it skips one, is behind when its slice becomes
/// longer, and is behind when that ends. One of many that has just had its turn is ahead by nearly
/// that turn, and one that is about to have it is behind.
const AHEAD: f64 = 0.75;
const BEHIND: f64 = 2.0;
const REPAID: f64 = 0.25;
/// Factor of the slice of a vGPU that is behind.
const BEHIND_CORRECTION: f64 = 1.5;

/// Conditions under which a debt may throttle a gate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Throttling {
    pub(super) now_ns: u64,
    /// Engine utilization is steady. After a stall, a throttle requires a second interval ahead.
    pub(super) steady: bool,
}

/// Throttle of a vGPU that was ahead by more than shorter slices can repay.
#[derive(Clone, Copy, Debug)]
struct Throttle {
    /// The vGPU is ahead now, so its gate is closed.
    closed: bool,
    /// Last time that the vGPU was ahead.
    closed_ns: u64,
    /// Lead from which on the vGPU skips turns, in nanoseconds, although slices could repay.
    skips_from_ns: Option<f64>,
    /// Time until the others have had what is due to them.
    opens_after: Duration,
}

impl Throttle {
    fn new(now_ns: u64, skips_from_ns: Option<f64>) -> Self {
        Self { closed: false, closed_ns: now_ns, skips_from_ns, opens_after: Duration::ZERO }
    }
}

/// Sums over consecutive intervals in which the vGPU had work and was not preempted, in
/// nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Unpreempted {
    /// Length of the intervals in which the vGPU had the engine.
    time: f64,
    used: f64,
    due: f64,
}

/// Engine time that a vGPU is owed or owes, and the means of repayment.
#[derive(Clone, Debug)]
pub(super) struct Debt {
    /// Engine time that other vGPUs owe to this vGPU; negative if this vGPU owes.
    owed_ns: f64,
    /// Factor of the slice that repays the debt. The factor is 1 while a throttle is in force.
    correction: f64,
    /// The vGPU always has work, but leaves most of its slices unused.
    undemanding: bool,
    unpreempted: Unpreempted,
    /// The vGPU contended for the engine at the last settlement.
    contends: bool,
    /// Part of the engine time of all contenders due to the vGPU, for each unit of weight.
    part_of_weight: f64,
    throttle: Option<Throttle>,
    /// At the last settlement, the vGPU was ahead by more than slices can repay.
    was_ahead: bool,
    /// The last turns of the vGPU were longer than its slices.
    overruns: bool,
}

impl Default for Debt {
    fn default() -> Self {
        Self {
            owed_ns: 0.0,
            correction: 1.0,
            undemanding: false,
            unpreempted: Unpreempted::default(),
            contends: false,
            part_of_weight: 0.0,
            throttle: None,
            was_ahead: false,
            overruns: false,
        }
    }
}

/// State.
impl Debt {
    pub(super) fn owed_ns(&self) -> f64 {
        self.owed_ns
    }

    /// Returns the factor of the slice that repays the debt.
    pub(super) fn correction(&self) -> f64 {
        self.correction
    }

    /// Returns true if the vGPU always has work but leaves most of its slices unused.
    pub(super) fn is_undemanding(&self) -> bool {
        self.undemanding
    }

    /// Returns true if the vGPU contended for the engine at the last settlement.
    pub(super) fn contends(&self) -> bool {
        self.contends
    }

    /// Returns true if debts of other contenders are balanced against this debt.
    pub(super) fn is_balanced(&self) -> bool {
        self.contends && !self.undemanding
    }

    /// Returns the part of the contenders' engine time due to the vGPU, 0 to 1, by its weight.
    pub(super) fn part(&self, weight: f64) -> f64 {
        self.part_of_weight * weight
    }
}

/// Settlement.
impl Debt {
    /// Drops the debt in both directions. A throttle stays.
    pub(super) fn forget(&mut self) {
        self.owed_ns = 0.0;
        self.correction = 1.0;
        self.undemanding = false;
        self.unpreempted = Unpreempted::default();
    }

    /// Starts a settlement: the vGPU does not contend until [`Self::contend`].
    pub(super) fn start_settlement(&mut self) {
        self.contends = false;
    }

    /// Notes that the vGPU contends, and its part of the engine time for each unit of weight.
    pub(super) fn contend(&mut self, part_of_weight: f64) {
        self.contends = true;
        self.part_of_weight = part_of_weight;
    }

    /// Fades the debt of an idle vGPU: keeps the part `kept`, 0 to 1. Ends a throttle.
    pub(super) fn fade(&mut self, kept: f64) {
        self.unpreempted = Unpreempted::default();
        self.throttle = None;
        self.undemanding = false;
        self.owed_ns *= kept;
        self.correction = 1.0 + (self.correction - 1.0) * kept;
    }

    /// Restarts the observation of [`Self::observe_unpreempted`].
    pub(super) fn reset_unpreempted(&mut self) {
        self.unpreempted = Unpreempted::default();
    }

    /// Observes an interval without preemption.
    ///
    /// Returns true after `enough_ns` of intervals with the engine in which the vGPU used less than
    /// half of the time due: it wants no more.
    pub(super) fn observe_unpreempted(
        &mut self,
        with_engine_ns: f64,
        used_ns: f64,
        due_ns: f64,
        enough_ns: f64,
    ) -> bool {
        let sums = &mut self.unpreempted;
        sums.time += with_engine_ns;
        sums.used += used_ns;
        sums.due += due_ns;
        sums.time >= enough_ns && sums.used < sums.due / 2.0
    }

    /// Marks the vGPU as undemanding: other vGPUs do not wait for it.
    pub(super) fn set_undemanding(&mut self) {
        self.undemanding = true;
    }

    /// Settles an interval while a throttle repays the debt.
    pub(super) fn settle_throttled(&mut self, due_ns: f64, used_ns: f64) {
        self.owed_ns = (self.owed_ns + due_ns - used_ns).clamp(-MAX_DEBT_NS, MAX_DEBT_NS);
        self.correction = 1.0;
    }

    /// Settles an interval: the slice repays the debt.
    ///
    /// `repayable_ns` is the engine time due over the time of repayment. The debt is limited to
    /// what corrections can repay; a larger one would be repaid long after its cause. With
    /// `throttling`, a lead over `max_lead_ns` starts a throttle.
    pub(super) fn settle(
        &mut self,
        due_ns: f64,
        used_ns: f64,
        repayable_ns: f64,
        max_lead_ns: f64,
        throttling: Option<Throttling>,
    ) {
        let owed_ns = self.owed_ns + due_ns - used_ns;
        let most_owed_ns = (MAX_CORRECTION - 1.0) * repayable_ns;
        let most_owing_ns = (1.0 - 1.0 / MAX_CORRECTION) * repayable_ns;
        let most_owing_ns =
            if throttling.is_some() { most_owing_ns.min(max_lead_ns) } else { most_owing_ns };
        self.undemanding = owed_ns >= most_owed_ns;
        let ahead = owed_ns < -most_owing_ns;
        let again = std::mem::replace(&mut self.was_ahead, ahead);
        self.throttle = throttling
            .filter(|throttling| ahead && (throttling.steady || again))
            .map(|throttling| Throttle::new(throttling.now_ns, None));
        self.owed_ns = owed_ns.clamp(-most_owing_ns, most_owed_ns);
        self.correction = 1.0 + self.owed_ns / repayable_ns;
    }

    /// Settles an interval by turns, of which the mean length is `turn_ns`: a vGPU that is ahead
    /// skips some. One that is far behind has a longer slice until it is not.
    ///
    /// One that keeps to its slices and has just skipped a whole interval runs until the next
    /// settlement, so that it does not stop for long.
    pub(super) fn settle_by_turns(
        &mut self,
        due_ns: f64,
        used_ns: f64,
        turn_ns: f64,
        overruns: bool,
        throttling: Throttling,
    ) {
        // One that had no turn shows nothing.
        let overruns = if used_ns > 0.0 { overruns } else { self.overruns };
        self.overruns = overruns;
        let skipped = !overruns && self.is_gated() && used_ns <= 0.0;
        let repaid = self.correction <= 1.0 || self.owed_ns + due_ns - used_ns < turn_ns * REPAID;
        self.settle_throttled(due_ns, used_ns);
        if !repaid || self.owed_ns > turn_ns * BEHIND {
            self.correction = BEHIND_CORRECTION;
        }
        self.undemanding = false;
        let lead_ns = turn_ns * AHEAD;
        let ahead = self.owed_ns < -lead_ns;
        let again = std::mem::replace(&mut self.was_ahead, ahead);
        let skips = ahead && !skipped && (throttling.steady || again);
        self.throttle = skips.then(|| Throttle::new(throttling.now_ns, Some(lead_ns)));
    }

    /// Takes `surplus_ns` off the debt, so that the debts of all contenders add up to 0. Slices
    /// repay what is left in the time in which `repayable_ns` are due, if they repay debts at all.
    pub(super) fn balance(&mut self, surplus_ns: f64, repayable_ns: Option<f64>, now_ns: u64) {
        self.owed_ns -= surplus_ns;
        if let Some(repayable_ns) = repayable_ns
            && !self.is_throttle_in_force(now_ns)
        {
            let correction = 1.0 + self.owed_ns / repayable_ns;
            self.correction = correction.clamp(1.0 / MAX_CORRECTION, MAX_CORRECTION);
        }
    }
}

/// Throttle.
impl Debt {
    /// Returns true if the vGPU has a throttle, whether or not the gate is closed.
    pub(super) fn has_throttle(&self) -> bool {
        self.throttle.is_some()
    }

    /// Returns true while the throttle closes the gate.
    pub(super) fn is_gated(&self) -> bool {
        self.throttle.is_some_and(|throttle| throttle.closed)
    }

    /// Returns true while the throttle, and not the slice, repays the debt.
    pub(super) fn is_throttle_in_force(&self, now_ns: u64) -> bool {
        self.throttle.is_some_and(|throttle| {
            throttle.closed || now_ns.saturating_sub(throttle.closed_ns) <= THROTTLE_NS
        })
    }

    /// Returns the lead from which on the vGPU skips turns, in nanoseconds. None if it skips none.
    pub(super) fn skips_from_ns(&self) -> Option<f64> {
        self.throttle.and_then(|throttle| throttle.skips_from_ns)
    }

    /// Returns the time after which the gate is to be checked. `usual_ns` is the least time between
    /// two checks.
    pub(super) fn check_after_ns(&self, usual_ns: u64) -> Option<u64> {
        let throttle = self.throttle?;
        match throttle.skips_from_ns {
            None => Some(usual_ns),
            // Settlements close the gate.
            Some(_) => throttle.closed.then(|| {
                let opens_after = throttle.opens_after.min(LONGEST_CHECK);
                usual_ns.max(opens_after.as_nanos() as u64)
            }),
        }
    }

    /// Closes or opens the gate, if there is a throttle. `opens_after` is the time until the lead
    /// is repaid.
    pub(super) fn set_gated(&mut self, closed: bool, opens_after: Duration, now_ns: u64) {
        if let Some(throttle) = &mut self.throttle {
            throttle.closed = closed;
            throttle.opens_after = opens_after;
            if closed {
                throttle.closed_ns = now_ns;
            }
        }
    }

    /// Ends the throttle. Returns false if there was none.
    pub(super) fn end_throttle(&mut self) -> bool {
        self.throttle.take().is_some()
    }
}
