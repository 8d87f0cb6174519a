//! Cap of one vGPU: the largest part of the GPU, and the meter that enforces it with a gate.

use std::time::Duration;

use crate::sched::budget::{Budget, Meter};

/// Cap of one vGPU.
///
/// A meter exists only on a GPU without budgets, and only while the cap is below the whole GPU.
#[derive(Clone, Debug)]
pub(super) struct Cap {
    /// Largest part of the GPU, 0 to 1.
    part: f64,
    /// The same as a budget: `None` for the whole GPU.
    budget: Option<Budget>,
    meter: Option<Meter>,
    /// The meter is newer than the last reading, so the next reading is not charged to it.
    meter_is_new: bool,
}

impl Default for Cap {
    fn default() -> Self {
        Self { part: 1.0, budget: None, meter: None, meter_is_new: false }
    }
}

impl Cap {
    /// Sets the cap. Returns true if the budget changed.
    pub(super) fn set(&mut self, part: f64, period: Duration) -> bool {
        self.part = part;
        let budget = if part < 1.0 { Budget::part(part, period) } else { None };
        std::mem::replace(&mut self.budget, budget) != budget
    }

    /// Returns the largest part of the GPU, 0 to 1.
    pub(super) fn part(&self) -> f64 {
        self.part
    }

    pub(super) fn budget(&self) -> Option<Budget> {
        self.budget
    }

    /// Returns the most engine time within `elapsed_ns`: infinite for the whole GPU.
    pub(super) fn most_ns(&self, elapsed_ns: u64) -> f64 {
        if self.part < 1.0 { self.part * elapsed_ns as f64 } else { f64::INFINITY }
    }

    /// Starts, updates or removes the meter, so that it enforces the budget.
    pub(super) fn apply_to_meter(&mut self, now_ns: u64) {
        let Some(budget) = self.budget else {
            self.meter = None;
            return;
        };
        self.meter_is_new |= self.meter.is_none();
        let meter = self.meter.get_or_insert(Meter::new(budget, now_ns));
        meter.set_budget(budget, now_ns);
    }

    /// Charges engine time to the meter. Returns false without a meter.
    pub(super) fn charge(&mut self, now_ns: u64, used_ns: u64, has_work: bool) -> bool {
        let Some(meter) = &mut self.meter else { return false };
        let is_new = std::mem::take(&mut self.meter_is_new);
        meter.settle(now_ns, if is_new { 0 } else { used_ns }, has_work);
        true
    }

    /// Returns true while the cap allows the vGPU to run.
    pub(super) fn is_open(&self) -> bool {
        self.meter.is_none_or(|meter| meter.is_open())
    }

    /// Returns the time until the meter may open or close the gate: `None` without a meter.
    pub(super) fn check_after_ns(&self, now_ns: u64, runnable: bool) -> Option<u64> {
        let meter = self.meter?;
        Some(match (meter.is_open(), runnable) {
            _ if self.meter_is_new => 0,
            (true, true) => meter.left_ns(),
            (true, false) => meter.left_ns().max(meter.budget().period_ns),
            (false, _) => meter.opens_at_ns().saturating_sub(now_ns),
        })
    }
}
