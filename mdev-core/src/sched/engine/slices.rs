//! Slices: who is told of another one when something has changed.
//!
//! Only proportions of slices matter, and their mean a little. So when a vGPU comes, goes or changes, the others keep
//! theirs, until the mean is too far from the one configured, or proportions between kinds have moved.

use super::event::Action;
use super::group::Group;
use super::weights::Kind;
use super::{Scheduler, TOLERANCE};
use crate::ids::VgpuId;
use crate::sched::log::{Cause, Decision, Log};

/// The mean of all slices may be off by this part before all are told of others.
const MEAN_TOLERANCE: f64 = 0.125;
/// A change that concerns more than this part of the GPU concerns everybody: what was owed before it is dropped.
const NOTABLE: f64 = 1.0 / 64.0;

/// Whom a change was about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Whom {
    /// Everybody.
    All,
    /// One that has come, or asks for something else; what part of the GPU it had.
    One(VgpuId, f64),
    /// One that has gone; what part of the GPU it had.
    Gone(f64),
}

/// Whose slice is another one after a change.
#[derive(Debug)]
enum Concerned {
    All,
    Some(Vec<VgpuId>),
}

impl Scheduler {
    /// Works out what follows from a vGPU, a share or a knob that has changed.
    pub(super) fn replan(&mut self, whom: Whom, cause: Cause) -> Vec<Action> {
        self.plan = self.weights.plan(self.config.policy);
        let (one, had) = match whom {
            Whom::All => (None, 1.0),
            Whom::One(id, had) => (Some(id), had),
            Whom::Gone(had) => (None, had),
        };
        let has =
            one.and_then(|id| self.groups.get(&id)).map_or(0.0, |group| self.plan.part(group));
        let notable = had.max(has) > NOTABLE;
        if notable && matches!(cause, Cause::Share | Cause::Policy | Cause::Stale) {
            // What was owed was owed at the old shares.
            self.groups.values_mut().for_each(Group::forget);
        }
        let mut concerned = self.rescale(whom);
        if notable {
            concerned = Concerned::All;
        }
        self.changed |= !matches!(&concerned, Concerned::Some(ids) if ids.is_empty());
        let mut actions = self.recap(whom, cause);
        let at = (self.now_ns, cause);
        let mut tell = |id: VgpuId, group: &mut Group| {
            group.boost = 1.0;
            let scale = self.scales[group.kind.index()];
            actions.extend(reslice(id, group, scale, 0.0, at, &mut self.log));
        };
        match concerned {
            Concerned::All => self.groups.iter_mut().for_each(|(id, group)| tell(*id, group)),
            Concerned::Some(ids) => {
                for id in ids.into_iter().chain(one) {
                    if let Some(group) = self.groups.get_mut(&id) {
                        tell(id, group);
                    }
                }
            }
        }
        actions
    }

    /// Follows the weights with the scales of slices; who has another slice for that.
    fn rescale(&mut self, whom: Whom) -> Concerned {
        let wanted = self.weights.scales(&self.plan, &self.config);
        let near = |number: f64, to: f64, tolerance: f64| (number / to - 1.0).abs() <= tolerance;
        // What most of them would have to be scaled by is the mean's doing.
        let most = Kind::ALL.into_iter().max_by_key(|kind| self.weights.members(*kind).len());
        let most = most.map_or(0, Kind::index);
        let mean = wanted[most] / self.scales[most];
        let mut scales = self.scales;
        let mut moved = Vec::new();
        for kind in Kind::ALL {
            let (scale, wanted) = (&mut scales[kind.index()], wanted[kind.index()] / mean);
            if !near(*scale, wanted, TOLERANCE) {
                *scale = wanted;
                moved.extend(self.weights.members(kind));
            }
        }
        let breaks = self.weights.breaks(&scales) && !near(mean, 1.0, TOLERANCE);
        if whom == Whom::All || !near(mean, 1.0, MEAN_TOLERANCE) || breaks {
            self.scales = wanted;
            return Concerned::All;
        }
        self.scales = scales;
        Concerned::Some(moved)
    }

    /// By what part the longest slice wanted is over its bound: 1 where none is.
    fn over(&self) -> f64 {
        let over = |group: &Group| group.over(self.scales[group.kind.index()]);
        self.groups.values().filter(|group| group.contends).map(over).fold(1.0, f64::max)
    }

    /// Slices after what is owed has been worked out.
    pub(super) fn repay_by_slices(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        // Where gates make debtors pay, several may be owed more than the longest slice can give them. What is between
        // those is no debt: their slices stay in proportion.
        let over = if self.silicon.preempts { 1.0 } else { self.over() };
        for (id, group) in &mut self.groups {
            let scale = self.scales[group.kind.index()] / over;
            let at = (self.now_ns, Cause::Repay);
            actions.extend(reslice(*id, group, scale, TOLERANCE, at, &mut self.log));
        }
        actions
    }
}

/// Tells of a vGPU's slice, where it differs from the one before by more than `tolerance`.
fn reslice(
    id: VgpuId,
    group: &mut Group,
    scale: f64,
    tolerance: f64,
    (now_ns, cause): (u64, Cause),
    log: &mut Log,
) -> Option<Action> {
    let slice = group.wanted(scale);
    let differs = |had: std::time::Duration| {
        slice.abs_diff(had).as_secs_f64() > had.as_secs_f64() * tolerance
    };
    if !group.slice.is_none_or(differs) {
        return None;
    }
    group.slice = Some(slice);
    log.push(group.record(now_ns, id, Decision::Slice(slice), cause));
    Some(Action::SetTimeslice(id, slice))
}
