//! Weights of vGPUs, from sums that make a change of one vGPU as cheap among ten thousand as among
//! ten.
//!
//! A weight is a base, which depends on the vGPU alone, times the factor of the vGPU's class, which
//! depends on all vGPUs. When a vGPU starts, stops or changes, only the factors of the few classes
//! are worked out again.

use std::collections::{BTreeMap, BTreeSet};

use super::share::Share;
use super::weight_class::{WHOLE, WeightClass};
use crate::ids::VgpuId;
use crate::sched::policy::{Config, MAX_SLICE, MIN_SLICE, Policy};

/// Least promise, in percent, for a vGPU without `core`, so that it never starves.
const MIN_PROMISE: f64 = 1.0;

/// Sorted multiset of positive numbers.
#[derive(Clone, Debug, Default)]
struct Multiset(BTreeMap<u64, u32>);

impl Multiset {
    // The bits of positive numbers sort like the numbers.
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

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn min(&self) -> Option<f64> {
        self.0.keys().next().copied().map(f64::from_bits)
    }

    fn max(&self) -> Option<f64> {
        self.0.keys().next_back().copied().map(f64::from_bits)
    }
}

/// Sums over the vGPUs of one class.
#[derive(Clone, Debug, Default)]
struct ClassSums {
    /// Sum of the base weights.
    base: f64,
    bases: Multiset,
    /// Requested limits of slices, in seconds for each unit of base weight.
    limits: Multiset,
    members: BTreeSet<VgpuId>,
}

/// Sums over all vGPUs of a parent, by class.
#[derive(Clone, Debug, Default)]
pub(super) struct Weights {
    sums: [ClassSums; WeightClass::COUNT],
    requested: u32,
}

impl Weights {
    fn count(&self) -> usize {
        self.sums.iter().map(|sums| sums.members.len()).sum()
    }

    /// Adds a vGPU.
    pub(super) fn insert(&mut self, id: VgpuId, share: &Share) {
        self.add(share);
        self.sums[share.class().index()].members.insert(id);
    }

    /// Removes a vGPU.
    pub(super) fn remove(&mut self, id: VgpuId, share: &Share) {
        self.subtract(share);
        self.sums[share.class().index()].members.remove(&id);
    }

    /// Replaces a vGPU's share.
    pub(super) fn change(&mut self, id: VgpuId, before: &Share, after: &Share) {
        self.subtract(before);
        self.add(after);
        if before.class() != after.class() {
            self.sums[before.class().index()].members.remove(&id);
            self.sums[after.class().index()].members.insert(id);
        }
    }

    fn add(&mut self, share: &Share) {
        let sums = &mut self.sums[share.class().index()];
        sums.base += share.base();
        sums.bases.insert(share.base());
        if let Some(limit) = share.slice_limit() {
            sums.limits.insert(limit);
        }
        self.requested += share.requested();
    }

    fn subtract(&mut self, share: &Share) {
        let sums = &mut self.sums[share.class().index()];
        sums.bases.remove(share.base());
        if let Some(limit) = share.slice_limit() {
            sums.limits.remove(limit);
        }
        // An empty class drops the rounding errors of its sum.
        sums.base = if sums.bases.is_empty() { 0.0 } else { sums.base - share.base() };
        self.requested -= share.requested();
    }

    /// Returns the requested percentage of the GPU. Overcommitted, the sum exceeds 100.
    pub(super) fn requested(&self) -> u32 {
        self.requested
    }

    /// Returns the vGPUs of a class.
    pub(super) fn members(&self, class: WeightClass) -> &BTreeSet<VgpuId> {
        &self.sums[class.index()].members
    }

    /// Works out the factors of the classes.
    pub(super) fn plan(&self, policy: Policy) -> Plan {
        let count = |class: WeightClass| self.sums[class.index()].members.len() as f64;
        let sum =
            |of: &dyn Fn(WeightClass) -> f64| WeightClass::ALL.into_iter().map(of).sum::<f64>();
        let left = WHOLE - f64::from(self.requested.min(100));
        let remainder_parts = sum(&|class| match class {
            WeightClass::Remainder(_) => count(class) * class.parts(),
            _ => 0.0,
        });
        let promise = WeightClass::ALL.map(|class| match (class, policy) {
            (WeightClass::Remainder(_), _) => {
                (left * class.parts() / remainder_parts.max(1.0)).max(MIN_PROMISE)
            }
            (WeightClass::Plain, Policy::EqualShare) => WHOLE / count(class).max(1.0),
            _ => 1.0,
        });
        let base = |class: WeightClass| self.sums[class.index()].base;
        let promised = |class: WeightClass| base(class) * promise[class.index()];
        let spare = (WHOLE - sum(&promised)).max(0.0);
        let parts = sum(&|class| promised(class) * class.parts());
        let extra = |class: WeightClass| {
            if class.takes_spare_time() && parts > 0.0 {
                spare * class.parts() / parts
            } else {
                0.0
            }
        };
        let factor = WeightClass::ALL.map(|class| promise[class.index()] * (1.0 + extra(class)));
        Plan { promise, factor, total: sum(&|class| base(class) * factor[class.index()]) }
    }

    /// Works out the scales of slices, in proportion to the factors of the classes.
    ///
    /// The mean slice is as near to the configured one as the bounds allow. In a conflict, the
    /// bound of the longest slice comes first, then that of the shortest, then requested limits.
    pub(super) fn scales(&self, plan: &Plan, config: &Config) -> Scales {
        let mean = plan.total / self.count() as f64;
        let bounds = self.bounds(&plan.factor);
        let scale = (config.mean_slice().as_secs_f64() / mean)
            .min(bounds.limit)
            .max(bounds.shortest)
            .min(bounds.longest);
        plan.factor.map(|factor| factor * scale)
    }

    /// Returns true if slices with these scales violate their bounds.
    pub(super) fn violates_bounds(&self, scales: &Scales) -> bool {
        const ROUNDING: f64 = 1e-6;
        let Bounds { shortest, longest, limit } = self.bounds(scales);
        shortest > 1.0 + ROUNDING || longest < 1.0 - ROUNDING || limit < 1.0 - ROUNDING
    }

    fn bounds(&self, scales: &Scales) -> Bounds {
        let (low, high) = (MIN_SLICE.as_secs_f64(), MAX_SLICE.as_secs_f64());
        let mut bounds = Bounds { shortest: 0.0, longest: f64::INFINITY, limit: f64::INFINITY };
        for (sums, scale) in self.sums.iter().zip(scales) {
            if let Some(least) = sums.bases.min() {
                bounds.shortest = bounds.shortest.max(low / (least * scale));
            }
            if let Some(most) = sums.bases.max() {
                bounds.longest = bounds.longest.min(high / (most * scale));
            }
            if let Some(limit) = sums.limits.min() {
                bounds.limit = bounds.limit.min(limit / scale);
            }
        }
        bounds
    }
}

/// Seconds of slice for each unit of base weight, by class.
pub(super) type Scales = [f64; WeightClass::COUNT];

/// Bounds of a factor that scales all slices.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Least factor at which the shortest slice is long enough.
    shortest: f64,
    /// Largest factor at which the longest slice is short enough.
    longest: f64,
    /// Largest factor at which no slice exceeds its requested limit.
    limit: f64,
}

/// Factors of base weights, by class.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    promise: [f64; WeightClass::COUNT],
    factor: [f64; WeightClass::COUNT],
    /// Sum of all weights.
    total: f64,
}

impl Default for Plan {
    fn default() -> Self {
        Self { promise: [1.0; WeightClass::COUNT], factor: [1.0; WeightClass::COUNT], total: 0.0 }
    }
}

impl Plan {
    /// Returns the percentage of the GPU promised to a vGPU.
    pub(super) fn promised(&self, share: &Share) -> f64 {
        share.base() * self.promise[share.class().index()]
    }

    /// Returns the weight of a vGPU. While all vGPUs are busy, slices are in proportion to weights.
    pub(super) fn weight(&self, share: &Share) -> f64 {
        share.base() * self.factor[share.class().index()]
    }

    /// Returns the part of the GPU, 0 to 1, that a vGPU gets while all vGPUs are busy.
    pub(super) fn part(&self, share: &Share) -> f64 {
        self.weight(share) / self.total
    }
}
