//! Settlement of debts: deficit round robin in measured engine time.
//!
//! Only busy vGPUs owe each other. A vGPU that was idle by choice lost nothing. A settlement has
//! four steps: classify the vGPUs, divide the used engine time into dues, settle each debt, and
//! balance the debts.

use std::time::Duration;

use super::debt::Throttling;
use super::group::{Group, Groups};
use super::weights::Plan;
use crate::sched::account::Interval;

/// Rounds of the runlist over which deviations are repaid, at least.
const ROUNDS: f64 = 4.0;
/// Factor of its usage up to which an undemanding vGPU may use more.
const USABLE: f64 = 1.1;

/// Longest mean turn of a vGPU that keeps to its slices: as a factor of the slice, and beyond that
/// in nanoseconds. Slices change between readings.
const OVERRUN: f64 = 1.25;
const OVERRUN_NS: f64 = 250e3;
/// Slice below which any longer turn is an overrun, in nanoseconds.
const SHORT_SLICE_NS: f64 = 1e6;

/// Parameters of a settlement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settlement<'a> {
    pub(super) plan: &'a Plan,
    /// Time of repayment, in nanoseconds.
    pub(super) repay_ns: f64,
    /// Busy vGPUs divide idle time by priority.
    pub(super) by_priority: bool,
    /// Gates make debtors pay where slices cannot.
    pub(super) throttling: Option<Throttling>,
    /// Debtors skip turns, and slices stay: there are so many vGPUs that changes of slices would
    /// disturb the order of their turns.
    pub(super) by_turns: bool,
}

/// vGPU that had work nearly all of the interval, or would have had without its throttle.
struct Contender<'a> {
    interval: &'a Interval,
    group: &'a mut Group,
    /// Promised percentage of the GPU.
    promised: f64,
    /// Weight without boost.
    own_weight: f64,
    /// Part of the interval, 0 to 1, since which the vGPU has work.
    presence: f64,
}

impl Contender<'_> {
    fn used_ns(&self) -> f64 {
        self.interval.engine_ns as f64
    }

    fn weight(&self) -> f64 {
        self.own_weight * self.group.share.boost() * self.presence
    }

    /// Returns the most engine time that can be due to the vGPU.
    fn most_ns(&self) -> f64 {
        let cap_ns = self.group.cap.most_ns(self.interval.elapsed_ns);
        // Other vGPUs are not charged for time that this vGPU cannot use.
        if self.group.debt.is_undemanding() { cap_ns.min(self.used_ns() * USABLE) } else { cap_ns }
    }

    /// Returns true if the vGPU may run and has not used up a slice.
    fn awaits_preemption(&self) -> bool {
        !self.interval.preempted && !self.group.debt.is_gated()
    }

    /// Returns true if the vGPU keeps the engine beyond its slices, as far as the GPU counts turns.
    /// A vGPU that keeps to its slices repays any debt with them.
    fn overruns_slices(&self) -> bool {
        let slice_ns = self.group.share.slice().unwrap_or_default().as_nanos() as f64;
        let turns = self.interval.turns as f64;
        let longest_ns = slice_ns * OVERRUN + OVERRUN_NS;
        // Short slices cannot become much shorter.
        let longest_ns = if slice_ns < SHORT_SLICE_NS { slice_ns } else { longest_ns };
        turns == 0.0 || self.used_ns() > turns * longest_ns
    }

    /// Returns the mean length of a turn without correction, at least a slice.
    fn turn_ns(&self) -> f64 {
        let slice_ns = self.group.share.slice().unwrap_or_default().as_nanos() as f64;
        let turn_ns = slice_ns.max(self.used_ns() / (self.interval.turns as f64).max(1.0));
        turn_ns / self.group.debt.correction()
    }

    /// Returns the parts of idle time for the vGPU's priority.
    fn idle_parts(&self) -> f64 {
        f64::from(self.group.share.priority().parts())
    }
}

/// Sums over the contenders of a settlement.
struct Round {
    used_ns: f64,
    weight: f64,
    /// Time of several rounds of the runlist.
    rounds_ns: f64,
    repay_ns: f64,
    any_preempted: bool,
    awaiting_preemption: usize,
    throttling: Option<Throttling>,
    by_turns: bool,
}

impl Round {
    fn new(contenders: &[Contender<'_>], used_ns: f64, settlement: &Settlement<'_>) -> Self {
        let round: Duration =
            contenders.iter().filter_map(|contender| contender.group.share.slice()).sum();
        let rounds_ns = ROUNDS * round.as_nanos() as f64;
        let awaiting = contenders.iter().filter(|contender| contender.awaits_preemption());
        Self {
            used_ns,
            weight: contenders.iter().map(Contender::weight).sum(),
            rounds_ns,
            // An interval shorter than a round does not show how the contenders divide the engine.
            repay_ns: settlement.repay_ns.max(rounds_ns),
            any_preempted: contenders.iter().any(|contender| contender.interval.preempted),
            awaiting_preemption: awaiting.count(),
            throttling: settlement.throttling,
            by_turns: settlement.by_turns,
        }
    }
}

/// Settles the debts of all vGPUs after `intervals`, which are in the order of ids.
pub(super) fn update(groups: &mut Groups, intervals: &[Interval], settlement: &Settlement<'_>) {
    let mut contenders = classify(groups, intervals, settlement);
    if settlement.by_priority {
        boost(&mut contenders);
    }
    let used_ns: f64 = contenders.iter().map(Contender::used_ns).sum();
    if let [alone] = &mut contenders[..]
        && alone.group.debt.end_throttle()
    {
        alone.group.forget_debt();
    }
    if contenders.len() < 2 || used_ns <= 0.0 {
        return;
    }
    let round = Round::new(&contenders, used_ns, settlement);
    let dues = dues(&contenders, &round);
    for (contender, due_ns) in contenders.iter_mut().zip(dues) {
        if due_ns > 0.0 {
            settle(contender, due_ns, &round);
        }
    }
    if let Some(throttling) = round.throttling {
        let repay_ns = (!round.by_turns).then_some(round.repay_ns);
        balance(&mut contenders, repay_ns, throttling.now_ns);
    }
}

/// Returns the contenders. Fades the debts of the other vGPUs.
fn classify<'a>(
    groups: &'a mut Groups,
    intervals: &'a [Interval],
    settlement: &Settlement<'_>,
) -> Vec<Contender<'a>> {
    for group in groups.values_mut() {
        group.debt.start_settlement();
    }
    let mut groups = groups.iter_mut();
    let mut contenders = Vec::new();
    for interval in intervals {
        let Some((_, group)) = groups.by_ref().find(|(id, _)| **id == interval.vgpu) else { break };
        group.share.reset_boost();
        if group.share.has_changed() {
            continue;
        }
        // A throttled group cannot show its full demand.
        let throttled = group.debt.is_gated() || group.debt.has_throttle() && interval.runnable;
        // Work that began within the interval counts from then on.
        let since_start = || interval.with_work_ns as f64 / interval.elapsed_ns as f64;
        let presence = if interval.busy || throttled {
            Some(1.0)
        } else {
            (settlement.by_turns && interval.begins).then(since_start)
        };
        if let Some(presence) = presence {
            let promised = settlement.plan.promised(&group.share);
            let own_weight = settlement.plan.weight(&group.share);
            contenders.push(Contender { interval, group, promised, own_weight, presence });
        } else {
            let kept = (1.0 - interval.elapsed_ns as f64 / settlement.repay_ns).max(0.0);
            group.debt.fade(kept);
        }
    }
    contenders
}

/// Divides the time that idle vGPUs leave among the contenders, by priority.
fn boost(contenders: &mut [Contender<'_>]) {
    let takers =
        || contenders.iter().filter(|contender| contender.group.share.class().takes_spare_time());
    let mut priorities = takers().map(|contender| contender.group.share.priority());
    let first = priorities.next();
    // Slices already divide idle time by weight within contender priority.
    if priorities.all(|priority| Some(priority) == first) {
        return;
    }
    let left =
        (100.0 - contenders.iter().map(|contender| contender.promised).sum::<f64>()).max(0.0);
    let parts: f64 = takers().map(|contender| contender.promised * contender.idle_parts()).sum();
    let weigh = |contender: &Contender<'_>| {
        contender.promised * (1.0 + left * contender.idle_parts() / parts)
    };
    let (before, after) = takers()
        .map(|contender| (contender.own_weight, weigh(contender)))
        .fold((0.0, 0.0), |sums, weights| (sums.0 + weights.0, sums.1 + weights.1));
    for contender in contenders.iter_mut() {
        if contender.group.share.class().takes_spare_time() {
            let boost = weigh(contender) * before / (after * contender.own_weight);
            contender.group.share.set_boost(boost);
        }
    }
}

/// Divides the used engine time by weight. No due exceeds [`Contender::most_ns`].
fn dues(contenders: &[Contender<'_>], round: &Round) -> Vec<f64> {
    let mut dues = vec![0.0; contenders.len()];
    let (mut rest_ns, mut weight) = (round.used_ns, round.weight);
    // Ascending limits for each unit of weight: time above a limit goes to the contenders after it.
    let mut limited: Vec<_> = contenders
        .iter()
        .enumerate()
        .filter(|(_, contender)| contender.most_ns().is_finite())
        .map(|(index, contender)| (index, contender.most_ns(), contender.weight()))
        .collect();
    limited.sort_by(|a, b| (a.1 / a.2).total_cmp(&(b.1 / b.2)));
    for (index, most_ns, own_weight) in limited {
        dues[index] = (rest_ns * own_weight / weight).min(most_ns);
        rest_ns -= dues[index];
        weight -= own_weight;
    }
    let unlimited =
        contenders.iter().enumerate().filter(|(_, contender)| contender.most_ns().is_infinite());
    for (index, contender) in unlimited {
        dues[index] = rest_ns * contender.weight() / weight;
    }
    dues
}

/// Settles the debt of a contender.
fn settle(contender: &mut Contender<'_>, due_ns: f64, round: &Round) {
    let used_ns = contender.used_ns();
    let part = due_ns / round.used_ns;
    contender.group.debt.contend(part / contender.own_weight);
    if contender.group.debt.is_undemanding() {
        if used_ns >= contender.weight() / round.weight * round.used_ns / 2.0 {
            contender.group.forget_debt();
        }
        return;
    }
    if leaves_slices_unused(contender, due_ns, round) {
        contender.group.forget_debt();
        contender.group.debt.set_undemanding();
        return;
    }
    if let Some(throttling) = round.throttling.filter(|_| round.by_turns) {
        let (turn_ns, overruns) = (contender.turn_ns(), contender.overruns_slices());
        contender.group.debt.settle_by_turns(due_ns, used_ns, turn_ns, overruns, throttling);
        return;
    }
    let throttling = round.throttling.filter(|_| contender.overruns_slices());
    let group = &mut *contender.group;
    match throttling {
        Some(throttling) if group.debt.is_throttle_in_force(throttling.now_ns) => {
            group.debt.settle_throttled(due_ns, used_ns);
        }
        throttling => {
            let repayable_ns = part * round.repay_ns;
            let max_lead_ns = group.share.max_lead_ns();
            group.debt.settle(due_ns, used_ns, repayable_ns, max_lead_ns, throttling);
        }
    }
}

/// Returns true if a contender always gave up the engine by itself, over enough slices.
fn leaves_slices_unused(contender: &mut Contender<'_>, due_ns: f64, round: &Round) -> bool {
    // Every other contender has used up a slice, so this contender had a slice, too.
    let passed_over = round.throttling.is_some()
        && round.awaiting_preemption == usize::from(contender.awaits_preemption());
    let used_ns = contender.used_ns();
    let elapsed_ns = contender.interval.elapsed_ns as f64;
    let debt = &mut contender.group.debt;
    if contender.interval.preempted || !round.any_preempted || debt.has_throttle() {
        debt.reset_unpreempted();
        return false;
    }
    // Without the engine there was nothing to give up, and a slice that lasts may still be used up.
    let with_engine_ns = if used_ns > 0.0 || passed_over { elapsed_ns } else { 0.0 };
    let enough_ns = round.rounds_ns.max(2.0 * elapsed_ns);
    debt.observe_unpreempted(with_engine_ns, used_ns, due_ns, enough_ns)
}

/// Balances the debts of the contenders, so that they add up to 0.
///
/// A contender that leaves takes its debt with it. Gates follow debts, so a debt without a creditor
/// would never be repaid, and the debtor's gate would stay closed.
fn balance(contenders: &mut [Contender<'_>], repay_ns: Option<f64>, now_ns: u64) {
    let part = |contender: &Contender<'_>| contender.group.debt.part(contender.own_weight);
    let (owed_ns, parts) = contenders
        .iter()
        .filter(|contender| contender.group.debt.is_balanced())
        .fold((0.0, 0.0), |sums, contender| {
            (sums.0 + contender.group.debt.owed_ns(), sums.1 + part(contender))
        });
    if parts <= 0.0 {
        return;
    }
    for contender in contenders.iter_mut().filter(|contender| contender.group.debt.is_balanced()) {
        let part = part(contender);
        let repayable_ns = repay_ns.map(|repay_ns| part * repay_ns);
        contender.group.debt.balance(owed_ns * part / parts, repayable_ns, now_ns);
    }
}
