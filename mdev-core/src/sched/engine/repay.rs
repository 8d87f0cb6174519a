//! What busy vGPUs owe each other, and how it is made good.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Group;
use crate::ids::VgpuId;
use crate::sched::account::Interval;

/// Deviations are made good over so many rounds of the runlist at least.
const ROUNDS: f64 = 4.0;
/// How far a slice is scaled up or down, at most, to repay.
const MAX_CORRECTION: f64 = 8.0;
/// How much more than it did, a vGPU that did not use its slices might.
const USABLE: f64 = 1.1;

/// A vGPU that had work nearly all of the time.
struct Busy<'a> {
    interval: &'a Interval,
    group: &'a mut Group,
}

impl Busy<'_> {
    fn used(&self) -> f64 {
        self.interval.engine_ns as f64
    }

    fn weight(&self) -> f64 {
        self.group.weight * self.group.boost
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
/// Intervals are in the order of ids. With `classes`, idle time goes to the busy ones by priority.
pub(super) fn repay(
    groups: &mut BTreeMap<VgpuId, Group>,
    intervals: &[Interval],
    repay_ns: u64,
    classes: bool,
) {
    let repay_ns = repay_ns as f64;
    let mut groups = groups.iter_mut();
    let mut busy = Vec::new();
    for interval in intervals {
        let Some((_, group)) = groups.by_ref().find(|(id, _)| **id == interval.vgpu) else { break };
        group.boost = 1.0;
        if interval.busy {
            busy.push(Busy { interval, group });
        } else {
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
    if busy.len() < 2 || used <= 0.0 {
        return;
    }
    // Where a round of turns takes longer than that, one interval says nothing about who had how much.
    let round: Duration = busy.iter().filter_map(|one| one.group.slice).sum();
    let repay_ns = repay_ns.max(ROUNDS * round.as_nanos() as f64);
    let weight: f64 = busy.iter().map(Busy::weight).sum();
    for (one, due) in dues(&busy, used, weight).into_iter().enumerate() {
        let Busy { interval, group } = &mut busy[one];
        if due <= 0.0 {
            continue;
        }
        let engine = interval.engine_ns as f64;
        if group.sated {
            if engine >= group.weight * group.boost / weight * used / 2.0 {
                group.sated = false;
                group.owed_ns = 0.0;
                group.correction = 1.0;
            }
            continue;
        }
        let full = due / used * repay_ns;
        let owed = group.owed_ns + due - engine;
        group.sated = owed >= (MAX_CORRECTION - 1.0) * full;
        // No more is carried than corrections can act on, or it would be repaid long after.
        let bounds = ((1.0 / MAX_CORRECTION - 1.0) * full, (MAX_CORRECTION - 1.0) * full);
        group.owed_ns = owed.clamp(bounds.0, bounds.1);
        group.correction = 1.0 + group.owed_ns / full;
    }
}

/// Gives the time that idle vGPUs leave to the busy ones, each class its part.
fn boost(busy: &mut [Busy<'_>]) {
    let takers = || busy.iter().map(|one| &*one.group).filter(|group| group.takes_more());
    let mut classes = takers().map(|group| group.share.priority);
    let first = classes.next();
    // Within one class idle time goes by weights, as it does without being told to.
    if classes.all(|class| Some(class) == first) {
        return;
    }
    let extra = Extra::of(busy.iter().map(|one| &*one.group));
    let (had, has) = takers()
        .map(|group| (group.weight, extra.weight(group)))
        .fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    for Busy { group, .. } in busy.iter_mut().filter(|one| one.group.takes_more()) {
        group.boost = extra.weight(group) * had / (has * group.weight);
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

/// How time that none of some vGPUs was promised is divided among them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extra {
    /// Hundredths that none was promised.
    left: f64,
    /// Sum of the parts of those that may have more.
    parts: f64,
}

impl Extra {
    pub(super) fn of<'a>(groups: impl Iterator<Item = &'a Group>) -> Self {
        let mut extra = Self { left: 100.0, parts: 0.0 };
        for group in groups {
            extra.left -= group.promised;
            if group.takes_more() {
                extra.parts += group.promised * group.parts();
            }
        }
        extra.left = extra.left.max(0.0);
        extra
    }

    pub(super) fn weight(&self, group: &Group) -> f64 {
        if group.takes_more() {
            group.promised * (1.0 + self.left * group.parts() / self.parts)
        } else {
            group.promised
        }
    }
}
