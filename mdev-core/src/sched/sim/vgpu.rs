//! Simulated vGPU: its work, its slice, gate and budget, and its counters.

use std::time::Duration;

use super::histogram::Histogram;
use super::workload::Workload;
use crate::gpu::Usage;
use crate::ids::VgpuId;
use crate::sched::budget::{Budget, Meter};

/// Simulated vGPU on a runlist.
#[derive(Clone, Debug)]
pub(super) struct SimulatedVgpu {
    pub(super) id: VgpuId,
    pub(super) workload: Workload,
    /// True while the vGPU is on the runlist.
    pub(super) listed: bool,
    /// The vGPU counted as runnable at the last report.
    pub(super) was_runnable: bool,
    /// Time on the engine without work that is charged.
    pub(super) stayed_ns: u64,
    pub(super) waits: Histogram,
    slice_ns: u64,
    gate_open: bool,
    meter: Option<Meter>,
    /// Work left of this burst.
    left_ns: u64,
    /// Start of the next burst, or else start of the wait for the engine.
    ready_ns: u64,
    /// When this burst was due.
    due_ns: u64,
    /// End of the last turn, and whether work was left then.
    ran_until_ns: Option<u64>,
    has_more: bool,
    usage: Usage,
}

impl SimulatedVgpu {
    /// Creates a vGPU with a closed gate.
    pub(super) fn new(id: VgpuId, workload: Workload, now_ns: u64) -> Self {
        Self {
            id,
            workload,
            listed: false,
            was_runnable: false,
            stayed_ns: 0,
            waits: Histogram::default(),
            slice_ns: 0,
            gate_open: false,
            meter: None,
            left_ns: workload.burst_ns,
            ready_ns: now_ns.saturating_add(workload.start_ns),
            due_ns: now_ns.saturating_add(workload.start_ns),
            ran_until_ns: None,
            has_more: false,
            usage: Usage::default(),
        }
    }

    pub(super) fn set_slice(&mut self, slice: Duration) {
        self.slice_ns = slice.as_nanos() as u64;
    }

    pub(super) fn set_gate(&mut self, open: bool) {
        self.gate_open = open;
    }

    pub(super) fn set_budget(&mut self, budget: Option<Budget>, now_ns: u64) {
        self.meter = budget.map(|budget| match self.meter {
            Some(mut meter) => {
                meter.set_budget(budget, now_ns);
                meter
            }
            None => Meter::new(budget, now_ns),
        });
    }

    /// Returns the meter's credit: `None` without a budget.
    #[cfg(test)]
    pub(super) fn credit_ns(&self) -> Option<i64> {
        self.meter.map(|meter| meter.credit_ns())
    }

    /// Lets the first burst begin at `at_ns`.
    #[cfg(test)]
    pub(super) fn begin_at(&mut self, at_ns: u64) {
        self.ready_ns = at_ns;
    }

    /// Starts with the work of another workload at `now_ns`.
    #[cfg(test)]
    pub(super) fn wake(&mut self, now_ns: u64) {
        (self.left_ns, self.ready_ns, self.due_ns) = (self.workload.burst_ns, now_ns, now_ns);
    }

    fn has_work(&self, now_ns: u64) -> bool {
        self.left_ns > 0 && self.ready_ns <= now_ns
    }

    /// Returns the earliest time at which the vGPU may run without an action of the scheduler.
    pub(super) fn runnable_at_ns(&mut self, now_ns: u64) -> Option<u64> {
        if !self.gate_open || self.left_ns == 0 {
            return None;
        }
        let has_work = self.has_work(now_ns);
        let opens_ns = self.meter.as_mut().map_or(0, |meter| {
            meter.advance(now_ns, has_work);
            if meter.is_open() { 0 } else { meter.opens_at_ns() }
        });
        Some(self.ready_ns.max(opens_ns))
    }

    /// Returns the counters at a time at which the vGPU does not run. It counts as runnable for
    /// `linger_ns` after its work.
    pub(super) fn usage(&self, now_ns: u64, linger_ns: u64) -> Usage {
        let waits = self.has_work(now_ns);
        let waiting_ns = if waits { now_ns - self.ready_ns } else { 0 };
        let lingers = self.ran_until_ns.is_some_and(|until_ns| now_ns < until_ns + linger_ns);
        let wait_ns = self.usage.wait_ns + waiting_ns;
        Usage { wait_ns, runnable: waits || lingers, ..self.usage }
    }

    /// Ends a turn. A vGPU that `keeps_engine` continues.
    pub(super) fn end_turn(&mut self, keeps_engine: bool) {
        self.usage.preemptions += u64::from(self.has_more && !keeps_engine);
    }

    /// Runs from `now_ns` until the slice, the budget or the work ends. Returns the engine time.
    ///
    /// `switched` says that another vGPU ran before.
    pub(super) fn run(&mut self, now_ns: u64, switched: bool) -> u64 {
        let piece_ns = self.workload.piece_ns.max(1);
        let budget_ns = self.meter.map_or(u64::MAX, |meter| meter.left_ns());
        let granted_ns = self.slice_ns.min(budget_ns).div_ceil(piece_ns) * piece_ns;
        let ran_ns = granted_ns.min(self.left_ns);
        let waited_ns = now_ns - self.ready_ns;
        self.waits.record(waited_ns);
        if switched {
            self.usage.waits.record(waited_ns);
        }
        self.usage.wait_ns += waited_ns;
        self.usage.engine_ns += ran_ns;
        self.usage.submissions += ran_ns.div_ceil(piece_ns);
        self.ready_ns = now_ns + ran_ns;
        self.ran_until_ns = Some(self.ready_ns);
        if let Some(meter) = &mut self.meter {
            meter.settle(self.ready_ns, ran_ns, true);
        }
        if self.left_ns != u64::MAX {
            self.left_ns -= ran_ns;
        }
        self.has_more = self.left_ns > 0;
        if !self.has_more {
            self.left_ns = self.workload.burst_ns;
            self.due_ns = self.due_ns.saturating_add(self.workload.period_ns);
            self.ready_ns = self.ready_ns.saturating_add(self.workload.idle_ns).max(self.due_ns);
        }
        ran_ns
    }
}
