//! What busy vGPUs owe each other, and how it is made good.

use std::collections::BTreeMap;
use std::time::Duration;

use super::ahead::{Hold, Holds};
use super::group::{Group, Unhurried};
use super::weights::Plan;
use crate::ids::VgpuId;
use crate::sched::account::Interval;

/// Deviations are made good over so many rounds of the runlist at least.
const ROUNDS: f64 = 4.0;
/// How far a slice is scaled up or down, at most, to repay.
const MAX_CORRECTION: f64 = 8.0;
/// Debt beyond this is forgiven, so that one accident is not paid for ever.
const MAX_DEBT_NS: f64 = 1e9;
/// How much more than it did, a vGPU that did not use its slices might.
const USABLE: f64 = 1.1;

/// A vGPU that had work nearly all of the time.
struct Busy<'a> {
    interval: &'a Interval,
    group: &'a mut Group,
    /// What it is promised, in hundredths, and its weight while all are busy.
    promised: f64,
    own_weight: f64,
}

impl Busy<'_> {
    fn used(&self) -> f64 {
        self.interval.engine_ns as f64
    }

    fn weight(&self) -> f64 {
        self.own_weight * self.group.boost
    }

    /// What it can have of the interval.
    fn most(&self) -> f64 {
        let cap = if self.group.cap < 1.0 {
            self.group.cap * self.interval.elapsed_ns as f64
        } else {
            f64::INFINITY
        };
        // Others are not charged for what it cannot use.
        if self.group.sated { cap.min(self.used() * USABLE) } else { cap }
    }
}

/// Charges what was used. Only busy vGPUs owe each other: one that was idle by choice lost nothing.
///
/// Intervals are in the order of ids. With `classes`, idle time goes to the busy ones by priority. With `holds`, those
/// that slices cannot make pay are to be held by gates.
pub(super) fn repay(
    groups: &mut BTreeMap<VgpuId, Group>,
    plan: &Plan,
    intervals: &[Interval],
    repay_ns: u64,
    classes: bool,
    holds: Option<Holds>,
) {
    let repay_ns = repay_ns as f64;
    for group in groups.values_mut() {
        group.contends = false;
    }
    let mut groups = groups.iter_mut();
    let mut busy = Vec::new();
    for interval in intervals {
        let Some((_, group)) = groups.by_ref().find(|(id, _)| **id == interval.vgpu) else { break };
        group.boost = 1.0;
        if group.changed {
            continue;
        }
        // Who is held does not come to show all of its work.
        let held = group.is_held() || group.hold.is_some() && interval.runnable;
        if interval.busy || held {
            let (promised, own_weight) = (plan.promised(group), plan.weight(group));
            busy.push(Busy { interval, group, promised, own_weight });
        } else {
            group.unhurried = Unhurried::default();
            group.hold = None;
            let kept = (1.0 - interval.elapsed_ns as f64 / repay_ns).max(0.0);
            group.sated = false;
            group.owed_ns *= kept;
            group.correction = 1.0 + (group.correction - 1.0) * kept;
        }
    }
    if classes {
        boost(&mut busy);
    }
    let used: f64 = busy.iter().map(Busy::used).sum();
    if let [alone] = &mut busy[..]
        && alone.group.hold.take().is_some()
    {
        alone.group.forget();
    }
    if busy.len() < 2 || used <= 0.0 {
        return;
    }
    // Where a round of turns takes longer than that, one interval says nothing about who had how much.
    let round: Duration = busy.iter().filter_map(|one| one.group.slice).sum();
    let rounds_ns = ROUNDS * round.as_nanos() as f64;
    let repay_ns = repay_ns.max(rounds_ns);
    let preempts = busy.iter().any(|one| one.interval.preempted);
    let weight: f64 = busy.iter().map(Busy::weight).sum();
    // Those that may run, and have not come to the end of a turn.
    let waiting = |one: &Busy<'_>| !one.interval.preempted && !one.group.is_held();
    let all_waiting = busy.iter().filter(|one| waiting(one)).count();
    for (one, due) in dues(&busy, used, weight).into_iter().enumerate() {
        // Everybody else has had a turn, and was made to end it: so it was its turn, too.
        let passed_over = holds.is_some() && all_waiting == usize::from(waiting(&busy[one]));
        let Busy { interval, group, own_weight, .. } = &mut busy[one];
        if due <= 0.0 {
            continue;
        }
        let engine = interval.engine_ns as f64;
        group.contends = true;
        group.part_of_weight = due / used / *own_weight;
        if group.sated {
            if engine >= *own_weight * group.boost / weight * used / 2.0 {
                group.forget();
            }
            continue;
        }
        let unhurried = &mut group.unhurried;
        if interval.preempted || !preempts || group.hold.is_some() {
            *unhurried = Unhurried::default();
        } else {
            let elapsed = interval.elapsed_ns as f64;
            // Without a turn there was nothing to give up; and one that goes on may still be ended.
            unhurried.time += if engine > 0.0 || passed_over { elapsed } else { 0.0 };
            unhurried.used += engine;
            unhurried.due += due;
            let turns = unhurried.time >= rounds_ns.max(2.0 * elapsed);
            // It had turns enough, and wanted no more of them: nobody need wait for it.
            if turns && unhurried.used < unhurried.due / 2.0 {
                group.forget();
                group.sated = true;
                continue;
            }
        }
        let full = due / used * repay_ns;
        let owed = group.owed_ns + due - engine;
        if let Some(holds) = holds
            && group.hold.is_some_and(|hold| !hold.is_over(holds.now_ns))
        {
            group.owed_ns = owed.clamp(-MAX_DEBT_NS, MAX_DEBT_NS);
            group.correction = 1.0;
            continue;
        }
        group.sated = owed >= (MAX_CORRECTION - 1.0) * full;
        // No more is carried than corrections can act on, or it would be repaid long after.
        let bounds = ((1.0 / MAX_CORRECTION - 1.0) * full, (MAX_CORRECTION - 1.0) * full);
        let most = if holds.is_some() { -bounds.0.max(-group.most_ahead_ns()) } else { -bounds.0 };
        let ahead = owed < -most;
        let again = std::mem::replace(&mut group.was_ahead, ahead);
        let held = holds.filter(|holds| ahead && (holds.calm || again));
        group.hold = held.map(|holds| Hold::new(holds.now_ns));
        group.owed_ns = owed.clamp(-most, bounds.1);
        group.correction = 1.0 + group.owed_ns / full;
    }
    if let Some(holds) = holds {
        balance(&mut busy, repay_ns, holds.now_ns);
    }
}

/// Forgets what is owed to, or by, those who do not contend any more: what is left adds up to nothing.
///
/// Gates follow debts for as long as there are any. One to nobody would never be paid, and its debtor waited for ever.
fn balance(busy: &mut [Busy<'_>], repay_ns: f64, now_ns: u64) {
    let part = |one: &Busy<'_>| one.group.part_of_weight * one.own_weight;
    let counts = |one: &Busy<'_>| one.group.contends && !one.group.sated;
    let (owed, parts) = busy
        .iter()
        .filter(|one| counts(one))
        .fold((0.0, 0.0), |sum, one| (sum.0 + one.group.owed_ns, sum.1 + part(one)));
    if parts <= 0.0 {
        return;
    }
    for one in busy.iter_mut().filter(|one| counts(one)) {
        let part = part(one);
        one.group.owed_ns -= owed * part / parts;
        if one.group.hold.is_none_or(|hold| hold.is_over(now_ns)) {
            let correction = 1.0 + one.group.owed_ns / (part * repay_ns);
            one.group.correction = correction.clamp(1.0 / MAX_CORRECTION, MAX_CORRECTION);
        }
    }
}

/// Gives the time that idle vGPUs leave to the busy ones, each class its part.
fn boost(busy: &mut [Busy<'_>]) {
    let takers = || busy.iter().filter(|one| one.group.kind.takes_more());
    let mut classes = takers().map(|one| one.group.share.priority);
    let first = classes.next();
    // Within one class idle time goes by weights, as it does without being told to.
    if classes.all(|class| Some(class) == first) {
        return;
    }
    let left = (100.0 - busy.iter().map(|one| one.promised).sum::<f64>()).max(0.0);
    let parts: f64 = takers().map(|one| one.promised * one.group.parts()).sum();
    let weigh = |one: &Busy<'_>| one.promised * (1.0 + left * one.group.parts() / parts);
    let (had, has) = takers()
        .map(|one| (one.own_weight, weigh(one)))
        .fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    for one in busy.iter_mut().filter(|one| one.group.kind.takes_more()) {
        one.group.boost = weigh(one) * had / (has * one.own_weight);
    }
}

/// What of the time that the busy vGPUs used was due to each: by weight, and none more than it can have.
fn dues(busy: &[Busy<'_>], used: f64, mut weight: f64) -> Vec<f64> {
    let mut dues = vec![0.0; busy.len()];
    let mut rest = used;
    // Those that can have the least for their weight come first: what they do not get, the others do.
    let mut claims: Vec<_> = busy
        .iter()
        .enumerate()
        .filter(|(_, one)| one.most().is_finite())
        .map(|(at, one)| (at, one.most(), one.weight()))
        .collect();
    claims.sort_by(|a, b| (a.1 / a.2).total_cmp(&(b.1 / b.2)));
    for (at, most, own) in claims {
        dues[at] = (rest * own / weight).min(most);
        rest -= dues[at];
        weight -= own;
    }
    let free = busy.iter().enumerate().filter(|(_, one)| one.most().is_infinite());
    for (at, one) in free {
        dues[at] = rest * one.weight() / weight;
    }
    dues
}
