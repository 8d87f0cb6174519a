//! Scheduling state of one vGPU.

use std::collections::BTreeMap;

use super::cap::Cap;
use super::debt::Debt;
use super::demand::Demand;
use super::event::Snapshot;
use super::gate::Gate;
use super::share::Share;
use super::usage::Usage;
use crate::ids::VgpuId;
use crate::sched::account::Measured;
use crate::sched::policy::{MIN_SLICE, Policy};
use crate::sched::share::ShareRequest;

/// The vGPUs of a parent.
pub(super) type Groups = BTreeMap<VgpuId, Group>;

/// Time for which a vGPU has to compete until it counts as one that competes lastingly. After that,
/// it may pause for as long.
const SETTLED_NS: u64 = 500_000_000;

/// Scheduling state of one vGPU.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) share: Share,
    pub(super) debt: Debt,
    pub(super) cap: Cap,
    pub(super) gate: Gate,
    pub(super) usage: Usage,
    pub(super) demand: Demand,
    /// The vGPU did not compete in the last interval, for the first time.
    relented: bool,
    /// Number of intervals in a row after which the vGPU was found below its share.
    pub(super) brief_for: u8,
    /// Time for which the vGPU has competed, less the time since in which it did not.
    competed_ns: u64,
}

impl Group {
    pub(super) fn new(policy: Policy, request: ShareRequest, max_instances: u32) -> Self {
        Self {
            share: Share::new(policy, request, max_instances),
            debt: Debt::default(),
            cap: Cap::default(),
            gate: Gate::default(),
            usage: Usage::default(),
            demand: Demand::default(),
            relented: false,
            brief_for: 0,
            competed_ns: 0,
        }
    }

    /// Returns true if a vGPU that competes has done so for so long that it is likely to go on.
    pub(super) fn competes_lastingly(&self) -> bool {
        self.competed_ns >= SETTLED_NS
    }

    /// Notes the demand that an interval of `elapsed_ns` showed. Returns true if that changes the
    /// demand.
    ///
    /// One interval below its share may be chance for a vGPU that used `much` of it before: others
    /// may have given up theirs.
    pub(super) fn note_demand(&mut self, demand: Demand, much: bool, elapsed_ns: u64) -> bool {
        let relents = self.demand == Demand::Competing && demand == Demand::Brief && much;
        self.relented = relents && !self.relented;
        let changed = !self.relented && std::mem::replace(&mut self.demand, demand) != demand;
        let brief = self.demand == Demand::Brief;
        self.brief_for = if brief { self.brief_for.saturating_add(1) } else { 0 };
        self.competed_ns = if self.demand == Demand::Competing {
            self.competed_ns.saturating_add(elapsed_ns).min(2 * SETTLED_NS)
        } else {
            self.competed_ns.saturating_sub(elapsed_ns)
        };
        changed
    }

    /// Drops the debt, and settles all engine time so far.
    pub(super) fn forget_debt(&mut self) {
        self.debt.forget();
        self.usage.settle();
    }

    /// Returns true if the gate is to be open: neither a throttle nor the cap closes it.
    pub(super) fn wants_open_gate(&self) -> bool {
        !self.debt.is_gated() && self.cap.is_open()
    }

    /// Returns true if the vGPU contends, has work and is under its cap.
    pub(super) fn could_run(&self) -> bool {
        self.debt.contends() && self.usage.is_runnable() && self.cap.is_open()
    }

    /// Returns the engine time by which the vGPU is ahead, in nanoseconds.
    ///
    /// `used_ns` is the engine time of all contenders since the last settlement.
    pub(super) fn lead_ns(&self, weight: f64, used_ns: f64) -> f64 {
        self.usage.unsettled_ns() - self.debt.part(weight) * used_ns - self.debt.owed_ns()
    }

    pub(super) fn snapshot(&self, entitled: f64, measured: Measured) -> Snapshot {
        Snapshot {
            share: self.share.request(),
            entitled,
            cap: self.cap.part(),
            measured,
            usage: *self.usage.counters(),
            slice: self.share.slice().unwrap_or(MIN_SLICE),
            gate_open: self.gate.is_open(),
            gates_closed: self.gate.closings(),
            owed_ns: self.debt.owed_ns() as i64,
        }
    }
}
