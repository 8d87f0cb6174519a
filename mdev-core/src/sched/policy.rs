//! The scheduling policy of one parent: events and a clock in, time slices and gates out.
//!
//! The runlist gives each group that has work its slice in turn, so among busy groups shares are as slices are.
//! Slices are in proportion to weights, their mean near the parent's default slice. What was granted is not
//! always what was used (a kernel may run past its slice, a group may have short work only), so use is measured, and
//! what a busy group is owed is carried and worked off: its slice is scaled until the average is right.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Core;
use super::account::{Interval, Ledger, Measured};
use crate::gpu::UsageReport;
use crate::ids::VgpuId;

/// The shortest slice: below it the runlist would do little but switch.
pub const MIN_SLICE: Duration = Duration::from_micros(100);
/// The longest slice: above it the others would stutter.
pub const MAX_SLICE: Duration = Duration::from_millis(30);

/// What a vGPU without `core` weighs at least, in hundredths, so that it never starves.
const MIN_WEIGHT: f64 = 1.0;
/// Time over which a busy vGPU is given back what it is owed, in nanoseconds: two reports, so that it settles.
const REPAY_NS: f64 = 200e6;
/// How far a slice is scaled up or down, at most, to repay.
const MAX_CORRECTION: f64 = 8.0;
/// Corrections that change a slice by less than this part are not worth an action.
const TOLERANCE: f64 = 0.01;
/// Without measurements for this long, what is owed is not known any more.
const STALE_NS: u64 = 1_000_000_000;

/// How a parent's time is divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Equal slices among those that have work. `core` means nothing.
    BestEffort,
    /// At least `core` hundredths while others contend; those that did not ask have equal parts of what is left.
    ///
    /// Where no vGPU asks, this is best effort.
    #[default]
    Weighted,
}

/// What a parent's scheduler is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// How time is divided.
    pub policy: Policy,
    /// Mean of all slices, where the bounds of a slice allow it.
    pub default_slice: Duration,
}

/// What happens to a scheduler.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A vGPU was admitted (or adopted), with the share that it asks for.
    VgpuStarted {
        /// Which one.
        id: VgpuId,
        /// `core`, where it has that attribute.
        core: Option<Core>,
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
        core: Option<Core>,
    },
    /// The parent's policy is another one from now on.
    PolicyChanged(Policy),
    /// The silicon's counters were read: every 100 ms or so.
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

#[derive(Clone, Debug)]
struct Group {
    core: Option<Core>,
    /// Engine time that it is owed by the others, in nanoseconds; negative where it owes.
    owed_ns: f64,
    /// What its slice is scaled by to repay that.
    correction: f64,
    /// The slice that the silicon has.
    slice: Option<Duration>,
}

/// The scheduler of one parent.
#[derive(Clone, Debug)]
pub struct Scheduler {
    config: Config,
    groups: BTreeMap<VgpuId, Group>,
    ledger: Ledger,
    last_measured_ns: Option<u64>,
    /// Weights have changed since the counters were read: that interval is nobody's fault.
    changed: bool,
}

impl Scheduler {
    /// A parent without vGPUs.
    pub fn new(config: Config) -> Self {
        let default_slice = config.default_slice.clamp(MIN_SLICE, MAX_SLICE);
        Self {
            config: Config { default_slice, ..config },
            groups: BTreeMap::new(),
            ledger: Ledger::default(),
            last_measured_ns: None,
            changed: false,
        }
    }

    /// The policy in force.
    pub fn policy(&self) -> Policy {
        self.config.policy
    }

    /// Hundredths of the GPU that no vGPU has asked for.
    pub fn left(&self) -> u8 {
        self.left_without(None)
    }

    /// Whether one more vGPU that asks for `core` may start.
    pub fn check(&self, core: Option<Core>) -> Result<(), ShareError> {
        fits(core, self.left())
    }

    /// The part of the GPU that a vGPU gets while all are busy, 0 to 1.
    pub fn entitled(&self, id: VgpuId) -> Option<f64> {
        let weights = self.weights();
        let total: f64 = weights.values().sum();
        weights.get(&id).map(|weight| weight / total)
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

    /// Takes an event; what is to be done.
    pub fn handle(&mut self, event: Event<'_>) -> Result<Vec<Action>, ShareError> {
        match event {
            Event::VgpuStarted { id, core } => self.start(id, core),
            Event::VgpuStopped { id } => {
                self.groups.remove(&id);
                self.ledger.close(id);
                self.changed = true;
                Ok(self.reslice(0.0))
            }
            Event::ShareChanged { id, core } => self.change(id, core),
            Event::PolicyChanged(policy) => {
                self.config.policy = policy;
                self.forget();
                Ok(self.reslice(0.0))
            }
            Event::UsageReport(report) => {
                let changed = std::mem::take(&mut self.changed);
                let intervals = self.ledger.report(report);
                if intervals.is_empty() {
                    return Ok(Vec::new());
                }
                self.last_measured_ns = Some(report.now_ns);
                if !changed {
                    self.repay(&intervals);
                }
                Ok(self.reslice(TOLERANCE))
            }
            Event::Tick { now_ns } => {
                let measured_ns = *self.last_measured_ns.get_or_insert(now_ns);
                if now_ns.saturating_sub(measured_ns) <= STALE_NS {
                    return Ok(Vec::new());
                }
                self.forget();
                Ok(self.reslice(0.0))
            }
        }
    }

    fn start(&mut self, id: VgpuId, core: Option<Core>) -> Result<Vec<Action>, ShareError> {
        if self.groups.contains_key(&id) {
            return Err(ShareError::Duplicate(id));
        }
        self.check(core)?;
        self.groups.insert(id, Group { core, owed_ns: 0.0, correction: 1.0, slice: None });
        self.ledger.open(id);
        self.changed = true;
        let mut actions = self.reslice(0.0);
        // It may be one that an earlier manager's policy had closed.
        actions.push(Action::Gate(id, true));
        Ok(actions)
    }

    fn change(&mut self, id: VgpuId, core: Option<Core>) -> Result<Vec<Action>, ShareError> {
        if !self.groups.contains_key(&id) {
            return Err(ShareError::Unknown(id));
        }
        fits(core, self.left_without(Some(id)))?;
        if let Some(group) = self.groups.get_mut(&id) {
            group.core = core;
        }
        // What was owed was owed at the old shares.
        self.forget();
        Ok(self.reslice(0.0))
    }

    fn left_without(&self, id: Option<VgpuId>) -> u8 {
        let others = self.groups.iter().filter(|(other, _)| Some(**other) != id);
        let asked = others.filter_map(|(_, group)| group.core).map(Core::get);
        asked.fold(100, u8::saturating_sub)
    }

    /// What each vGPU weighs: under `weighted`, the hundredths of the GPU that it gets.
    fn weights(&self) -> BTreeMap<VgpuId, f64> {
        let silent = self.groups.values().filter(|group| group.core.is_none()).count();
        let rest = (f64::from(self.left()) / silent as f64).max(MIN_WEIGHT);
        let weigh = |group: &Group| match (self.config.policy, group.core) {
            (Policy::BestEffort, _) => 1.0,
            (Policy::Weighted, Some(core)) => f64::from(core.get()),
            (Policy::Weighted, None) => rest,
        };
        self.groups.iter().map(|(id, group)| (*id, weigh(group))).collect()
    }

    /// Charges what was used. Only busy vGPUs owe each other: one that was idle by choice lost nothing.
    fn repay(&mut self, intervals: &[Interval]) {
        let weights = self.weights();
        let weigh = |id: &VgpuId| weights.get(id).copied().unwrap_or(0.0);
        let busy = || intervals.iter().filter(|interval| interval.busy);
        let used: f64 = busy().map(|interval| interval.engine_ns as f64).sum();
        let weight: f64 = busy().map(|interval| weigh(&interval.vgpu)).sum();
        let contended = busy().count() > 1;
        for interval in intervals {
            let Some(group) = self.groups.get_mut(&interval.vgpu) else { continue };
            if interval.busy && contended {
                let due = weigh(&interval.vgpu) / weight;
                let full = due * REPAY_NS;
                let owed = group.owed_ns + due * used - interval.engine_ns as f64;
                // No more is carried than corrections can act on, or it would be repaid long after.
                group.owed_ns =
                    owed.clamp((1.0 / MAX_CORRECTION - 1.0) * full, (MAX_CORRECTION - 1.0) * full);
                group.correction = 1.0 + group.owed_ns / full;
            } else if !interval.busy {
                let kept = (1.0 - interval.elapsed_ns as f64 / REPAY_NS).max(0.0);
                group.owed_ns *= kept;
                group.correction = 1.0 + (group.correction - 1.0) * kept;
            }
        }
    }

    /// Drops what is owed.
    fn forget(&mut self) {
        self.changed = true;
        for group in self.groups.values_mut() {
            group.owed_ns = 0.0;
            group.correction = 1.0;
        }
    }

    /// Works the slices out again; those that differ by more than `tolerance` from what the silicon has.
    fn reslice(&mut self, tolerance: f64) -> Vec<Action> {
        let weights = self.weights();
        let (low, high) = (MIN_SLICE.as_secs_f64(), MAX_SLICE.as_secs_f64());
        let mean = weights.values().sum::<f64>() / weights.len() as f64;
        let least = weights.values().copied().fold(f64::INFINITY, f64::min);
        let most = weights.values().copied().fold(0.0, f64::max);
        // As near to the default as lets the shortest and then the longest slice keep its bound.
        let default = self.config.default_slice.as_secs_f64();
        let scale = (default / mean).max(low / least).min(high / most);
        let mut actions = Vec::new();
        for (id, group) in &mut self.groups {
            let weight = weights.get(id).copied().unwrap_or(MIN_WEIGHT);
            let seconds = (weight * scale * group.correction).clamp(low, high);
            let slice = Duration::try_from_secs_f64(seconds).unwrap_or(MIN_SLICE);
            let differs = group.slice.is_none_or(|had| {
                slice.abs_diff(had).as_secs_f64() > had.as_secs_f64() * tolerance
            });
            if differs {
                group.slice = Some(slice);
                actions.push(Action::SetTimeslice(*id, slice));
            }
        }
        actions
    }
}

fn fits(core: Option<Core>, left: u8) -> Result<(), ShareError> {
    match core.map(Core::get) {
        Some(asked) if asked > left => Err(ShareError::Overcommitted { asked, left }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;
    use crate::gpu::Usage;

    fn id(n: u8) -> VgpuId {
        VgpuId(Uuid::from_u128(u128::from(n)))
    }

    fn core(hundredths: u8) -> Option<Core> {
        Core::try_from(hundredths).ok()
    }

    fn scheduler() -> Scheduler {
        let default_slice = Duration::from_millis(2);
        Scheduler::new(Config { policy: Policy::Weighted, default_slice })
    }

    #[test]
    fn a_vgpu_is_told_its_slice_and_others_theirs_where_it_changes() {
        let mut sched = scheduler();
        let ms = Duration::from_millis;
        let us = Duration::from_micros;
        let started = |id, core| Event::VgpuStarted { id, core };
        assert_eq!(
            sched.handle(started(id(1), core(80))).unwrap(),
            [Action::SetTimeslice(id(1), ms(2)), Action::Gate(id(1), true)]
        );
        assert_eq!(
            sched.handle(started(id(2), core(20))).unwrap(),
            [
                Action::SetTimeslice(id(1), us(3200)),
                Action::SetTimeslice(id(2), us(800)),
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
        sched.handle(Event::VgpuStarted { id: id(1), core: core(80) }).unwrap();
        let error = sched.handle(Event::VgpuStarted { id: id(2), core: core(30) }).unwrap_err();
        assert_eq!(
            error.to_string(),
            "Not enough of the GPU is left: core=30 asked, 20 of 100 left; \
             ask for 20 or less, or lower another vGPU's core"
        );
        sched.handle(Event::VgpuStarted { id: id(2), core: core(20) }).unwrap();
        let error = sched.check(core(1)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "Not enough of the GPU is left: core=1 asked, 0 of 100 left; \
             lower another vGPU's core, or leave core out"
        );
        assert_eq!(sched.check(None), Ok(()));
        // A change counts without what the vGPU had before.
        sched.handle(Event::ShareChanged { id: id(2), core: core(10) }).unwrap();
        sched.handle(Event::ShareChanged { id: id(1), core: core(90) }).unwrap();
        assert!(sched.handle(Event::ShareChanged { id: id(1), core: core(91) }).is_err());
        assert_eq!(sched.left(), 0);
    }

    #[test]
    fn events_for_vgpus_that_are_not_there_are_refused() {
        let mut sched = scheduler();
        let changed = sched.handle(Event::ShareChanged { id: id(1), core: None });
        assert_eq!(changed, Err(ShareError::Unknown(id(1))));
        sched.handle(Event::VgpuStarted { id: id(1), core: None }).unwrap();
        let again = sched.handle(Event::VgpuStarted { id: id(1), core: None });
        assert_eq!(again, Err(ShareError::Duplicate(id(1))));
    }

    #[test]
    fn corrections_are_dropped_when_measurements_stop() {
        let mut sched = scheduler();
        sched.handle(Event::VgpuStarted { id: id(1), core: core(50) }).unwrap();
        sched.handle(Event::VgpuStarted { id: id(2), core: core(50) }).unwrap();
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
        Policy(bool),
        Report(u64, Vec<(u8, u64, u64)>),
        Tick(u64),
    }

    fn any_step() -> impl Strategy<Value = Step> {
        let asked = || prop::option::of(1..=100_u8);
        prop_oneof![
            (0..12_u8, asked()).prop_map(|(id, core)| Step::Start(id, core)),
            (0..12_u8).prop_map(Step::Stop),
            (0..12_u8, asked()).prop_map(|(id, core)| Step::Change(id, core)),
            any::<bool>().prop_map(Step::Policy),
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
                        sched.handle(Event::VgpuStarted { id: id(n), core: ask(asked) })
                    }
                    Step::Stop(n) => {
                        slices.remove(&id(n));
                        sched.handle(Event::VgpuStopped { id: id(n) })
                    }
                    Step::Change(n, asked) => {
                        sched.handle(Event::ShareChanged { id: id(n), core: ask(asked) })
                    }
                    Step::Policy(weighted) => sched.handle(Event::PolicyChanged(
                        if weighted { Policy::Weighted } else { Policy::BestEffort }
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
                    .filter_map(|group| group.core)
                    .map(|core| u32::from(core.get()))
                    .sum();
                prop_assert_eq!(asked + u32::from(sched.left()), 100);
            }
        }
    }
}
