//! Time slices of all vGPUs, and the choice of slices that change.
//!
//! Only the proportions of slices matter, and to a lesser degree their mean. When a vGPU starts,
//! stops or changes, the other vGPUs keep their slices until the mean is too far from the
//! configured one, or until the proportions of classes change.

use super::change::Change;
use super::decisions::Decisions;
use super::demand::Evidence;
use super::group::{Group, Groups};
use super::pace::Pace;
use super::share::Share;
use super::weight_class::WeightClass;
use super::weights::{Plan, Scales, Weights};
use crate::ids::VgpuId;
use crate::sched::account::{Interval, Ledger};
use crate::sched::log::Cause;
use crate::sched::policy::{Config, Policy};

/// Part by which a scale or a corrected slice may be off without an action.
const TOLERANCE: f64 = 0.01;
/// The same for a corrected slice whose change costs others their turns.
const COSTLY_TOLERANCE: f64 = 0.05;
/// Part by which the mean of all slices may be off before all slices change.
const MEAN_TOLERANCE: f64 = 0.125;
/// A change of more than this part of the GPU affects the slices of all vGPUs, and may drop their
/// debts.
const NOTABLE: f64 = 1.0 / 64.0;

/// vGPUs whose slices follow a change.
#[derive(Debug)]
pub(super) enum Affected {
    All,
    Some(Vec<VgpuId>),
}

/// Weights of all vGPUs, and the scales of their slices.
#[derive(Clone, Debug)]
pub(super) struct Slices {
    weights: Weights,
    plan: Plan,
    scales: Scales,
    pace: Pace,
    evidence: Evidence,
    /// Slices changed since the last settlement of debts.
    changed: bool,
}

impl Default for Slices {
    fn default() -> Self {
        Self {
            weights: Weights::default(),
            plan: Plan::default(),
            scales: [1.0; WeightClass::COUNT],
            pace: Pace::default(),
            evidence: Evidence::default(),
            changed: false,
        }
    }
}

impl Slices {
    /// Returns the weights of the last [`Self::replan`].
    pub(super) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the pace of the runlist.
    pub(super) fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Returns the requested percentage of the GPU. Overcommitted, the sum exceeds 100.
    pub(super) fn requested(&self) -> u32 {
        self.weights.requested()
    }

    pub(super) fn insert(&mut self, id: VgpuId, share: &Share) {
        self.weights.insert(id, share);
    }

    pub(super) fn remove(&mut self, id: VgpuId, share: &Share) {
        self.weights.remove(id, share);
    }

    pub(super) fn change(&mut self, id: VgpuId, before: &Share, after: &Share) {
        self.weights.change(id, before, after);
    }

    /// Applies another policy to all vGPUs.
    pub(super) fn apply_policy(&mut self, policy: Policy, groups: &mut Groups) {
        self.weights = Weights::default();
        for (id, group) in groups {
            group.share.apply_policy(policy);
            self.weights.insert(*id, &group.share);
        }
    }

    /// Returns true if slices changed since the last call.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// Works out weights and scales after a change. Drops debts that the change makes invalid.
    /// Returns the vGPUs whose slices follow.
    pub(super) fn replan(
        &mut self,
        config: &Config,
        change: Change,
        cause: Cause,
        groups: &mut Groups,
    ) -> Affected {
        self.plan = self.weights.plan(config.policy);
        let part = |id| groups.get(&id).map_or(0.0, |group: &Group| self.plan.part(&group.share));
        let (before, after) = match change {
            Change::All => (1.0, 0.0),
            Change::One { id, part_before } => (part_before, part(id)),
            Change::Removed { part_before } => (part_before, 0.0),
        };
        let notable = before.max(after) > NOTABLE;
        if notable && matches!(cause, Cause::Share | Cause::Policy | Cause::Stale) {
            // The debts were due under the shares before the change.
            groups.values_mut().for_each(Group::forget_debt);
        }
        let rescaled = self.rescale(config, change);
        let affected = if notable { Affected::All } else { rescaled };
        self.changed |= !matches!(&affected, Affected::Some(ids) if ids.is_empty());
        affected
    }

    /// Sets the slices of affected vGPUs, and of the vGPU that the change is about.
    pub(super) fn apply(
        &self,
        affected: Affected,
        change: Change,
        cause: Cause,
        groups: &mut Groups,
        decisions: &mut Decisions<'_>,
    ) {
        let mut apply = |id: VgpuId, group: &mut Group| {
            group.share.reset_boost();
            reslice(id, group, self.scale(group), self.pace, 0.0, cause, decisions);
        };
        match affected {
            Affected::All => groups.iter_mut().for_each(|(id, group)| apply(*id, group)),
            Affected::Some(ids) => {
                let one = match change {
                    Change::One { id, .. } => Some(id),
                    Change::All | Change::Removed { .. } => None,
                };
                for id in ids.into_iter().chain(one) {
                    if let Some(group) = groups.get_mut(&id) {
                        apply(id, group);
                    }
                }
            }
        }
    }

    /// Sets the slices that repay the debts.
    ///
    /// With `keep_proportions`, all slices shrink together where the longest would exceed its
    /// bound: where gates make debtors pay, several vGPUs may be owed more than the longest slice
    /// can give. There, a change of a slice is costly, too.
    pub(super) fn repay(
        &self,
        keep_proportions: bool,
        cause: Cause,
        groups: &mut Groups,
        decisions: &mut Decisions<'_>,
    ) {
        let excess = if keep_proportions { self.excess(groups) } else { 1.0 };
        let tolerance = if keep_proportions { COSTLY_TOLERANCE } else { TOLERANCE };
        for (id, group) in groups {
            let scale = self.scale(group) / excess;
            reslice(*id, group, scale, self.pace, tolerance, cause, decisions);
        }
    }

    /// Notes the demand that the last interval showed. Returns true if that is another one for any
    /// vGPU. `crowd` is [`Pace::is_crowd`].
    pub(super) fn note_demand(
        &mut self,
        groups: &mut Groups,
        intervals: &[Interval],
        ledger: &Ledger,
        crowd: bool,
    ) -> bool {
        self.evidence.classify(groups, intervals, &self.plan, ledger, crowd)
    }

    /// Follows the demand of the vGPUs with the lengths of the slices.
    ///
    /// With `costly_switches`, vGPUs that get the engine very often do not get it at once, and the
    /// slices of many change seldom.
    pub(super) fn follow_demand(
        &mut self,
        config: &Config,
        groups: &Groups,
        intervals: &[Interval],
        costly_switches: bool,
    ) {
        if costly_switches {
            self.pace.count_turns(groups, intervals);
        }
        let scales = &self.scales;
        self.pace.update(config, groups, costly_switches, |group| {
            group.share.base_slice(scales[group.share.class().index()])
        });
    }

    /// Adapts the scales to the weights. Returns the vGPUs with another scale.
    fn rescale(&mut self, config: &Config, change: Change) -> Affected {
        let wanted = self.weights.scales(&self.plan, config);
        let near = |number: f64, to: f64, tolerance: f64| (number / to - 1.0).abs() <= tolerance;
        // The largest class decides how far the mean has moved.
        let largest =
            WeightClass::ALL.into_iter().max_by_key(|class| self.weights.members(*class).len());
        let largest = largest.map_or(0, WeightClass::index);
        let mean = wanted[largest] / self.scales[largest];
        let mut scales = self.scales;
        let mut moved = Vec::new();
        for class in WeightClass::ALL {
            let (scale, wanted) = (&mut scales[class.index()], wanted[class.index()] / mean);
            if !near(*scale, wanted, TOLERANCE) {
                *scale = wanted;
                moved.extend(self.weights.members(class));
            }
        }
        let violates = self.weights.violates_bounds(&scales) && !near(mean, 1.0, TOLERANCE);
        if change == Change::All || !near(mean, 1.0, MEAN_TOLERANCE) || violates {
            self.scales = wanted;
            return Affected::All;
        }
        self.scales = scales;
        Affected::Some(moved)
    }

    /// Returns the factor by which the longest corrected slice exceeds its bound, at least 1.
    fn excess(&self, groups: &Groups) -> f64 {
        let excess = |group: &Group| {
            let scale = self.scale(group) * self.pace.length(group.demand).factor;
            group.share.slice_excess(scale, group.debt.correction())
        };
        groups.values().filter(|group| group.debt.contends()).map(excess).fold(1.0, f64::max)
    }

    fn scale(&self, group: &Group) -> f64 {
        self.scales[group.share.class().index()]
    }
}

/// Sets a vGPU's slice where the slice differs from the one before by more than `tolerance`.
fn reslice(
    id: VgpuId,
    group: &mut Group,
    scale: f64,
    pace: Pace,
    tolerance: f64,
    cause: Cause,
    decisions: &mut Decisions<'_>,
) {
    let length = pace.length(group.demand);
    let (scale, correction) = (scale * length.factor, group.debt.correction());
    let bounds = length.shortest..=length.longest;
    if let Some(slice) = group.share.reslice(scale, correction, bounds, tolerance) {
        decisions.slice(id, group, slice, cause);
    }
}
