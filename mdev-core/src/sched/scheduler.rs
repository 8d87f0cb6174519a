//! Scheduler of one parent: events and time in; time slices, budgets and gates out.
//!
//! The runlist gives each group with work its slice in rotation, so busy groups get shares in
//! proportion to their slices. Slices are in proportion to weights, and their mean is near the
//! configured slice. A group may use more than its slice (a kernel runs past it) or less (the group
//! has short work only). The scheduler therefore measures usage, carries the debts of busy groups,
//! and scales slices until the average is right.
//!
//! On a GPU that does not preempt, a group that is ahead by more than slices can repay waits at its
//! closed gate.
//!
//! Slices do not limit a group while others idle. Caps do: with the GPU's budgets where it has
//! them, or else with gates that the scheduler moves by the same meters.
//!
//! Modules in reading order:
//!
//! * `event`: events, actions and snapshots
//! * `weight_class`, `share`, `debt`, `cap`, `gate`, `usage`, `group`: state of one vGPU
//! * `demand`, `turns`: what vGPUs want of the engine
//! * `weights`, `slices`, `pace`: weights and time slices of all vGPUs
//! * `caps`, `gate_schedule`: caps of all vGPUs, and gates
//! * `readings`, `deficit`: settlement of debts after a reading of the counters
//! * `gate_throttle`: gates for debts that slices cannot repay
//! * `change`, `decisions`: subject and result of a change

use std::time::Duration;

use super::account::{Ledger, Measured, WaitTimes};
use super::log::{Cause, Log};
use super::policy::{Config, Enforcement, GpuFeatures, Policy};
use super::share::{Core, ShareRequest};
use crate::gpu::UsageReport;
use crate::ids::VgpuId;

mod cap;
mod caps;
mod change;
mod debt;
mod decisions;
mod deficit;
mod demand;
mod event;
mod gate;
mod gate_schedule;
mod gate_throttle;
mod group;
mod pace;
mod readings;
mod share;
mod slices;
#[cfg(test)]
mod tests;
mod turns;
mod usage;
mod weight_class;
mod weights;

use caps::Caps;
use change::Change;
use debt::Throttling;
use decisions::Decisions;
use deficit::Settlement;
pub use event::{Action, Event, ShareError, Snapshot};
use gate_schedule::GateSchedule;
use gate_throttle::GateThrottle;
use group::{Group, Groups};
use readings::Readings;
use slices::Slices;

/// Scheduler of one parent.
#[derive(Clone, Debug)]
pub struct Scheduler {
    config: Config,
    gpu: GpuFeatures,
    groups: Groups,
    slices: Slices,
    gates: GateSchedule,
    throttle: GateThrottle,
    readings: Readings,
    ledger: Ledger,
    log: Log,
    now_ns: u64,
}

impl Scheduler {
    /// Creates the scheduler of a parent without vGPUs. Settings are clamped to their bounds.
    ///
    /// `now_ns` is by the clock of usage reports.
    pub fn new(config: Config, gpu: impl Into<GpuFeatures>, now_ns: u64) -> Self {
        Self {
            config: config.clamped(),
            gpu: gpu.into(),
            groups: Groups::new(),
            slices: Slices::default(),
            gates: GateSchedule::default(),
            throttle: GateThrottle::default(),
            readings: Readings::default(),
            ledger: Ledger::default(),
            log: Log::default(),
            now_ns,
        }
    }

    /// Returns the settings in force.
    pub fn config(&self) -> Config {
        self.config
    }

    /// Returns the policy in force.
    pub fn policy(&self) -> Policy {
        self.config.policy
    }

    /// Returns the percentage of the GPU that no vGPU requested.
    pub fn left(&self) -> u8 {
        100_u32.saturating_sub(self.slices.requested()) as u8
    }

    /// Checks whether another vGPU with the share may start.
    pub fn check(&self, share: ShareRequest) -> Result<(), ShareError> {
        self.check_fits(share.core, self.left())
    }

    /// Returns the part of the GPU, 0 to 1, that a vGPU gets while all vGPUs are busy.
    pub fn entitled(&self, id: VgpuId) -> Option<f64> {
        self.groups.get(&id).map(|group| self.entitled_part(group))
    }

    /// Returns a vGPU's time slice.
    pub fn slice(&self, id: VgpuId) -> Option<Duration> {
        self.groups.get(&id)?.share.slice()
    }

    /// Returns the engine time that a vGPU used over the last second.
    pub fn measured(&self, id: VgpuId) -> Option<Measured> {
        self.ledger.measured(id)
    }

    /// Returns how long a vGPU's work waited for the engine in the last one to two seconds. None if
    /// no wait ended.
    pub fn waits(&self, id: VgpuId) -> Option<WaitTimes> {
        self.ledger.waits(id)
    }

    /// Returns the engine time that all vGPUs used over the last second.
    pub fn measured_total(&self) -> Measured {
        self.ledger.total()
    }

    /// Returns a vGPU's scheduling state.
    pub fn snapshot(&self, id: VgpuId) -> Option<Snapshot> {
        let group = self.groups.get(&id)?;
        let measured = self.ledger.measured(id).unwrap_or_default();
        Some(group.snapshot(self.entitled_part(group), measured))
    }

    /// Returns the last decisions, oldest first.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Returns the time of the next reading of the counters, by the clock of usage reports.
    ///
    /// Returns `None` while there are no vGPUs. A late reading costs no precision, since the
    /// scheduler charges all engine time that a report shows.
    pub fn next_deadline(&self) -> Option<u64> {
        if self.groups.is_empty() {
            return None;
        }
        let reading_ns = self.readings.next_ns(&self.config, self.slices.pace());
        Some(self.gates.next_check_ns().map_or(reading_ns, |check_ns| check_ns.min(reading_ns)))
    }

    /// Handles an event. Returns the actions for the GPU, in order.
    pub fn handle(&mut self, event: Event<'_>) -> Result<Vec<Action>, ShareError> {
        match event {
            Event::VgpuStarted { id, share, max_instances } => self.start(id, share, max_instances),
            Event::VgpuStopped { id } => Ok(self.stop(id)),
            Event::ShareChanged { id, share } => self.change(id, share),
            Event::ConfigChanged(config) => Ok(self.configure(config)),
            Event::UsageReport(report) => Ok(self.read(report)),
            Event::Tick { now_ns } => Ok(self.tick(now_ns)),
        }
    }

    fn start(
        &mut self,
        id: VgpuId,
        share: ShareRequest,
        max_instances: u32,
    ) -> Result<Vec<Action>, ShareError> {
        if self.groups.contains_key(&id) {
            return Err(ShareError::Duplicate(id));
        }
        self.check(share)?;
        let group = Group::new(self.config.policy, share, max_instances);
        self.slices.insert(id, &group.share);
        self.groups.insert(id, group);
        self.ledger.open(id);
        let mut actions = self.replan(Change::One { id, part_before: 0.0 }, Cause::Started);
        // An adopted vGPU may have the budget and the gate of the manager before.
        let capped = actions.iter().any(|act| matches!(act, Action::SetBudget(of, _) if *of == id));
        if self.gpu.enforcement == Enforcement::Budgets && !capped {
            actions.push(Action::SetBudget(id, None));
        }
        actions.push(Action::Gate(id, true));
        Ok(actions)
    }

    fn stop(&mut self, id: VgpuId) -> Vec<Action> {
        let Some(group) = self.groups.remove(&id) else { return Vec::new() };
        let part_before = self.slices.plan().part(&group.share);
        self.slices.remove(id, &group.share);
        self.gates.remove(id, group.gate.check_at_ns());
        self.throttle.remove(id);
        self.ledger.close(id);
        if self.groups.is_empty() {
            return Vec::new();
        }
        self.replan(Change::Removed { part_before }, Cause::Stopped)
    }

    fn change(&mut self, id: VgpuId, share: ShareRequest) -> Result<Vec<Action>, ShareError> {
        let group = self.groups.get(&id).ok_or(ShareError::Unknown(id))?;
        let others = self.slices.requested() - group.share.requested();
        self.check_fits(share.core, 100_u32.saturating_sub(others) as u8)?;
        let Some(group) = self.groups.get_mut(&id) else { return Err(ShareError::Unknown(id)) };
        let part_before = self.slices.plan().part(&group.share);
        let before = group.share.clone();
        group.share.replace(self.config.policy, share);
        group.forget_debt();
        self.slices.change(id, &before, &group.share);
        Ok(self.replan(Change::One { id, part_before }, Cause::Share))
    }

    fn configure(&mut self, config: Config) -> Vec<Action> {
        self.config = config.clamped();
        self.slices.apply_policy(self.config.policy, &mut self.groups);
        if self.groups.is_empty() {
            return Vec::new();
        }
        self.replan(Change::All, Cause::Policy)
    }

    /// Works out the slices and caps that follow from a change.
    fn replan(&mut self, change: Change, cause: Cause) -> Vec<Action> {
        let Self { config, gpu, groups, slices, gates, log, now_ns, .. } = self;
        let mut decisions = Decisions::new(*now_ns, log);
        let affected = slices.replan(config, change, cause, groups);
        let mut caps = Caps { config: *config, enforcement: gpu.enforcement, groups, gates };
        caps.update(change, cause, &mut decisions);
        slices.apply(affected, change, cause, groups, &mut decisions);
        decisions.into_actions()
    }

    /// Takes a reading of the counters.
    fn read(&mut self, report: &UsageReport) -> Vec<Action> {
        if !self.readings.accept(report.now_ns) {
            return Vec::new();
        }
        self.now_ns = self.now_ns.max(report.now_ns);
        let Self { groups, slices, gates, throttle, .. } = self;
        let mut decisions = Decisions::new(self.now_ns, &mut self.log);
        caps::charge(report.now_ns, &report.vgpus, groups, gates, &mut decisions);
        // Gates move at every reading. Slices follow only intervals that are long enough.
        let (config, preempts) = (&self.config, self.gpu.preempts);
        if !self.readings.end_interval(report.now_ns, config, preempts, slices.pace()) {
            throttle.update_gates(slices.plan(), groups, gates, &mut decisions);
            return decisions.into_actions();
        }
        let intervals = self.ledger.report(report);
        // Shares of an interval in which slices changed are no deviation.
        let changed = slices.take_changed();
        let steady = throttle.observe(&intervals);
        if !intervals.is_empty() {
            let crowd = !preempts && slices.pace().is_crowd(&intervals);
            if (!changed || crowd) && !self.gpu.exact_slices {
                let throttling = Throttling { now_ns: self.now_ns, steady };
                let settlement = Settlement {
                    plan: slices.plan(),
                    repay_ns: readings::repay_ns(&self.config) as f64,
                    by_priority: self.config.policy == Policy::Weighted,
                    throttling: (!self.gpu.preempts).then_some(throttling),
                    by_turns: crowd,
                };
                deficit::update(groups, &intervals, &settlement);
            }
            let changed = slices.note_demand(groups, &intervals, &self.ledger, crowd);
            slices.follow_demand(&self.config, groups, &intervals, !self.gpu.preempts);
            let cause = if changed { Cause::Demand } else { Cause::Repay };
            slices.repay(!self.gpu.preempts, cause, groups, &mut decisions);
        }
        if !self.gpu.preempts {
            throttle.follow_settlement(groups, gates, &mut decisions);
            throttle.update_gates(slices.plan(), groups, gates, &mut decisions);
        }
        for group in groups.values_mut() {
            group.share.mark_measured();
        }
        decisions.into_actions()
    }

    /// Lets time pass without a reading. After a second, debts are unknown and dropped.
    fn tick(&mut self, now_ns: u64) -> Vec<Action> {
        self.now_ns = self.now_ns.max(now_ns);
        if !self.readings.are_stale(now_ns) {
            return Vec::new();
        }
        let Self { groups, gates, throttle, .. } = self;
        groups.values_mut().for_each(Group::forget_debt);
        let mut decisions = Decisions::new(self.now_ns, &mut self.log);
        throttle.release_all(groups, gates, &mut decisions);
        let mut actions = decisions.into_actions();
        actions.extend(self.replan(Change::All, Cause::Stale));
        actions
    }

    fn check_fits(&self, core: Option<Core>, left: u8) -> Result<(), ShareError> {
        match core.map(Core::get) {
            Some(asked) if asked > left && !self.config.overcommit => {
                Err(ShareError::Overcommitted { asked, left })
            }
            _ => Ok(()),
        }
    }

    fn entitled_part(&self, group: &Group) -> f64 {
        self.slices.plan().part(&group.share).min(group.cap.part())
    }
}
