//! Gates for those that ran ahead, on silicon that does not preempt.
//!
//! A kernel that is longer than its slice makes the turn longer, and no slice of its own shortens that. The others' slices
//! can make up for some of it. Beyond that, whoever is ahead waits at its gate until the others have had what was due to
//! them meanwhile: deficit round robin in measured engine time. Its kernels take as long as they do, so its turns come
//! less often; the others' turns stay as they are.

use std::collections::BTreeSet;

use super::Scheduler;
use super::event::Action;
use super::group::Group;
use super::weights::Plan;
use crate::ids::VgpuId;
use crate::sched::account::Interval;
use crate::sched::log::Cause;
use crate::sched::policy::MAX_SLICE;

/// How often the counters are read while somebody is held, and for how many vGPUs that is often enough.
const LOOK_NS: u64 = 5_000_000;
const LOOK_EACH_NS: u64 = 100_000;
/// The engine has stood still where it was used for less than this part of the time before.
const STOOD: f64 = 0.8;
/// Who was not ahead for so long needs no gate any more: slices will do.
const HOLD_NS: u64 = 1_000_000_000;

/// How those are to be held that slices cannot make pay.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holds {
    pub(super) now_ns: u64,
    /// The engine has not stood still: who came off well by that is to be held only if that goes on.
    pub(super) calm: bool,
}

/// How much of its time the engine was used, reading by reading.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    used: f64,
    /// It was used much less than before, as while the driver resets it.
    stood: bool,
}

impl Pace {
    /// Takes in what was used between two readings; whether turns were as long as they were meant to be.
    pub(super) fn read(&mut self, intervals: &[Interval]) -> bool {
        let elapsed = intervals.first().map_or(0, |one| one.elapsed_ns) as f64;
        let used: f64 = intervals.iter().map(|one| one.engine_ns as f64).sum();
        let used = if elapsed > 0.0 { used / elapsed } else { 0.0 };
        let before = std::mem::replace(self, Self { used, stood: used < self.used * STOOD });
        !before.stood && !self.stood
    }
}

/// Of a vGPU that was ahead by more than shorter slices could repay.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hold {
    /// Its gate is closed: it is ahead.
    pub(super) closed: bool,
    /// When it last was.
    closed_ns: u64,
}

impl Hold {
    pub(super) fn new(now_ns: u64) -> Self {
        Self { closed: false, closed_ns: now_ns }
    }

    pub(super) fn is_over(self, now_ns: u64) -> bool {
        !self.closed && now_ns.saturating_sub(self.closed_ns) > HOLD_NS
    }
}

impl Group {
    /// How far ahead it may be before slices are not trusted to repay it: more than any turn that keeps to its slice.
    pub(super) fn most_ahead_ns(&self) -> f64 {
        self.slice.map_or(MAX_SLICE, |slice| MAX_SLICE.max(slice * 2)).as_nanos() as f64
    }

    /// It contends for the engine, has work, and is under its cap.
    fn could_run(&self) -> bool {
        self.contends && self.usage.runnable && self.meter.is_none_or(|meter| meter.is_open())
    }

    /// Its gate is closed since it is ahead.
    pub(super) fn is_held(&self) -> bool {
        self.hold.is_some_and(|hold| hold.closed)
    }

    /// Engine time used since debts were worked out.
    fn fresh_ns(&self) -> f64 {
        self.usage.engine_ns.saturating_sub(self.settled_ns) as f64
    }

    /// By how much it is ahead, where all that contend have used so much since debts were worked out.
    fn lead_ns(&self, plan: &Plan, used: f64) -> f64 {
        self.fresh_ns() - self.part_of_weight * plan.weight(self) * used - self.owed_ns
    }
}

impl Scheduler {
    /// How long a gate may stay as it is without a look at it.
    pub(super) fn hold_look_ns(&self) -> u64 {
        LOOK_NS.max(LOOK_EACH_NS.saturating_mul(self.groups.len() as u64))
    }

    /// Debts have just been worked out, and with them who is to be held.
    pub(super) fn settle_holds(&mut self) -> Vec<Action> {
        let mut held = BTreeSet::new();
        for (id, group) in &mut self.groups {
            group.settled_ns = group.usage.engine_ns;
            if group.hold.is_some() {
                held.insert(*id);
            }
        }
        let before = std::mem::replace(&mut self.held, held);
        let freed: Vec<_> = before.difference(&self.held).copied().collect();
        freed.into_iter().filter_map(|id| self.gate(id, Cause::Ahead)).collect()
    }

    /// Frees all that are held: nothing is known of them any more.
    pub(super) fn free_held(&mut self) -> Vec<Action> {
        self.groups.values_mut().for_each(|group| group.hold = None);
        self.settle_holds()
    }

    /// Closes the gates of those that are ahead, and opens those of others.
    pub(super) fn hold_back(&mut self) -> Vec<Action> {
        if self.held.is_empty() {
            return Vec::new();
        }
        let contenders = || self.groups.values().filter(|group| group.contends);
        let used: f64 = contenders().map(Group::fresh_ns).sum();
        let runnable = contenders().filter(|group| group.could_run()).count();
        let mut free = contenders().any(|group| group.could_run() && group.hold.is_none());
        let mut least: Option<(f64, VgpuId)> = None;
        for id in &self.held {
            let Some(group) = self.groups.get_mut(id) else { continue };
            let lead = group.lead_ns(&self.plan, used);
            let own = group.could_run();
            let slice = group.slice.unwrap_or_default().as_nanos() as f64;
            let Some(hold) = &mut group.hold else { continue };
            // A gate costs something: it is not closed for less than a slice.
            let most = if hold.closed { 0.0 } else { slice };
            hold.closed = lead > most && runnable > usize::from(own);
            if hold.closed {
                hold.closed_ns = self.now_ns;
            }
            free |= own && !hold.closed;
            if own && least.is_none_or(|(of, _)| lead < of) {
                least = Some((lead, *id));
            }
        }
        // The engine does not stand still for the sake of fairness.
        if let Some((_, id)) = least.filter(|_| !free)
            && let Some(hold) = self.groups.get_mut(&id).and_then(|group| group.hold.as_mut())
        {
            hold.closed = false;
        }
        let held: Vec<_> = self.held.iter().copied().collect();
        held.into_iter().filter_map(|id| self.gate(id, Cause::Ahead)).collect()
    }

    /// A vGPU that is gone.
    pub(super) fn forget_held(&mut self, id: VgpuId) {
        self.held.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    /// 100 ms in which two vGPUs used so many of them together.
    fn reading(ms: u64) -> [Interval; 2] {
        [1, 2].map(|n| Interval {
            vgpu: VgpuId(Uuid::from_u128(n)),
            elapsed_ns: 100_000_000,
            engine_ns: ms * 500_000,
            busy: true,
            runnable: true,
            preempted: true,
        })
    }

    #[test]
    fn turns_around_a_standstill_say_nothing() {
        let mut pace = Pace::default();
        let calm = [99, 100, 85, 0, 99, 100].map(|ms| pace.read(&reading(ms)));
        assert_eq!(calm, [true, true, true, false, false, true]);
        // Less work is a standstill once, and then how it is.
        let calm = [40, 40, 40].map(|ms| pace.read(&reading(ms)));
        assert_eq!(calm, [false, false, true]);
    }
}
