//! Caps of all vGPUs: budgets in a GPU that has them, or else meters that move gates.

use super::change::Change;
use super::decisions::Decisions;
use super::gate_schedule::GateSchedule;
use super::group::Groups;
use crate::gpu;
use crate::ids::VgpuId;
use crate::sched::log::Cause;
use crate::sched::policy::{Config, Enforcement, Policy};

/// Caps of the vGPUs in `groups` under a configuration.
#[derive(Debug)]
pub(super) struct Caps<'a> {
    pub(super) config: Config,
    pub(super) enforcement: Enforcement,
    pub(super) groups: &'a mut Groups,
    pub(super) gates: &'a mut GateSchedule,
}

impl Caps<'_> {
    /// Applies the caps that a change affects to the GPU or to the meters.
    pub(super) fn update(&mut self, change: Change, cause: Cause, decisions: &mut Decisions<'_>) {
        // Equal shares depend on the number of vGPUs.
        let affects_all = self.config.policy == Policy::EqualShare && cause != Cause::Share;
        match change {
            Change::One { id, .. } if !affects_all => self.update_one(id, cause, decisions),
            Change::Removed { .. } if !affects_all => {}
            Change::All | Change::One { .. } | Change::Removed { .. } => {
                let ids: Vec<_> = self.groups.keys().copied().collect();
                for id in ids {
                    self.update_one(id, cause, decisions);
                }
            }
        }
    }

    fn update_one(&mut self, id: VgpuId, cause: Cause, decisions: &mut Decisions<'_>) {
        let count = self.groups.len() as f64;
        let Some(group) = self.groups.get_mut(&id) else { return };
        let part = group.share.max_part(self.config.policy, count);
        if !group.cap.set(part, self.config.period) {
            return;
        }
        match self.enforcement {
            Enforcement::Budgets => decisions.budget(id, group, cause),
            Enforcement::Gates => {
                group.cap.apply_to_meter(decisions.now_ns());
                self.gates.update(id, cause, self.groups, decisions);
            }
        }
    }
}

/// Charges engine time to the meters, and moves the gates that are due.
pub(super) fn charge(
    now_ns: u64,
    usages: &[(VgpuId, gpu::Usage)],
    groups: &mut Groups,
    gates: &mut GateSchedule,
    decisions: &mut Decisions<'_>,
) {
    for (id, counters) in usages {
        let Some(group) = groups.get_mut(id) else { continue };
        let used_ns = group.usage.engine_ns_until(counters);
        let had_work = counters.runnable || group.usage.is_runnable();
        let metered = group.cap.charge(now_ns, used_ns, had_work);
        group.usage.record(counters);
        if metered {
            gates.update(*id, Cause::Cap, groups, decisions);
        }
    }
    // A vGPU without counters in this report may still have a check that is due.
    gates.check_due(now_ns, groups, decisions);
}
