//! Classes of vGPUs that share one weight factor.

use crate::sched::policy::Policy;
use crate::sched::share::{Core, Mode, Priority, ShareRequest};

/// The whole GPU, in percent.
pub(super) const WHOLE: f64 = 100.0;

/// Class of vGPUs whose weights stay in proportion to each other, whatever other classes do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WeightClass {
    /// Every vGPU under a policy that ignores `core`.
    Plain,
    /// `core` with `mode=hard`: never more than `core`.
    Hard,
    /// `core` with `mode=soft`: `core` and a part of the spare time.
    Soft(Priority),
    /// No `core`: a part of the time that `core` requests leave.
    Remainder(Priority),
}

impl WeightClass {
    pub(super) const COUNT: usize = 8;

    pub(super) const ALL: [Self; Self::COUNT] = [
        Self::Plain,
        Self::Hard,
        Self::Soft(Priority::Low),
        Self::Soft(Priority::Normal),
        Self::Soft(Priority::High),
        Self::Remainder(Priority::Low),
        Self::Remainder(Priority::Normal),
        Self::Remainder(Priority::High),
    ];

    /// Returns the class of a vGPU, and the vGPU's base weight within the class.
    pub(super) fn of(policy: Policy, request: ShareRequest, max_instances: u32) -> (Self, f64) {
        match (policy, request.core.map(Core::get).map(f64::from)) {
            (Policy::BestEffort, _) => (Self::Plain, f64::from(request.priority.parts())),
            (Policy::EqualShare, _) => (Self::Plain, 1.0),
            (Policy::FixedShare, _) => (Self::Plain, WHOLE / f64::from(max_instances.max(1))),
            (Policy::Weighted, Some(core)) if request.mode == Mode::Hard => (Self::Hard, core),
            (Policy::Weighted, Some(core)) => (Self::Soft(request.priority), core),
            (Policy::Weighted, None) => (Self::Remainder(request.priority), 1.0),
        }
    }

    /// Returns the position of the class in [`Self::ALL`].
    pub(super) fn index(self) -> usize {
        match self {
            Self::Plain => 0,
            Self::Hard => 1,
            Self::Soft(priority) => 2 + priority as usize,
            Self::Remainder(priority) => 5 + priority as usize,
        }
    }

    /// Returns the parts of spare time for the class: 0 where it may not exceed its promise.
    pub(super) fn parts(self) -> f64 {
        match self {
            Self::Plain | Self::Hard => 0.0,
            Self::Soft(priority) | Self::Remainder(priority) => f64::from(priority.parts()),
        }
    }

    /// Returns true if vGPUs of the class may get more time than promised.
    pub(super) fn takes_spare_time(self) -> bool {
        self.parts() > 0.0
    }
}
