//! What vGPUs weigh: sums that are kept up to date, so that one vGPU more or less costs the same among ten and among
//! ten thousand.
//!
//! A weight is a base, which depends on the vGPU alone, times the factor of its kind, which depends on all. There are a
//! handful of kinds. When a vGPU comes, goes or changes, the factors are worked out from the sums, and that is all.

use std::collections::{BTreeMap, BTreeSet};

use super::group::Group;
use crate::ids::VgpuId;
use crate::sched::policy::{Config, MAX_SLICE, MIN_SLICE, Policy};
use crate::sched::share::{Core, Mode, Priority, Share};

/// What a vGPU without `core` weighs at least, in hundredths, so that it never starves.
const MIN_WEIGHT: f64 = 1.0;
/// Hundredths.
const WHOLE: f64 = 100.0;

/// vGPUs whose weights stay in proportion to each other, whatever the others do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// All of them, under policies that do not look at `core`.
    Plain,
    /// With `core`, and never more than that.
    Held,
    /// With `core`, and a part of what is left.
    Soft(Priority),
    /// Without `core`.
    Silent(Priority),
}

impl Kind {
    /// How many there are.
    pub(super) const COUNT: usize = 8;

    pub(super) const ALL: [Self; Self::COUNT] = [
        Self::Plain,
        Self::Held,
        Self::Soft(Priority::Low),
        Self::Soft(Priority::Normal),
        Self::Soft(Priority::High),
        Self::Silent(Priority::Low),
        Self::Silent(Priority::Normal),
        Self::Silent(Priority::High),
    ];

    /// The kind of a vGPU, and its base in it.
    pub(super) fn of(policy: Policy, share: Share, max_instances: u32) -> (Self, f64) {
        match (policy, share.core.map(Core::get).map(f64::from)) {
            (Policy::BestEffort, _) => (Self::Plain, f64::from(share.priority.parts())),
            (Policy::EqualShare, _) => (Self::Plain, 1.0),
            (Policy::FixedShare, _) => (Self::Plain, WHOLE / f64::from(max_instances.max(1))),
            (Policy::Weighted, Some(core)) if share.mode == Mode::Hard => (Self::Held, core),
            (Policy::Weighted, Some(core)) => (Self::Soft(share.priority), core),
            (Policy::Weighted, None) => (Self::Silent(share.priority), 1.0),
        }
    }

    pub(super) fn index(self) -> usize {
        match self {
            Self::Plain => 0,
            Self::Held => 1,
            Self::Soft(priority) => 2 + priority as usize,
            Self::Silent(priority) => 5 + priority as usize,
        }
    }

    /// Parts of what nobody was promised; none for those that may not have more.
    fn parts(self) -> f64 {
        match self {
            Self::Plain | Self::Held => 0.0,
            Self::Soft(priority) | Self::Silent(priority) => f64::from(priority.parts()),
        }
    }

    /// True where such a vGPU may have time that it was not promised.
    pub(super) fn takes_more(self) -> bool {
        self.parts() > 0.0
    }
}

/// Numbers above 0, some of them several times.
#[derive(Clone, Debug, Default)]
struct Bag(BTreeMap<u64, u32>);

impl Bag {
    // The bits of positive numbers are in the order of the numbers.
    fn insert(&mut self, number: f64) {
        *self.0.entry(number.to_bits()).or_default() += 1;
    }

    fn remove(&mut self, number: f64) {
        if let Some(count) = self.0.get_mut(&number.to_bits()) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(&number.to_bits());
            }
        }
    }

    fn least(&self) -> Option<f64> {
        self.0.keys().next().copied().map(f64::from_bits)
    }

    fn most(&self) -> Option<f64> {
        self.0.keys().next_back().copied().map(f64::from_bits)
    }
}

/// All of one kind.
#[derive(Clone, Debug, Default)]
struct Sums {
    base: f64,
    bases: Bag,
    /// Longest slices asked for, in seconds for each base.
    limits: Bag,
    members: BTreeSet<VgpuId>,
}

/// All vGPUs of a parent, by kind.
#[derive(Clone, Debug, Default)]
pub(super) struct Weights {
    sums: [Sums; Kind::COUNT],
    asked: u32,
}

impl Weights {
    /// How many vGPUs there are.
    fn count(&self) -> usize {
        self.sums.iter().map(|sums| sums.members.len()).sum()
    }

    /// Counts a vGPU in.
    pub(super) fn insert(&mut self, id: VgpuId, group: &Group) {
        self.add(group);
        self.sums[group.kind.index()].members.insert(id);
    }

    /// Counts a vGPU out.
    pub(super) fn remove(&mut self, id: VgpuId, group: &Group) {
        self.take(group);
        self.sums[group.kind.index()].members.remove(&id);
    }

    /// Counts what a vGPU asks for instead of what it asked for before.
    pub(super) fn change(&mut self, id: VgpuId, before: &Group, after: &Group) {
        self.take(before);
        self.add(after);
        if before.kind != after.kind {
            self.sums[before.kind.index()].members.remove(&id);
            self.sums[after.kind.index()].members.insert(id);
        }
    }

    fn add(&mut self, group: &Group) {
        let sums = &mut self.sums[group.kind.index()];
        sums.base += group.base;
        sums.bases.insert(group.base);
        if let Some(longest) = group.share.timeslice {
            sums.limits.insert(longest.as_secs_f64() / group.base);
        }
        self.asked += group.asked();
    }

    fn take(&mut self, group: &Group) {
        let sums = &mut self.sums[group.kind.index()];
        sums.bases.remove(group.base);
        if let Some(longest) = group.share.timeslice {
            sums.limits.remove(longest.as_secs_f64() / group.base);
        }
        // Nothing is left of the rounding of many sums.
        sums.base = if sums.bases.0.is_empty() { 0.0 } else { sums.base - group.base };
        self.asked -= group.asked();
    }

    /// Hundredths of the GPU that are asked for.
    pub(super) fn asked(&self) -> u32 {
        self.asked
    }

    /// Who is of a kind.
    pub(super) fn members(&self, kind: Kind) -> &BTreeSet<VgpuId> {
        &self.sums[kind.index()].members
    }

    /// The factors, from the sums.
    pub(super) fn plan(&self, policy: Policy) -> Plan {
        let count = |kind: Kind| self.sums[kind.index()].members.len() as f64;
        let sum = |of: &dyn Fn(Kind) -> f64| Kind::ALL.into_iter().map(of).sum::<f64>();
        let left = WHOLE - f64::from(self.asked.min(100));
        let silent = sum(&|kind| match kind {
            Kind::Silent(_) => count(kind) * kind.parts(),
            _ => 0.0,
        });
        let promise = Kind::ALL.map(|kind| match (kind, policy) {
            (Kind::Silent(_), _) => (left * kind.parts() / silent.max(1.0)).max(MIN_WEIGHT),
            (Kind::Plain, Policy::EqualShare) => WHOLE / count(kind).max(1.0),
            _ => 1.0,
        });
        let base = |kind: Kind| self.sums[kind.index()].base;
        let promised = |kind: Kind| base(kind) * promise[kind.index()];
        let extra = (WHOLE - sum(&promised)).max(0.0);
        let parts = sum(&|kind| promised(kind) * kind.parts());
        let more = |kind: Kind| {
            if kind.takes_more() && parts > 0.0 { extra * kind.parts() / parts } else { 0.0 }
        };
        let factor = Kind::ALL.map(|kind| promise[kind.index()] * (1.0 + more(kind)));
        Plan { promise, factor, total: sum(&|kind| base(kind) * factor[kind.index()]) }
    }

    /// Seconds of a slice for each base, by kind: in proportion to the factors, and with the mean as near to the
    /// configured one as lets the shortest and then the longest slice keep its bound.
    pub(super) fn scales(&self, plan: &Plan, config: &Config) -> Scales {
        let mean = plan.total / self.count() as f64;
        let bounds = self.bounds(&plan.factor);
        let scale = (config.mean_slice().as_secs_f64() / mean)
            .min(bounds.limit)
            .max(bounds.shortest)
            .min(bounds.longest);
        plan.factor.map(|factor| factor * scale)
    }

    /// Whether slices are out of their bounds with these scales, more than nothing.
    pub(super) fn breaks(&self, scales: &Scales) -> bool {
        const NOTHING: f64 = 1e-6;
        let Bounds { shortest, longest, limit } = self.bounds(scales);
        shortest > 1.0 + NOTHING || longest < 1.0 - NOTHING || limit < 1.0 - NOTHING
    }

    fn bounds(&self, scales: &Scales) -> Bounds {
        let (low, high) = (MIN_SLICE.as_secs_f64(), MAX_SLICE.as_secs_f64());
        let mut bounds = Bounds { shortest: 0.0, longest: f64::INFINITY, limit: f64::INFINITY };
        for (sums, scale) in self.sums.iter().zip(scales) {
            if let Some(least) = sums.bases.least() {
                bounds.shortest = bounds.shortest.max(low / (least * scale));
            }
            if let Some(most) = sums.bases.most() {
                bounds.longest = bounds.longest.min(high / (most * scale));
            }
            if let Some(limit) = sums.limits.least() {
                bounds.limit = bounds.limit.min(limit / scale);
            }
        }
        bounds
    }
}

/// Seconds of a slice for each base, by kind.
pub(super) type Scales = [f64; Kind::COUNT];

/// By how much all slices may be scaled.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// So much at least, or the shortest is too short.
    shortest: f64,
    /// So much at most, or the longest is too long.
    longest: f64,
    /// So much at most, or one is longer than its vGPU asked for.
    limit: f64,
}

/// What bases are multiplied with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    promise: [f64; Kind::COUNT],
    factor: [f64; Kind::COUNT],
    /// Sum of all weights.
    total: f64,
}

impl Default for Plan {
    fn default() -> Self {
        Self { promise: [1.0; Kind::COUNT], factor: [1.0; Kind::COUNT], total: 0.0 }
    }
}

impl Plan {
    /// What a vGPU is promised, in hundredths.
    pub(super) fn promised(&self, group: &Group) -> f64 {
        group.base * self.promise[group.kind.index()]
    }

    /// What its slice is in proportion to, while all are busy.
    pub(super) fn weight(&self, group: &Group) -> f64 {
        group.base * self.factor[group.kind.index()]
    }

    /// The part of the GPU that it gets while all are busy.
    pub(super) fn part(&self, group: &Group) -> f64 {
        self.weight(group) / self.total
    }
}
