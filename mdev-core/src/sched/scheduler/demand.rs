//! Demand of the vGPUs for the engine, as the last interval showed it.

use super::group::{Group, Groups};
use super::weights::Plan;
use crate::sched::account::{Interval, Ledger};

/// Part of its share up to which a vGPU counts as below its share. Usage is known an interval late.
const BELOW: f64 = 0.9;
/// Part of its share from which on a vGPU that competed may compete still.
const NEAR: f64 = 0.5;
/// Part of the engine's time from which on a vGPU competes although no other has work: others that
/// begin are to wait for it only briefly.
const MUCH: f64 = 0.2;

/// Demand of a vGPU for the engine over the last interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Demand {
    /// No work.
    #[default]
    Idle,
    /// Some work, and less engine time than its share.
    Brief,
    /// Work all the time, or more engine time than its share.
    Competing,
}

/// What tells the demand of the vGPUs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Evidence {
    /// The GPU counts preemptions: it counted one.
    counts_preemptions: bool,
    /// One vGPU at most had work in the last interval.
    one_worked: bool,
}

impl Evidence {
    /// Notes the demand that the last interval showed. `intervals` are in the order of ids. `crowd`
    /// is [`Pace::is_crowd`](super::pace::Pace::is_crowd). Returns true if that is another one for
    /// any vGPU.
    pub(super) fn classify(
        &mut self,
        groups: &mut Groups,
        intervals: &[Interval],
        plan: &Plan,
        ledger: &Ledger,
        crowd: bool,
    ) -> bool {
        self.counts_preemptions |= intervals.iter().any(|interval| interval.preempted);
        // What one of many vGPUs waits for when its work begins takes a round.
        let begins = |interval: &Interval| crowd && interval.begins;
        let works =
            |interval: &Interval| interval.engine_ns > 0 || interval.busy || begins(interval);
        let (mut active, mut working, mut waiting, mut competed) = (0.0, 0, 0, 0);
        each(groups, intervals, |group, interval| {
            competed += usize::from(group.demand == Demand::Competing);
            working += usize::from(works(interval) || interval.runnable);
            waiting += usize::from(waits(group, interval));
            active += if works(interval) { plan.weight(&group.share) } else { 0.0 };
        });
        let one_works = working <= 1;
        // What is charged follows what was known of the others before.
        let alone = std::mem::replace(&mut self.one_worked, one_works) && one_works;
        let mut changed = false;
        each(groups, intervals, |group, interval| {
            let share = plan.weight(&group.share) / active;
            let part = interval.engine_ns as f64 / interval.elapsed_ns.max(1) as f64;
            let measured = ledger.measured(interval.vgpu).unwrap_or_default().share();
            let used = part.min(measured);
            let others_wait = waiting > usize::from(waits(group, interval));
            let competes = if interval.busy {
                // A vGPU that always waits for its turn and then leaves most of its slice is brief.
                interval.preempted || interval.engine_ns == 0 || !self.counts_preemptions
            } else {
                begins(interval) || is_gated(group)
            };
            let demand = if !works(interval) {
                Demand::Idle
            } else if competes || others_wait && used >= share * BELOW || alone && used >= MUCH {
                Demand::Competing
            } else if !others_wait && !alone && competed == 1 {
                // How much of the time it used is not known: a vGPU without work keeps the engine
                // while no other one waits for it.
                group.demand.max(Demand::Brief)
            } else {
                Demand::Brief
            };
            changed |= group.note_demand(demand, used >= share * NEAR, interval.elapsed_ns);
        });
        changed
    }
}

/// Returns whether a gate closes now and then, which hides the demand.
fn is_gated(group: &Group) -> bool {
    group.debt.has_throttle() || !group.cap.is_open()
}

/// Returns whether the vGPU had work nearly all of the interval, or may have had.
fn waits(group: &Group, interval: &Interval) -> bool {
    interval.busy || is_gated(group)
}

/// Calls `visit` with each vGPU that has an interval.
fn each(groups: &mut Groups, intervals: &[Interval], mut visit: impl FnMut(&mut Group, &Interval)) {
    let mut groups = groups.iter_mut();
    for interval in intervals {
        let Some((_, group)) = groups.by_ref().find(|(id, _)| **id == interval.vgpu) else { break };
        visit(group, interval);
    }
}
