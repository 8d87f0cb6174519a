//! The scheduler of one parent: events and a clock in; time slices, budgets and gates out.
//!
//! The runlist gives each group that has work its slice in turn, so among busy groups shares are as slices are.
//! Slices are in proportion to weights, their mean near the one configured. What was granted is not always what was
//! used (a kernel may run past its slice, a group may have short work only), so use is measured, and what a busy group
//! is owed is carried and worked off: its slice is scaled until the average is right.
//!
//! Slices alone hold nobody back while others idle. Caps do: the silicon's own budgets where it has them, or else
//! gates that are decided here from the same meters.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::account::{Ledger, Measured};
use super::budget::{Budget, Meter};
use super::log::{Cause, Decision, Log, Record};
use super::policy::{Config, Enforcement, MAX_SLICE, MIN_SLICE, Policy};
use super::share::{Core, Mode, Share};
use crate::gpu::{Usage, UsageReport};
use crate::ids::VgpuId;

mod repay;
#[cfg(test)]
mod tests;

use repay::Extra;

/// What a vGPU without `core` weighs at least, in hundredths, so that it never starves.
const MIN_WEIGHT: f64 = 1.0;
/// Time over which a busy vGPU is given back what it is owed, without averaging: two reports, so that it settles.
const REPAY_NS: u64 = 200_000_000;
/// Bounds of that time with averaging.
const MIN_REPAY_NS: u64 = 20_000_000;
const MAX_REPAY_NS: u64 = 1_000_000_000;
/// How often counters are to be read at least.
const REPORT_NS: u64 = 100_000_000;
/// Gates are not decided more often than this.
const MIN_GATE_NS: u64 = 500_000;
/// Corrections that change a slice by less than this part are not worth an action.
const TOLERANCE: f64 = 0.01;
/// Without measurements for this long, what is owed is not known any more.
const STALE_NS: u64 = 1_000_000_000;

/// What happens to a scheduler.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A vGPU was admitted (or adopted).
    VgpuStarted {
        /// Which one.
        id: VgpuId,
        /// What it asks for.
        share: Share,
        /// Most instances of its type on this parent, for fixed shares.
        max_instances: u32,
    },
    /// A vGPU is gone. One that is not known is no mistake.
    VgpuStopped {
        /// Which one.
        id: VgpuId,
    },
    /// A running vGPU asks for another share.
    ShareChanged {
        /// Which one.
        id: VgpuId,
        /// What it asks for from now on.
        share: Share,
    },
    /// The policy or its knobs are others from now on. Knobs out of their bounds are moved into them.
    ConfigChanged(Config),
    /// The silicon's counters were read: at [`Scheduler::next_deadline`], or whenever somebody wants to know.
    UsageReport(&'a UsageReport),
    /// Time has passed. Needed only while there are no usage reports.
    Tick {
        /// `CLOCK_MONOTONIC` in nanoseconds, the clock of usage reports.
        now_ns: u64,
    },
}

/// What is to be done to the silicon, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// [`crate::gpu::Gpu::set_timeslice`]
    SetTimeslice(VgpuId, Duration),
    /// [`crate::gpu::Gpu::set_budget`]; only on silicon that has budgets.
    SetBudget(VgpuId, Option<Budget>),
    /// [`crate::gpu::Gpu::set_gate`]
    Gate(VgpuId, bool),
}

/// Why an event was refused. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    /// More than the whole GPU.
    #[error("Not enough of the GPU is left: core={asked} asked, {left} of 100 left{}", hint(*left))]
    Overcommitted {
        /// Hundredths asked for.
        asked: u8,
        /// Hundredths that nobody asked for.
        left: u8,
    },
    /// It is scheduled already.
    #[error("vGPU {0} is scheduled already")]
    Duplicate(VgpuId),
    /// It is not scheduled.
    #[error("vGPU {0} is not scheduled")]
    Unknown(VgpuId),
}

fn hint(left: u8) -> String {
    match left {
        0 => "; lower another vGPU's core, or leave core out".to_owned(),
        left => format!("; ask for {left} or less, or lower another vGPU's core"),
    }
}

/// All that there is to know about one vGPU's share.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// What it asks for.
    pub share: Share,
    /// The part of the GPU that it gets while all are busy, 0 to 1.
    pub entitled: f64,
    /// The part that it gets at most, 0 to 1.
    pub cap: f64,
    /// What it used over the last second.
    pub measured: Measured,
    /// The silicon's counters, as last read.
    pub usage: Usage,
    /// Its slice.
    pub slice: Duration,
    /// False while it is held back by a gate.
    pub gate_open: bool,
    /// Times that a gate was closed on it. Budgets in the silicon are not counted here.
    pub gates_closed: u64,
    /// Engine time that the others owe it; negative where it owes.
    pub owed_ns: i64,
}

#[derive(Clone, Debug)]
struct Group {
    share: Share,
    max_instances: u32,
    /// What it is promised, in hundredths.
    promised: f64,
    /// What its slice is in proportion to, while all are busy.
    weight: f64,
    /// What its weight is scaled by, since others that have a part in idle time are of another class.
    boost: f64,
    /// Engine time that it is owed by the others, in nanoseconds; negative where it owes.
    owed_ns: f64,
    /// What its slice is scaled by to repay that.
    correction: f64,
    /// It has work all the time, and yet does not use even the longest slice: it comes back with a little work again
    /// and again.
    sated: bool,
    /// The slice that the silicon has.
    slice: Option<Duration>,
    /// The part of the GPU that it may have at most, and that as a budget.
    cap: f64,
    budget: Option<Budget>,
    /// Where the silicon has no budgets.
    meter: Option<Meter>,
    /// The meter began after the counters were last read: what was used until they are read again is not charged.
    fresh: bool,
    gate_open: bool,
    gates_closed: u64,
    usage: Usage,
}

impl Group {
    fn new(share: Share, max_instances: u32) -> Self {
        Self {
            share,
            max_instances: max_instances.max(1),
            promised: 0.0,
            weight: MIN_WEIGHT,
            boost: 1.0,
            owed_ns: 0.0,
            correction: 1.0,
            sated: false,
            slice: None,
            cap: 1.0,
            budget: None,
            meter: None,
            fresh: false,
            gate_open: true,
            gates_closed: 0,
            usage: Usage::default(),
        }
    }

    fn parts(&self) -> f64 {
        f64::from(self.share.priority.parts())
    }

    /// True where it may have time that it was not promised.
    fn takes_more(&self) -> bool {
        self.share.mode == Mode::Soft || self.share.core.is_none()
    }
}

/// The scheduler of one parent.
#[derive(Clone, Debug)]
pub struct Scheduler {
    config: Config,
    enforcement: Enforcement,
    groups: BTreeMap<VgpuId, Group>,
    /// Hundredths asked for.
    asked: u32,
    /// Sum of weights.
    weight: f64,
    ledger: Ledger,
    log: Log,
    now_ns: u64,
    last_read_ns: Option<u64>,
    last_measured_ns: Option<u64>,
    next_gate_ns: Option<u64>,
    /// Weights have changed since the counters were read: that interval is nobody's fault.
    changed: bool,
}

impl Scheduler {
    /// A parent without vGPUs. Knobs out of their bounds are moved into them.
    pub fn new(config: Config, enforcement: Enforcement) -> Self {
        Self {
            config: config.clamped(),
            enforcement,
            groups: BTreeMap::new(),
            asked: 0,
            weight: 0.0,
            ledger: Ledger::default(),
            log: Log::default(),
            now_ns: 0,
            last_read_ns: None,
            last_measured_ns: None,
            next_gate_ns: None,
            changed: false,
        }
    }

    /// The knobs in force.
    pub fn config(&self) -> Config {
        self.config
    }

    /// The policy in force.
    pub fn policy(&self) -> Policy {
        self.config.policy
    }

    /// Hundredths of the GPU that no vGPU has asked for.
    pub fn left(&self) -> u8 {
        100_u32.saturating_sub(self.asked) as u8
    }

    /// Whether one more vGPU with that share may start.
    pub fn check(&self, share: Share) -> Result<(), ShareError> {
        self.fits(share.core, self.left())
    }

    /// The part of the GPU that a vGPU gets while all are busy, 0 to 1.
    pub fn entitled(&self, id: VgpuId) -> Option<f64> {
        self.groups.get(&id).map(|group| self.part(group))
    }

    /// The slice that a vGPU has.
    pub fn slice(&self, id: VgpuId) -> Option<Duration> {
        self.groups.get(&id)?.slice
    }

    /// What a vGPU used over the last second.
    pub fn measured(&self, id: VgpuId) -> Option<Measured> {
        self.ledger.measured(id)
    }

    /// What all vGPUs used over the last second.
    pub fn measured_total(&self) -> Measured {
        self.ledger.total()
    }

    /// All that there is to know about a vGPU.
    pub fn snapshot(&self, id: VgpuId) -> Option<Snapshot> {
        let group = self.groups.get(&id)?;
        Some(Snapshot {
            share: group.share,
            entitled: self.part(group),
            cap: group.cap,
            measured: self.ledger.measured(id).unwrap_or_default(),
            usage: group.usage,
            slice: group.slice.unwrap_or(MIN_SLICE),
            gate_open: group.gate_open,
            gates_closed: group.gates_closed,
            owed_ns: group.owed_ns as i64,
        })
    }

    /// The last decisions, oldest first.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// When the counters are to be read next, by the clock of usage reports; `None` while there is nothing to read.
    ///
    /// Calls that come late cost no exactness: what was used is charged whenever it is known.
    pub fn next_deadline(&self) -> Option<u64> {
        if self.groups.is_empty() {
            return None;
        }
        let report = self.last_measured_ns.map_or(0, |at| at.saturating_add(self.report_ns()));
        Some(self.next_gate_ns.map_or(report, |gate| gate.min(report)))
    }

    /// Takes an event; what is to be done.
    pub fn handle(&mut self, event: Event<'_>) -> Result<Vec<Action>, ShareError> {
        match event {
            Event::VgpuStarted { id, share, max_instances } => self.start(id, share, max_instances),
            Event::VgpuStopped { id } => {
                let Some(gone) = self.groups.remove(&id) else { return Ok(Vec::new()) };
                self.asked -= hundredths(gone.share);
                self.ledger.close(id);
                Ok(self.replan(Cause::Stopped))
            }
            Event::ShareChanged { id, share } => self.change(id, share),
            Event::ConfigChanged(config) => {
                self.config = config.clamped();
                self.forget();
                Ok(self.replan(Cause::Policy))
            }
            Event::UsageReport(report) => Ok(self.read(report)),
            Event::Tick { now_ns } => {
                self.now_ns = self.now_ns.max(now_ns);
                let measured_ns = *self.last_measured_ns.get_or_insert(now_ns);
                if now_ns.saturating_sub(measured_ns) <= STALE_NS {
                    return Ok(Vec::new());
                }
                self.forget();
                Ok(self.replan(Cause::Stale))
            }
        }
    }

    fn start(
        &mut self,
        id: VgpuId,
        share: Share,
        max_instances: u32,
    ) -> Result<Vec<Action>, ShareError> {
        if self.groups.contains_key(&id) {
            return Err(ShareError::Duplicate(id));
        }
        self.check(share)?;
        self.groups.insert(id, Group::new(share, max_instances));
        self.asked += hundredths(share);
        self.ledger.open(id);
        let mut actions = self.replan(Cause::Started);
        // It may be one that an earlier manager's policy had capped or closed.
        let capped = actions.iter().any(|act| matches!(act, Action::SetBudget(of, _) if *of == id));
        if self.enforcement == Enforcement::Budgets && !capped {
            actions.push(Action::SetBudget(id, None));
        }
        actions.push(Action::Gate(id, true));
        Ok(actions)
    }

    fn change(&mut self, id: VgpuId, share: Share) -> Result<Vec<Action>, ShareError> {
        let had = hundredths(self.groups.get(&id).ok_or(ShareError::Unknown(id))?.share);
        let left = 100_u32.saturating_sub(self.asked - had) as u8;
        self.fits(share.core, left)?;
        self.asked = self.asked - had + hundredths(share);
        if let Some(group) = self.groups.get_mut(&id) {
            group.share = share;
        }
        // What was owed was owed at the old shares.
        self.forget();
        Ok(self.replan(Cause::Share))
    }

    fn fits(&self, core: Option<Core>, left: u8) -> Result<(), ShareError> {
        match core.map(Core::get) {
            Some(asked) if asked > left && !self.config.overcommit => {
                Err(ShareError::Overcommitted { asked, left })
            }
            _ => Ok(()),
        }
    }

    fn part(&self, group: &Group) -> f64 {
        (group.weight / self.weight).min(group.cap)
    }

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
    fn report_ns(&self) -> u64 {
        (self.repay_ns() / 2).min(REPORT_NS)
    }

    /// Works everything out again after vGPUs, shares or knobs changed.
    fn replan(&mut self, cause: Cause) -> Vec<Action> {
        self.changed = true;
        self.weigh();
        let mut actions = self.recap(cause);
        actions.extend(self.reslice(0.0, cause));
        actions
    }

    /// Promises, weights and caps of all.
    fn weigh(&mut self) {
        let policy = self.config.policy;
        let count = self.groups.len() as f64;
        let left = f64::from(self.left());
        let silent = || self.groups.values().filter(|group| group.share.core.is_none());
        let silent_parts: f64 = silent().map(Group::parts).sum();
        for group in self.groups.values_mut() {
            group.boost = 1.0;
            (group.promised, group.cap) = match (policy, group.share.core) {
                (Policy::BestEffort, _) => (group.parts(), 1.0),
                (Policy::EqualShare, _) => (100.0 / count, 1.0 / count),
                (Policy::FixedShare, _) => {
                    let part = 1.0 / f64::from(group.max_instances);
                    (100.0 * part, part)
                }
                (Policy::Weighted, Some(core)) => {
                    let core = f64::from(core.get());
                    (core, if group.share.mode == Mode::Hard { core / 100.0 } else { 1.0 })
                }
                (Policy::Weighted, None) => {
                    ((left * group.parts() / silent_parts).max(MIN_WEIGHT), 1.0)
                }
            };
            group.weight = group.promised;
        }
        if policy == Policy::Weighted {
            let extra = Extra::of(self.groups.values());
            for group in self.groups.values_mut() {
                group.weight = extra.weight(group);
            }
        }
        self.weight = self.groups.values().map(|group| group.weight).sum();
    }

    /// Tells the silicon, or the meters, about caps that changed.
    fn recap(&mut self, cause: Cause) -> Vec<Action> {
        let mut actions = Vec::new();
        let period = self.config.period;
        for (id, group) in &mut self.groups {
            let budget = if group.cap < 1.0 { Budget::part(group.cap, period) } else { None };
            if budget == group.budget {
                continue;
            }
            group.budget = budget;
            match (self.enforcement, budget) {
                (Enforcement::Budgets, _) => {
                    self.log.push(record(self.now_ns, *id, group, Decision::Budget(budget), cause));
                    actions.push(Action::SetBudget(*id, budget));
                }
                (Enforcement::Gates, Some(budget)) => {
                    group.fresh |= group.meter.is_none();
                    let now_ns = self.now_ns;
                    group
                        .meter
                        .get_or_insert(Meter::new(budget, now_ns))
                        .set_budget(budget, now_ns);
                }
                (Enforcement::Gates, None) => group.meter = None,
            }
        }
        if self.enforcement == Enforcement::Gates {
            self.gate(cause, &mut actions);
        }
        actions
    }

    /// Opens and closes gates as the meters say, and works out when that is to be done next.
    fn gate(&mut self, cause: Cause, actions: &mut Vec<Action>) {
        let mut next: Option<u64> = None;
        for (id, group) in &mut self.groups {
            let open = group.meter.is_none_or(|meter| meter.is_open());
            if open != group.gate_open {
                group.gate_open = open;
                group.gates_closed += u64::from(!open);
                self.log.push(record(self.now_ns, *id, group, Decision::Gate(open), cause));
                actions.push(Action::Gate(*id, open));
            }
            if let Some(meter) = group.meter {
                let wait = match (open, group.usage.runnable) {
                    _ if group.fresh => 0,
                    (true, true) => meter.left_ns(),
                    (true, false) => meter.left_ns().max(meter.budget().period_ns),
                    (false, _) => meter.opens_at_ns().saturating_sub(self.now_ns),
                };
                let at = self.now_ns.saturating_add(wait.max(MIN_GATE_NS));
                next = Some(next.map_or(at, |next| next.min(at)));
            }
        }
        self.next_gate_ns = next;
    }

    /// Takes a reading of the counters.
    fn read(&mut self, report: &UsageReport) -> Vec<Action> {
        if self.last_read_ns.is_some_and(|at| report.now_ns <= at) {
            return Vec::new();
        }
        self.last_read_ns = Some(report.now_ns);
        self.now_ns = self.now_ns.max(report.now_ns);
        for (id, usage) in &report.vgpus {
            let Some(group) = self.groups.get_mut(id) else { continue };
            if let Some(meter) = &mut group.meter {
                let fresh = std::mem::take(&mut group.fresh);
                let before_ns = if fresh { usage.engine_ns } else { group.usage.engine_ns };
                let used_ns = usage.engine_ns.saturating_sub(before_ns);
                meter.settle(report.now_ns, used_ns, usage.runnable || group.usage.runnable);
            }
            group.usage = *usage;
        }
        let mut actions = Vec::new();
        if self.enforcement == Enforcement::Gates {
            self.gate(Cause::Cap, &mut actions);
        }
        // Gates are decided often; for slices, intervals must be long enough to mean something.
        let soon = self.last_measured_ns.map(|at| at.saturating_add(self.report_ns() / 5));
        if soon.is_some_and(|soon| report.now_ns < soon) {
            return actions;
        }
        let changed = std::mem::take(&mut self.changed);
        let intervals = self.ledger.report(report);
        self.last_measured_ns = Some(report.now_ns);
        if !intervals.is_empty() {
            if !changed {
                let classes = self.config.policy == Policy::Weighted;
                let repay_ns = self.repay_ns();
                repay::repay(&mut self.groups, &intervals, repay_ns, classes);
            }
            actions.extend(self.reslice(TOLERANCE, Cause::Repay));
        }
        actions
    }

    /// Drops what is owed.
    fn forget(&mut self) {
        for group in self.groups.values_mut() {
            group.sated = false;
            group.owed_ns = 0.0;
            group.correction = 1.0;
        }
    }

    /// Works the slices out again; those that differ by more than `tolerance` from what the silicon has.
    fn reslice(&mut self, tolerance: f64, cause: Cause) -> Vec<Action> {
        let (low, high) = (MIN_SLICE.as_secs_f64(), MAX_SLICE.as_secs_f64());
        let mut least = f64::INFINITY;
        let mut most = 0.0_f64;
        let mut limit = f64::INFINITY;
        for group in self.groups.values() {
            least = least.min(group.weight);
            most = most.max(group.weight);
            if let Some(slice) = group.share.timeslice {
                limit = limit.min(slice.as_secs_f64() / group.weight);
            }
        }
        let mean = self.weight / self.groups.len() as f64;
        // As near to the configured mean as lets the shortest and then the longest slice keep its bound.
        let default = self.config.mean_slice().as_secs_f64();
        let scale = (default / mean).min(limit).max(low / least).min(high / most);
        let mut actions = Vec::new();
        for (id, group) in &mut self.groups {
            let longest = group.share.timeslice.map_or(high, |slice| slice.as_secs_f64());
            let wanted = group.weight * group.boost * scale * group.correction;
            let seconds = wanted.min(longest).clamp(low, high);
            let slice = Duration::try_from_secs_f64(seconds).unwrap_or(MIN_SLICE);
            let differs = group.slice.is_none_or(|had| {
                slice.abs_diff(had).as_secs_f64() > had.as_secs_f64() * tolerance
            });
            if differs {
                group.slice = Some(slice);
                self.log.push(record(self.now_ns, *id, group, Decision::Slice(slice), cause));
                actions.push(Action::SetTimeslice(*id, slice));
            }
        }
        actions
    }
}

fn hundredths(share: Share) -> u32 {
    share.core.map_or(0, |core| u32::from(core.get()))
}

fn record(now_ns: u64, vgpu: VgpuId, group: &Group, decision: Decision, cause: Cause) -> Record {
    Record {
        at_ns: now_ns,
        vgpu,
        decision,
        cause,
        engine_ns: group.usage.engine_ns,
        wait_ns: group.usage.wait_ns,
        owed_ns: group.owed_ns as i64,
    }
}
