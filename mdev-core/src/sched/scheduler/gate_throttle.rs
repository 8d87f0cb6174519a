//! Throttling by gates on a GPU that does not preempt.
//!
//! A kernel that is longer than the slice extends the vGPU's time on the engine, and no shorter
//! slice prevents that. Longer slices of the other vGPUs compensate for a part of it. Beyond that,
//! the gate of a vGPU that is ahead stays closed until the other vGPUs have had the engine time due
//! to them: deficit round robin in measured engine time. The throttled vGPU then runs less often,
//! and the slices of the other vGPUs stay as they are.
//!
//! Where slices are not to change, the same makes each debtor skip turns.

use std::collections::BTreeSet;
use std::time::Duration;

use super::decisions::Decisions;
use super::gate_schedule::GateSchedule;
use super::group::{Group, Groups};
use super::weights::Plan;
use crate::ids::VgpuId;
use crate::sched::account::Interval;
use crate::sched::log::Cause;

/// Utilization below this part of the utilization before is a stall of the engine.
const STALLED: f64 = 0.8;

/// Engine utilization over the last interval.
#[derive(Clone, Copy, Debug, Default)]
struct Utilization {
    /// Part of the interval, 0 to 1.
    used: f64,
    /// Utilization dropped sharply, as during a reset by the driver.
    stalled: bool,
}

impl Utilization {
    /// Takes the next interval. Returns true if utilization is steady: no stall now or just before.
    fn update(&mut self, intervals: &[Interval]) -> bool {
        let elapsed_ns = intervals.first().map_or(0, |interval| interval.elapsed_ns) as f64;
        let used_ns: f64 = intervals.iter().map(|interval| interval.engine_ns as f64).sum();
        let used = if elapsed_ns > 0.0 { used_ns / elapsed_ns } else { 0.0 };
        let before = std::mem::replace(self, Self { used, stalled: used < self.used * STALLED });
        !before.stalled && !self.stalled
    }
}

/// Throttled vGPUs of a parent.
#[derive(Clone, Debug, Default)]
pub(super) struct GateThrottle {
    throttled: BTreeSet<VgpuId>,
    utilization: Utilization,
}

impl GateThrottle {
    /// Takes the next interval. Returns true if engine utilization is steady.
    pub(super) fn observe(&mut self, intervals: &[Interval]) -> bool {
        self.utilization.update(intervals)
    }

    /// Follows a settlement of debts: opens the gates of vGPUs that lost their throttle.
    pub(super) fn follow_settlement(
        &mut self,
        groups: &mut Groups,
        gates: &mut GateSchedule,
        decisions: &mut Decisions<'_>,
    ) {
        for group in groups.values_mut() {
            group.usage.settle();
        }
        let throttled = groups.iter().filter(|(_, group)| group.debt.has_throttle());
        let throttled = throttled.map(|(id, _)| *id).collect();
        let before = std::mem::replace(&mut self.throttled, throttled);
        for id in before.difference(&self.throttled) {
            gates.update(*id, Cause::Ahead, groups, decisions);
        }
    }

    /// Ends all throttles.
    pub(super) fn release_all(
        &mut self,
        groups: &mut Groups,
        gates: &mut GateSchedule,
        decisions: &mut Decisions<'_>,
    ) {
        for group in groups.values_mut() {
            group.debt.end_throttle();
        }
        self.follow_settlement(groups, gates, decisions);
    }

    /// Closes the gates of throttled vGPUs that are ahead, and opens those of the others.
    pub(super) fn update_gates(
        &self,
        plan: &Plan,
        groups: &mut Groups,
        gates: &mut GateSchedule,
        decisions: &mut Decisions<'_>,
    ) {
        if self.throttled.is_empty() {
            return;
        }
        let contenders = || groups.values().filter(|group| group.debt.contends());
        let used_ns: f64 = contenders().map(|group| group.usage.unsettled_ns()).sum();
        let runnable = contenders().filter(|group| group.could_run()).count();
        let mut any_free =
            contenders().any(|group| group.could_run() && !group.debt.has_throttle());
        let mut least_ahead: Option<(f64, VgpuId)> = None;
        for id in &self.throttled {
            let Some(group) = groups.get_mut(id) else { continue };
            let lead_ns = group.lead_ns(plan.weight(&group.share), used_ns);
            let could_run = group.could_run();
            let others_runnable = runnable > usize::from(could_run);
            let closed = others_runnable && lead_ns > closing_lead_ns(group);
            let repaid_ns = lead_ns / group.debt.part(plan.weight(&group.share));
            let opens_after = Duration::try_from_secs_f64(repaid_ns / 1e9).unwrap_or_default();
            group.debt.set_gated(closed, opens_after, decisions.now_ns());
            any_free |= could_run && !closed;
            if could_run && least_ahead.is_none_or(|(least_ns, _)| lead_ns < least_ns) {
                least_ahead = Some((lead_ns, *id));
            }
        }
        // At least one vGPU that could run has an open gate, so that the engine never idles.
        if let Some((_, id)) = least_ahead.filter(|_| !any_free)
            && let Some(group) = groups.get_mut(&id)
        {
            group.debt.set_gated(false, Duration::ZERO, decisions.now_ns());
        }
        for id in &self.throttled {
            gates.update(*id, Cause::Ahead, groups, decisions);
        }
    }

    /// Removes a vGPU that stopped.
    pub(super) fn remove(&mut self, id: VgpuId) {
        self.throttled.remove(&id);
    }
}

/// Returns the lead above which the gate is closed.
///
/// Closing a gate has a cost, so it requires the lead of a slice. Any lead keeps a gate closed.
fn closing_lead_ns(group: &Group) -> f64 {
    if group.debt.is_gated() {
        0.0
    } else {
        let slice_ns = || group.share.slice().unwrap_or_default().as_nanos() as f64;
        group.debt.skips_from_ns().unwrap_or_else(slice_ns)
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    /// Intervals of 100 ms in which two vGPUs together used `ms`.
    fn intervals(ms: u64) -> [Interval; 2] {
        [1, 2].map(|n| Interval {
            vgpu: VgpuId(Uuid::from_u128(n)),
            elapsed_ns: 100_000_000,
            engine_ns: ms * 500_000,
            busy: true,
            with_work_ns: 100_000_000,
            runnable: true,
            begins: false,
            preempted: true,
            turns: 1,
        })
    }

    #[test]
    fn utilization_around_a_stall_is_not_steady() {
        let mut utilization = Utilization::default();
        let steady = [99, 100, 85, 0, 99, 100].map(|ms| utilization.update(&intervals(ms)));
        assert_eq!(steady, [true, true, true, false, false, true]);
        // A lasting drop of the load counts as a stall once.
        let steady = [40, 40, 40].map(|ms| utilization.update(&intervals(ms)));
        assert_eq!(steady, [false, false, true]);
    }
}
