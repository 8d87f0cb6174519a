//! Decisions made while one event is handled.

use std::time::Duration;

use super::event::Action;
use super::group::Group;
use crate::ids::VgpuId;
use crate::sched::log::{Cause, Decision, Log, Record};

/// Actions in the order of their decisions. Every decision is also logged.
#[derive(Debug)]
pub(super) struct Decisions<'a> {
    now_ns: u64,
    log: &'a mut Log,
    actions: Vec<Action>,
}

impl<'a> Decisions<'a> {
    pub(super) fn new(now_ns: u64, log: &'a mut Log) -> Self {
        Self { now_ns, log, actions: Vec::new() }
    }

    /// Returns the time of the event.
    pub(super) fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Tells the GPU a vGPU's new slice.
    pub(super) fn slice(&mut self, id: VgpuId, group: &Group, slice: Duration, cause: Cause) {
        self.log(id, group, Decision::Slice(slice), cause);
        self.actions.push(Action::SetTimeslice(id, slice));
    }

    /// Tells the GPU a vGPU's new budget.
    pub(super) fn budget(&mut self, id: VgpuId, group: &Group, cause: Cause) {
        let budget = group.cap.budget();
        self.log(id, group, Decision::Budget(budget), cause);
        self.actions.push(Action::SetBudget(id, budget));
    }

    /// Opens or closes a vGPU's gate.
    pub(super) fn gate(&mut self, id: VgpuId, group: &Group, cause: Cause) {
        let open = group.gate.is_open();
        self.log(id, group, Decision::Gate(open), cause);
        self.actions.push(Action::Gate(id, open));
    }

    pub(super) fn into_actions(self) -> Vec<Action> {
        self.actions
    }

    fn log(&mut self, vgpu: VgpuId, group: &Group, decision: Decision, cause: Cause) {
        let usage = group.usage.counters();
        self.log.push(Record {
            at_ns: self.now_ns,
            vgpu,
            decision,
            cause,
            engine_ns: usage.engine_ns,
            wait_ns: usage.wait_ns,
            owed_ns: group.debt.owed_ns() as i64,
        });
    }
}
