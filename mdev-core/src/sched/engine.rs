//! The scheduler of one parent: events and a clock in; time slices, budgets and gates out.
//!
//! The runlist gives each group that has work its slice in turn, so among busy groups shares are as slices are.
//! Slices are in proportion to weights, their mean near the one configured. What was granted is not always what was
//! used (a kernel may run past its slice, a group may have short work only), so use is measured, and what a busy group
//! is owed is carried and worked off: its slice is scaled until the average is right.
//!
//! Where silicon does not preempt, whoever ran so far ahead that slices cannot repay it waits at its gate.
//!
//! Slices alone hold nobody back while others idle. Caps do: the silicon's own budgets where it has them, or else
//! gates that are decided here from the same meters.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::account::{Ledger, Measured};
use super::log::{Cause, Log};
use super::policy::{Config, Enforcement, MIN_SLICE, Policy, Silicon};
use super::share::{Core, Share};
use crate::ids::VgpuId;

mod ahead;
mod caps;
mod event;
mod group;
mod reading;
mod repay;
mod slices;
#[cfg(test)]
mod tests;
mod weights;

use ahead::Pace;
pub use event::{Action, Event, ShareError, Snapshot};
use group::Group;
use slices::Whom;
use weights::{Kind, Plan, Scales, Weights};

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

/// The scheduler of one parent.
#[derive(Clone, Debug)]
pub struct Scheduler {
    config: Config,
    silicon: Silicon,
    groups: BTreeMap<VgpuId, Group>,
    /// Sums over all of them, and what follows from those.
    weights: Weights,
    plan: Plan,
    /// Seconds of a slice for each base, by kind, as the silicon has them.
    scales: Scales,
    ledger: Ledger,
    log: Log,
    now_ns: u64,
    last_read_ns: Option<u64>,
    last_measured_ns: Option<u64>,
    /// When meters are to be looked at next.
    looks: BTreeSet<(u64, VgpuId)>,
    /// Weights have changed since the counters were read: that interval is nobody's fault.
    changed: bool,
    /// Who owes more than slices can repay.
    held: BTreeSet<VgpuId>,
    /// How much the engine is used.
    pace: Pace,
}

impl Scheduler {
    /// A parent without vGPUs, from `now_ns` on, by the clock of usage reports. Knobs out of their bounds are moved
    /// into them.
    pub fn new(config: Config, silicon: impl Into<Silicon>, now_ns: u64) -> Self {
        Self {
            config: config.clamped(),
            silicon: silicon.into(),
            groups: BTreeMap::new(),
            weights: Weights::default(),
            plan: Plan::default(),
            scales: [1.0; Kind::COUNT],
            ledger: Ledger::default(),
            log: Log::default(),
            now_ns,
            last_read_ns: None,
            last_measured_ns: None,
            looks: BTreeSet::new(),
            changed: false,
            held: BTreeSet::new(),
            pace: Pace::default(),
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
        100_u32.saturating_sub(self.weights.asked()) as u8
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
        Some(self.looks.first().map_or(report, |(look, _)| report.min(*look)))
    }

    /// Takes an event; what is to be done.
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
        share: Share,
        max_instances: u32,
    ) -> Result<Vec<Action>, ShareError> {
        if self.groups.contains_key(&id) {
            return Err(ShareError::Duplicate(id));
        }
        self.check(share)?;
        let group = Group::new(self.config.policy, share, max_instances);
        self.weights.insert(id, &group);
        self.groups.insert(id, group);
        self.ledger.open(id);
        let mut actions = self.replan(Whom::One(id, 0.0), Cause::Started);
        // It may be one that an earlier manager's policy had capped or closed.
        let capped = actions.iter().any(|act| matches!(act, Action::SetBudget(of, _) if *of == id));
        if self.silicon.enforcement == Enforcement::Budgets && !capped {
            actions.push(Action::SetBudget(id, None));
        }
        actions.push(Action::Gate(id, true));
        Ok(actions)
    }

    fn stop(&mut self, id: VgpuId) -> Vec<Action> {
        let Some(group) = self.groups.remove(&id) else { return Vec::new() };
        let had = self.plan.part(&group);
        self.weights.remove(id, &group);
        if let Some(look_ns) = group.look_ns {
            self.looks.remove(&(look_ns, id));
        }
        self.forget_held(id);
        self.ledger.close(id);
        if self.groups.is_empty() {
            return Vec::new();
        }
        self.replan(Whom::Gone(had), Cause::Stopped)
    }

    fn change(&mut self, id: VgpuId, share: Share) -> Result<Vec<Action>, ShareError> {
        let asked = self.groups.get(&id).ok_or(ShareError::Unknown(id))?.asked();
        let left = 100_u32.saturating_sub(self.weights.asked() - asked) as u8;
        self.fits(share.core, left)?;
        let Some(group) = self.groups.get_mut(&id) else { return Err(ShareError::Unknown(id)) };
        let (had, before) = (self.plan.part(group), group.clone());
        group.ask(self.config.policy, share);
        group.forget();
        group.changed = true;
        self.weights.change(id, &before, group);
        Ok(self.replan(Whom::One(id, had), Cause::Share))
    }

    fn configure(&mut self, config: Config) -> Vec<Action> {
        self.config = config.clamped();
        self.weights = Weights::default();
        for (id, group) in &mut self.groups {
            group.ask(self.config.policy, group.share);
            self.weights.insert(*id, group);
        }
        if self.groups.is_empty() {
            return Vec::new();
        }
        self.replan(Whom::All, Cause::Policy)
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
        self.plan.part(group).min(group.cap)
    }
}
