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

use super::account::{Interval, Ledger, Measured};
use super::budget::{Budget, Meter};
use super::log::{Cause, Decision, Log, Record};
use super::policy::{Config, Enforcement, MAX_SLICE, MIN_SLICE, Policy};
use super::share::{Core, Mode, Share};
use crate::gpu::{Usage, UsageReport};
use crate::ids::VgpuId;

/// What a vGPU without `core` weighs at least, in hundredths, so that it never starves.
const MIN_WEIGHT: f64 = 1.0;
/// Time over which a busy vGPU is given back what it is owed, without averaging: two reports, so that it settles.
const REPAY_NS: u64 = 200_000_000;
/// That time lasts so many rounds of the runlist at least.
const ROUNDS: f64 = 4.0;
/// Bounds of that time with averaging.
const MIN_REPAY_NS: u64 = 20_000_000;
const MAX_REPAY_NS: u64 = 1_000_000_000;
/// How often counters are to be read at least.
const REPORT_NS: u64 = 100_000_000;
/// Gates are not decided more often than this.
const MIN_GATE_NS: u64 = 500_000;
/// How far a slice is scaled up or down, at most, to repay.
const MAX_CORRECTION: f64 = 8.0;
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
                self.repay(&intervals);
            }
            actions.extend(self.reslice(TOLERANCE, Cause::Repay));
        }
        actions
    }

    /// Charges what was used. Only busy vGPUs owe each other: one that was idle by choice lost nothing.
    fn repay(&mut self, intervals: &[Interval]) {
        let busy: Vec<_> = intervals.iter().filter(|interval| interval.busy).collect();
        self.boost(&busy);
        let used: f64 = busy.iter().map(|interval| interval.engine_ns as f64).sum();
        let dues = self.dues(&busy, used);
        // Where a round of turns takes longer than that, one interval says nothing about who had how much.
        let slices = busy.iter().filter_map(|interval| self.groups.get(&interval.vgpu)?.slice);
        let round_ns = slices.sum::<Duration>().as_nanos() as f64;
        let repay_ns = (self.repay_ns() as f64).max(ROUNDS * round_ns);
        for (interval, due) in busy.iter().zip(dues) {
            let Some(group) = self.groups.get_mut(&interval.vgpu) else { continue };
            if busy.len() < 2 || due <= 0.0 || used <= 0.0 {
                continue;
            }
            let full = due / used * repay_ns;
            let owed = group.owed_ns + due - interval.engine_ns as f64;
            // No more is carried than corrections can act on, or it would be repaid long after.
            group.owed_ns =
                owed.clamp((1.0 / MAX_CORRECTION - 1.0) * full, (MAX_CORRECTION - 1.0) * full);
            group.correction = 1.0 + group.owed_ns / full;
        }
        for interval in intervals.iter().filter(|interval| !interval.busy) {
            if let Some(group) = self.groups.get_mut(&interval.vgpu) {
                let kept = (1.0 - interval.elapsed_ns as f64 / repay_ns).max(0.0);
                group.owed_ns *= kept;
                group.correction = 1.0 + (group.correction - 1.0) * kept;
            }
        }
    }

    /// Gives the time that idle vGPUs leave to the busy ones, each class its part.
    fn boost(&mut self, busy: &[&Interval]) {
        if self.config.policy != Policy::Weighted {
            return;
        }
        for group in self.groups.values_mut() {
            group.boost = 1.0;
        }
        let takers = || {
            let groups = busy.iter().filter_map(|interval| self.groups.get(&interval.vgpu));
            groups.filter(|group| group.takes_more())
        };
        let mut classes = takers().map(|group| group.share.priority);
        let first = classes.next();
        // Within one class idle time goes by weights, as it does without being told to.
        if classes.all(|class| Some(class) == first) {
            return;
        }
        let all = busy.iter().filter_map(|interval| self.groups.get(&interval.vgpu));
        let extra = Extra::of(all);
        let (had, has) = takers()
            .map(|group| (group.weight, extra.weight(group)))
            .fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        for interval in busy {
            if let Some(group) = self.groups.get_mut(&interval.vgpu)
                && group.takes_more()
            {
                group.boost = extra.weight(group) * had / (has * group.weight);
            }
        }
    }

    /// What of the time that the busy vGPUs used was due to each: by weight, and none more than its cap.
    fn dues(&self, busy: &[&Interval], used: f64) -> Vec<f64> {
        struct Claim {
            index: usize,
            weight: f64,
            most: f64,
        }
        let mut claims: Vec<_> = busy
            .iter()
            .enumerate()
            .filter_map(|(index, interval)| {
                let group = self.groups.get(&interval.vgpu)?;
                let capped = group.cap < 1.0;
                let most =
                    if capped { group.cap * interval.elapsed_ns as f64 } else { f64::INFINITY };
                Some(Claim { index, weight: group.weight * group.boost, most })
            })
            .collect();
        // Those whose caps are the lowest for their weight come first: what they may not have, the rest gets.
        claims.sort_by(|a, b| (a.most / a.weight).total_cmp(&(b.most / b.weight)));
        let mut weight: f64 = claims.iter().map(|claim| claim.weight).sum();
        let mut rest = used;
        let mut dues = vec![0.0; busy.len()];
        for claim in claims {
            let due = (rest * claim.weight / weight).min(claim.most);
            dues[claim.index] = due;
            rest -= due;
            weight -= claim.weight;
        }
        dues
    }

    /// Drops what is owed.
    fn forget(&mut self) {
        for group in self.groups.values_mut() {
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

/// How time that none of some vGPUs was promised is divided among them.
#[derive(Clone, Copy, Debug)]
struct Extra {
    /// Hundredths that none was promised.
    left: f64,
    /// Sum of the parts of those that may have more.
    parts: f64,
}

impl Extra {
    fn of<'a>(groups: impl Iterator<Item = &'a Group>) -> Self {
        let mut extra = Self { left: 100.0, parts: 0.0 };
        for group in groups {
            extra.left -= group.promised;
            if group.takes_more() {
                extra.parts += group.promised * group.parts();
            }
        }
        extra.left = extra.left.max(0.0);
        extra
    }

    fn weight(&self, group: &Group) -> f64 {
        if group.takes_more() {
            group.promised * (1.0 + self.left * group.parts() / self.parts)
        } else {
            group.promised
        }
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;

    fn id(n: u8) -> VgpuId {
        VgpuId(Uuid::from_u128(u128::from(n)))
    }

    fn core(hundredths: u8) -> Option<Core> {
        Core::try_from(hundredths).ok()
    }

    fn started<'a>(id: VgpuId, core: Option<Core>) -> Event<'a> {
        Event::VgpuStarted { id, share: Share::of(core), max_instances: 8 }
    }

    fn changed<'a>(id: VgpuId, core: Option<Core>) -> Event<'a> {
        Event::ShareChanged { id, share: Share::of(core) }
    }

    fn scheduler() -> Scheduler {
        Scheduler::new(Config::new(Duration::from_millis(2)), Enforcement::Budgets)
    }

    #[test]
    fn a_vgpu_is_told_its_slice_and_others_theirs_where_it_changes() {
        let mut sched = scheduler();
        let ms = Duration::from_millis;
        let us = Duration::from_micros;
        let none = |id| Action::SetBudget(id, None);
        assert_eq!(
            sched.handle(started(id(1), core(80))).unwrap(),
            [Action::SetTimeslice(id(1), ms(2)), none(id(1)), Action::Gate(id(1), true)]
        );
        assert_eq!(
            sched.handle(started(id(2), core(20))).unwrap(),
            [
                Action::SetTimeslice(id(1), us(3200)),
                Action::SetTimeslice(id(2), us(800)),
                none(id(2)),
                Action::Gate(id(2), true)
            ]
        );
        assert_eq!(sched.entitled(id(2)), Some(0.2));
        assert_eq!(
            sched.handle(Event::VgpuStopped { id: id(1) }).unwrap(),
            [Action::SetTimeslice(id(2), ms(2))]
        );
        assert_eq!(sched.handle(Event::VgpuStopped { id: id(1) }).unwrap(), []);
    }

    #[test]
    fn more_than_the_whole_gpu_is_refused_with_what_is_left() {
        let mut sched = scheduler();
        sched.handle(started(id(1), core(80))).unwrap();
        let error = sched.handle(started(id(2), core(30))).unwrap_err();
        assert_eq!(
            error.to_string(),
            "Not enough of the GPU is left: core=30 asked, 20 of 100 left; \
             ask for 20 or less, or lower another vGPU's core"
        );
        sched.handle(started(id(2), core(20))).unwrap();
        let error = sched.check(Share::of(core(1))).unwrap_err();
        assert_eq!(
            error.to_string(),
            "Not enough of the GPU is left: core=1 asked, 0 of 100 left; \
             lower another vGPU's core, or leave core out"
        );
        assert_eq!(sched.check(Share::default()), Ok(()));
        // A change counts without what the vGPU had before.
        sched.handle(changed(id(2), core(10))).unwrap();
        sched.handle(changed(id(1), core(90))).unwrap();
        assert!(sched.handle(changed(id(1), core(91))).is_err());
        assert_eq!(sched.left(), 0);
    }

    #[test]
    fn events_for_vgpus_that_are_not_there_are_refused() {
        let mut sched = scheduler();
        let changed = sched.handle(changed(id(1), None));
        assert_eq!(changed, Err(ShareError::Unknown(id(1))));
        sched.handle(started(id(1), None)).unwrap();
        let again = sched.handle(started(id(1), None));
        assert_eq!(again, Err(ShareError::Duplicate(id(1))));
    }

    #[test]
    fn corrections_are_dropped_when_measurements_stop() {
        let mut sched = scheduler();
        sched.handle(started(id(1), core(50))).unwrap();
        sched.handle(started(id(2), core(50))).unwrap();
        let usage =
            |engine_ns, wait_ns| Usage { engine_ns, wait_ns, runnable: true, ..Usage::default() };
        let report = |now_ns, a, b| UsageReport {
            now_ns,
            vgpus: vec![(id(1), usage(a, b)), (id(2), usage(b, a))],
        };
        sched.handle(Event::UsageReport(&report(0, 0, 0))).unwrap();
        let used = report(100_000_000, 80_000_000, 20_000_000);
        let actions = sched.handle(Event::UsageReport(&used)).unwrap();
        assert_eq!(actions.len(), 2);
        assert!(sched.slice(id(1)) < sched.slice(id(2)));
        assert_eq!(sched.handle(Event::Tick { now_ns: 1_100_000_000 }).unwrap(), []);
        assert_eq!(sched.handle(Event::Tick { now_ns: 1_100_000_001 }).unwrap().len(), 2);
        assert_eq!(sched.slice(id(1)), sched.slice(id(2)));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Start(u8, Option<u8>),
        Stop(u8),
        Change(u8, Option<u8>),
        Policy(Policy),
        Report(u64, Vec<(u8, u64, u64)>),
        Tick(u64),
    }

    fn any_step() -> impl Strategy<Value = Step> {
        let asked = || prop::option::of(1..=100_u8);
        prop_oneof![
            (0..12_u8, asked()).prop_map(|(id, core)| Step::Start(id, core)),
            (0..12_u8).prop_map(Step::Stop),
            (0..12_u8, asked()).prop_map(|(id, core)| Step::Change(id, core)),
            prop::sample::select(&Policy::ALL[..]).prop_map(Step::Policy),
            (any::<u64>(), prop::collection::vec(any::<(u8, u64, u64)>(), 0..12))
                .prop_map(|(at, usage)| Step::Report(at, usage)),
            any::<u64>().prop_map(Step::Tick),
        ]
    }

    proptest! {
        #[test]
        fn whatever_happens_the_invariants_hold(steps in prop::collection::vec(any_step(), 0..80)) {
            let mut sched = scheduler();
            let mut slices = BTreeMap::new();
            for step in steps {
                let ask = |asked: Option<u8>| asked.and_then(core);
                let actions = match step {
                    Step::Start(n, asked) => {
                        sched.handle(started(id(n), ask(asked)))
                    }
                    Step::Stop(n) => {
                        slices.remove(&id(n));
                        sched.handle(Event::VgpuStopped { id: id(n) })
                    }
                    Step::Change(n, asked) => {
                        sched.handle(changed(id(n), ask(asked)))
                    }
                    Step::Policy(policy) => sched.handle(Event::ConfigChanged(
                        Config { policy, ..sched.config() }
                    )),
                    Step::Report(now_ns, usages) => {
                        let vgpus = usages.into_iter().map(|(n, engine_ns, wait_ns)| {
                            let runnable = n % 4 != 0;
                            (id(n % 12), Usage { engine_ns, wait_ns, runnable, ..Usage::default() })
                        });
                        let report = UsageReport { now_ns, vgpus: vgpus.collect() };
                        sched.handle(Event::UsageReport(&report))
                    }
                    Step::Tick(now_ns) => sched.handle(Event::Tick { now_ns }),
                };
                for action in actions.unwrap_or_default() {
                    if let Action::SetTimeslice(id, slice) = action {
                        prop_assert!(sched.groups.contains_key(&id), "told of one that is gone");
                        prop_assert!((MIN_SLICE..=MAX_SLICE).contains(&slice));
                        slices.insert(id, slice);
                    }
                }
                // What the silicon was told is what the scheduler thinks it has.
                prop_assert_eq!(slices.len(), sched.groups.len());
                for (id, slice) in &slices {
                    prop_assert_eq!(sched.slice(*id), Some(*slice));
                }
                let asked: u32 = sched
                    .groups
                    .values()
                    .filter_map(|group| group.share.core)
                    .map(|core| u32::from(core.get()))
                    .sum();
                prop_assert_eq!(asked + u32::from(sched.left()), 100);
            }
        }
    }
}
