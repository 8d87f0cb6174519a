//! Caps: budgets in the silicon where it has them, or else gates, each moved when its meter says so.

use super::event::Action;
use super::group::Group;
use super::slices::Whom;
use super::{MIN_GATE_NS, Scheduler};
use crate::gpu::Usage;
use crate::ids::VgpuId;
use crate::sched::budget::{Budget, Meter};
use crate::sched::log::{Cause, Decision};
use crate::sched::policy::{Enforcement, Policy};
use crate::sched::share::Mode;

impl Scheduler {
    /// Tells the silicon, or the meters, about caps that changed.
    pub(super) fn recap(&mut self, whom: Whom, cause: Cause) -> Vec<Action> {
        let mut actions = Vec::new();
        // An equal part is another one for all when somebody comes or goes.
        let of_all = self.config.policy == Policy::EqualShare && cause != Cause::Share;
        match whom {
            Whom::One(id, _) if !of_all => self.recap_one(id, cause, &mut actions),
            Whom::Gone(_) if !of_all => {}
            Whom::All | Whom::One(..) | Whom::Gone(_) => {
                let ids: Vec<_> = self.groups.keys().copied().collect();
                for id in ids {
                    self.recap_one(id, cause, &mut actions);
                }
            }
        }
        actions
    }

    fn recap_one(&mut self, id: VgpuId, cause: Cause, actions: &mut Vec<Action>) {
        let count = self.groups.len() as f64;
        let Some(group) = self.groups.get_mut(&id) else { return };
        group.cap = cap(self.config.policy, group, count);
        let period = self.config.period;
        let budget = if group.cap < 1.0 { Budget::part(group.cap, period) } else { None };
        if budget == group.budget {
            return;
        }
        group.budget = budget;
        match (self.silicon.enforcement, budget) {
            (Enforcement::Budgets, _) => {
                self.log.push(group.record(self.now_ns, id, Decision::Budget(budget), cause));
                actions.push(Action::SetBudget(id, budget));
                return;
            }
            (Enforcement::Gates, Some(budget)) => {
                group.fresh |= group.meter.is_none();
                let meter = group.meter.get_or_insert(Meter::new(budget, self.now_ns));
                meter.set_budget(budget, self.now_ns);
            }
            (Enforcement::Gates, None) => group.meter = None,
        }
        actions.extend(self.gate(id, cause));
    }

    /// Opens or closes a gate as its meter and its hold say, and works out when that is to be looked at next.
    pub(super) fn gate(&mut self, id: VgpuId, cause: Cause) -> Option<Action> {
        let hold_look_ns = self.hold_look_ns();
        let group = self.groups.get_mut(&id)?;
        let look_ns = group.meter.map(|meter| {
            let wait = match (meter.is_open(), group.usage.runnable) {
                _ if group.fresh => 0,
                (true, true) => meter.left_ns(),
                (true, false) => meter.left_ns().max(meter.budget().period_ns),
                (false, _) => meter.opens_at_ns().saturating_sub(self.now_ns),
            };
            self.now_ns.saturating_add(wait.max(MIN_GATE_NS))
        });
        let hold_ns = group.hold.map(|_| self.now_ns.saturating_add(hold_look_ns));
        let look_ns = look_ns.into_iter().chain(hold_ns).min();
        if let Some(before) = std::mem::replace(&mut group.look_ns, look_ns) {
            self.looks.remove(&(before, id));
        }
        self.looks.extend(look_ns.map(|at| (at, id)));
        let open = !group.is_held() && group.meter.is_none_or(|meter| meter.is_open());
        if open == group.gate_open {
            return None;
        }
        group.gate_open = open;
        group.gates_closed += u64::from(!open);
        self.log.push(group.record(self.now_ns, id, Decision::Gate(open), cause));
        Some(Action::Gate(id, open))
    }

    /// Charges what was used, and moves the gates for which that, or the time, is a reason.
    pub(super) fn charge(&mut self, now_ns: u64, usages: &[(VgpuId, Usage)]) -> Vec<Action> {
        let mut actions = Vec::new();
        for (id, usage) in usages {
            let Some(group) = self.groups.get_mut(id) else { continue };
            if let Some(meter) = &mut group.meter {
                let fresh = std::mem::take(&mut group.fresh);
                let before_ns = if fresh { usage.engine_ns } else { group.usage.engine_ns };
                let used_ns = usage.engine_ns.saturating_sub(before_ns);
                meter.settle(now_ns, used_ns, usage.runnable || group.usage.runnable);
            }
            group.usage = *usage;
            if group.meter.is_some() {
                actions.extend(self.gate(*id, Cause::Cap));
            }
        }
        // Whoever is not in the silicon now may be so later.
        while let Some((at_ns, id)) = self.looks.first().copied()
            && at_ns <= now_ns
        {
            actions.extend(self.gate(id, Cause::Cap));
        }
        actions
    }
}

/// The part of the GPU that a vGPU may have at most.
fn cap(policy: Policy, group: &Group, count: f64) -> f64 {
    match (policy, group.share.core) {
        (Policy::EqualShare, _) => 1.0 / count,
        (Policy::FixedShare, _) => 1.0 / f64::from(group.max_instances),
        (Policy::Weighted, Some(core)) if group.share.mode == Mode::Hard => {
            f64::from(core.get()) / 100.0
        }
        _ => 1.0,
    }
}
