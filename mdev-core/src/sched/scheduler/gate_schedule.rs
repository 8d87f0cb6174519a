//! Gates of all vGPUs, and the times at which each is checked.

use std::collections::BTreeSet;

use super::decisions::Decisions;
use super::group::Groups;
use crate::ids::VgpuId;
use crate::sched::log::Cause;

/// Least time between two checks of a gate.
const MIN_CHECK_NS: u64 = 500_000;
/// Interval of checks for a throttled vGPU, at least; also for each vGPU of the parent.
const THROTTLE_CHECK_NS: u64 = 5_000_000;
const THROTTLE_CHECK_EACH_NS: u64 = 100_000;

/// Checks of gates in the order of time, one for each gate that may have to move.
#[derive(Clone, Debug, Default)]
pub(super) struct GateSchedule {
    checks: BTreeSet<(u64, VgpuId)>,
}

impl GateSchedule {
    /// Returns the time of the next check.
    pub(super) fn next_check_ns(&self) -> Option<u64> {
        self.checks.first().map(|(at_ns, _)| *at_ns)
    }

    /// Removes the check of a vGPU that stopped.
    pub(super) fn remove(&mut self, id: VgpuId, check_at_ns: Option<u64>) {
        if let Some(at_ns) = check_at_ns {
            self.checks.remove(&(at_ns, id));
        }
    }

    /// Opens or closes a gate as cap and throttle require, and schedules the next check.
    pub(super) fn update(
        &mut self,
        id: VgpuId,
        cause: Cause,
        groups: &mut Groups,
        decisions: &mut Decisions<'_>,
    ) {
        let now_ns = decisions.now_ns();
        let throttle_check_ns =
            THROTTLE_CHECK_NS.max(THROTTLE_CHECK_EACH_NS.saturating_mul(groups.len() as u64));
        let Some(group) = groups.get_mut(&id) else { return };
        let cap_check_ns = group
            .cap
            .check_after_ns(now_ns, group.usage.is_runnable())
            .map(|after_ns| after_ns.max(MIN_CHECK_NS));
        let throttle_check_ns = group.debt.check_after_ns(throttle_check_ns);
        let after_ns = cap_check_ns.into_iter().chain(throttle_check_ns).min();
        let check_at_ns = after_ns.map(|after_ns| now_ns.saturating_add(after_ns));
        if let Some(before_ns) = group.gate.schedule_check(check_at_ns) {
            self.checks.remove(&(before_ns, id));
        }
        self.checks.extend(check_at_ns.map(|at_ns| (at_ns, id)));
        if group.gate.set(group.wants_open_gate()) {
            decisions.gate(id, group, cause);
        }
    }

    /// Updates all gates with a check at or before `now_ns`.
    pub(super) fn check_due(
        &mut self,
        now_ns: u64,
        groups: &mut Groups,
        decisions: &mut Decisions<'_>,
    ) {
        while let Some((at_ns, id)) = self.checks.first().copied()
            && at_ns <= now_ns
        {
            self.update(id, Cause::Cap, groups, decisions);
        }
    }
}
