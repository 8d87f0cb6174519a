//! Share of one vGPU: its request, its weight and its time slice.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::weight_class::WeightClass;
use crate::sched::policy::{MAX_SLICE, MIN_SLICE, Policy};
use crate::sched::share::{Core, Mode, Priority, ShareRequest};

/// Share of one vGPU, and the time slice that implements the share.
///
/// The class and the base weight always match the request and the policy of the last
/// [`Self::apply_policy`]. A slice is at most [`MAX_SLICE`].
#[derive(Clone, Debug)]
pub(super) struct Share {
    request: ShareRequest,
    max_instances: u32,
    class: WeightClass,
    /// Weight in proportion to other vGPUs of the class.
    base: f64,
    /// Scale of the weight while vGPUs of different priorities divide idle time.
    boost: f64,
    /// The slice that the GPU was told.
    slice: Option<Duration>,
    /// The request is newer than the last reading, so the interval before says nothing about it.
    changed: bool,
}

impl Share {
    pub(super) fn new(policy: Policy, request: ShareRequest, max_instances: u32) -> Self {
        let max_instances = max_instances.max(1);
        let (class, base) = WeightClass::of(policy, request, max_instances);
        Self { request, max_instances, class, base, boost: 1.0, slice: None, changed: true }
    }

    /// Replaces the request.
    pub(super) fn replace(&mut self, policy: Policy, request: ShareRequest) {
        self.request = request;
        self.changed = true;
        self.apply_policy(policy);
    }

    /// Works out the class and the base weight under a policy.
    pub(super) fn apply_policy(&mut self, policy: Policy) {
        (self.class, self.base) = WeightClass::of(policy, self.request, self.max_instances);
    }

    pub(super) fn request(&self) -> ShareRequest {
        self.request
    }

    /// Returns the requested percentage of the GPU: 0 without `core`.
    pub(super) fn requested(&self) -> u32 {
        self.request.core.map(Core::get).map_or(0, u32::from)
    }

    pub(super) fn priority(&self) -> Priority {
        self.request.priority
    }

    /// Returns the requested limit of the slice, in seconds for each unit of base weight.
    pub(super) fn slice_limit(&self) -> Option<f64> {
        self.request.timeslice.map(|longest| longest.as_secs_f64() / self.base)
    }

    /// Returns the largest part of the GPU that the vGPU may get, among `count` vGPUs.
    pub(super) fn max_part(&self, policy: Policy, count: f64) -> f64 {
        match (policy, self.request.core) {
            (Policy::EqualShare, _) => 1.0 / count,
            (Policy::FixedShare, _) => 1.0 / f64::from(self.max_instances),
            (Policy::Weighted, Some(core)) if self.request.mode == Mode::Hard => {
                f64::from(core.get()) / 100.0
            }
            _ => 1.0,
        }
    }

    pub(super) fn class(&self) -> WeightClass {
        self.class
    }

    pub(super) fn base(&self) -> f64 {
        self.base
    }

    pub(super) fn boost(&self) -> f64 {
        self.boost
    }

    pub(super) fn set_boost(&mut self, boost: f64) {
        self.boost = boost;
    }

    pub(super) fn reset_boost(&mut self) {
        self.boost = 1.0;
    }

    pub(super) fn slice(&self) -> Option<Duration> {
        self.slice
    }

    /// Sets the slice to base weight x `scale` x boost x `correction`, within `bounds` and those of
    /// every slice.
    ///
    /// `scale` is in seconds for each unit of base weight. Returns the new slice, or `None` if it
    /// differs from the slice before by no more than the part `tolerance`.
    pub(super) fn reslice(
        &mut self,
        scale: f64,
        correction: f64,
        bounds: RangeInclusive<Duration>,
        tolerance: f64,
    ) -> Option<Duration> {
        let (shortest, longest) = bounds.into_inner();
        let longest = self.max_slice().min(longest).max(shortest);
        let wanted = self.wanted_seconds(scale, correction);
        let seconds = wanted.clamp(shortest.as_secs_f64(), longest.as_secs_f64());
        let slice = Duration::try_from_secs_f64(seconds).unwrap_or(shortest);
        let differs =
            |had: Duration| slice.abs_diff(had).as_secs_f64() > had.as_secs_f64() * tolerance;
        if !self.slice.is_none_or(differs) {
            return None;
        }
        self.slice = Some(slice);
        Some(slice)
    }

    /// Returns the slice that the weight gives, within the bounds. `scale` is in seconds for each
    /// unit of base weight.
    pub(super) fn base_slice(&self, scale: f64) -> Duration {
        let seconds = self.wanted_seconds(scale, 1.0);
        let longest = self.max_slice().max(MIN_SLICE);
        Duration::try_from_secs_f64(seconds).unwrap_or(longest).clamp(MIN_SLICE, longest)
    }

    /// Returns the unbounded slice in proportion to the longest slice: above 1 exceeds the bound.
    pub(super) fn slice_excess(&self, scale: f64, correction: f64) -> f64 {
        self.wanted_seconds(scale, correction) / self.max_slice().as_secs_f64()
    }

    /// Returns the lead up to which slices are trusted to repay a debt, in nanoseconds.
    ///
    /// The lead exceeds any engine time of a vGPU that keeps to its slice.
    pub(super) fn max_lead_ns(&self) -> f64 {
        self.slice.map_or(MAX_SLICE, |slice| MAX_SLICE.max(slice * 2)).as_nanos() as f64
    }

    /// Returns true if the request is newer than the last reading of the counters.
    pub(super) fn has_changed(&self) -> bool {
        self.changed
    }

    /// Notes a reading of the counters.
    pub(super) fn mark_measured(&mut self) {
        self.changed = false;
    }

    fn wanted_seconds(&self, scale: f64, correction: f64) -> f64 {
        self.base * scale * self.boost * correction
    }

    fn max_slice(&self) -> Duration {
        self.request.timeslice.unwrap_or(MAX_SLICE).min(MAX_SLICE)
    }
}
