//! What the counters say, and what follows from it.

use super::ahead::Holds;
use super::event::Action;
use super::group::Group;
use super::slices::Whom;
use super::{MAX_REPAY_NS, MIN_REPAY_NS, REPAY_NS, REPORT_NS, STALE_NS, Scheduler, repay};
use crate::gpu::UsageReport;
use crate::sched::log::Cause;
use crate::sched::policy::Policy;

impl Scheduler {
    /// Over how long a deviation is made good.
    fn repay_ns(&self) -> u64 {
        match self.config.averaging {
            Some(averaging) => (u64::from(averaging.factor) * 1_000_000_000
                / u64::from(averaging.frequency))
            .clamp(MIN_REPAY_NS, MAX_REPAY_NS),
            None => REPAY_NS,
        }
    }

    /// How often the counters are read: twice in the time over which deviations are made good, so that it settles.
    pub(super) fn report_ns(&self) -> u64 {
        (self.repay_ns() / 2).min(REPORT_NS)
    }

    /// The shortest interval from which debts are worked out. Where a turn may be as long as a kernel, one has to be long
    /// to say something.
    fn shortest_ns(&self) -> u64 {
        if self.silicon.preempts { self.report_ns() / 5 } else { self.report_ns() * 9 / 10 }
    }

    /// Takes a reading of the counters.
    pub(super) fn read(&mut self, report: &UsageReport) -> Vec<Action> {
        if self.last_read_ns.is_some_and(|at| report.now_ns <= at) {
            return Vec::new();
        }
        self.last_read_ns = Some(report.now_ns);
        self.now_ns = self.now_ns.max(report.now_ns);
        let mut actions = self.charge(report.now_ns, &report.vgpus);
        // Gates are decided often; for slices, intervals must be long enough to mean something.
        let soon = self.last_measured_ns.map(|at| at.saturating_add(self.shortest_ns()));
        if soon.is_some_and(|soon| report.now_ns < soon) {
            actions.extend(self.hold_back());
            return actions;
        }
        self.last_measured_ns = Some(report.now_ns);
        let intervals = self.ledger.report(report);
        let changed = std::mem::take(&mut self.changed);
        let calm = self.pace.read(&intervals);
        if !intervals.is_empty() {
            if !changed && !self.silicon.exact {
                let classes = self.config.policy == Policy::Weighted;
                let repay_ns = self.repay_ns();
                let holds = Holds { now_ns: self.now_ns, calm };
                let holds = (!self.silicon.preempts).then_some(holds);
                repay::repay(&mut self.groups, &self.plan, &intervals, repay_ns, classes, holds);
            }
            actions.extend(self.repay_by_slices());
        }
        if !self.silicon.preempts {
            actions.extend(self.settle_holds());
            actions.extend(self.hold_back());
        }
        self.groups.values_mut().for_each(|group| group.changed = false);
        actions
    }

    /// Lets time pass without a reading.
    pub(super) fn tick(&mut self, now_ns: u64) -> Vec<Action> {
        self.now_ns = self.now_ns.max(now_ns);
        let measured_ns = *self.last_measured_ns.get_or_insert(now_ns);
        if now_ns.saturating_sub(measured_ns) <= STALE_NS {
            return Vec::new();
        }
        self.groups.values_mut().for_each(Group::forget);
        let mut actions = self.free_held();
        actions.extend(self.replan(Whom::All, Cause::Stale));
        actions
    }
}
