//! One vGPU, as its scheduler sees it.

use std::time::Duration;

use super::ahead::Hold;
use super::weights::Kind;
use crate::gpu::Usage;
use crate::ids::VgpuId;
use crate::sched::budget::{Budget, Meter};
use crate::sched::log::{Cause, Decision, Record};
use crate::sched::policy::{MAX_SLICE, MIN_SLICE, Policy};
use crate::sched::share::{Core, Share};

/// What happened while a vGPU had work all the time and always gave up the engine by itself, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Unhurried {
    /// Of intervals in which it had the engine.
    pub(super) time: f64,
    pub(super) used: f64,
    pub(super) due: f64,
}

#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) share: Share,
    pub(super) max_instances: u32,
    /// Whose weights change together with its own, and what its weight is in proportion to among those.
    pub(super) kind: Kind,
    pub(super) base: f64,
    /// What its weight is scaled by, since others that have a part in idle time are of another class.
    pub(super) boost: f64,
    /// Engine time that it is owed by the others, in nanoseconds; negative where it owes.
    pub(super) owed_ns: f64,
    /// What its slice is scaled by to repay that.
    pub(super) correction: f64,
    /// It has work all the time, and yet does not use even the longest slice: it comes back with a little work again
    /// and again.
    pub(super) sated: bool,
    /// Since it lost the engine with work left.
    pub(super) unhurried: Unhurried,
    /// It contended for the engine when debts were last worked out, and by what its weight is its part of what was used.
    pub(super) contends: bool,
    pub(super) part_of_weight: f64,
    /// Engine time that it had used then.
    pub(super) settled_ns: u64,
    /// Where slices cannot repay what it owes.
    pub(super) hold: Option<Hold>,
    /// They could not when debts were last worked out.
    pub(super) was_ahead: bool,
    /// Its share has changed since the counters were read: what it used until then says nothing.
    pub(super) changed: bool,
    /// The slice that the silicon has.
    pub(super) slice: Option<Duration>,
    /// The part of the GPU that it may have at most, and that as a budget.
    pub(super) cap: f64,
    pub(super) budget: Option<Budget>,
    /// Where the silicon has no budgets.
    pub(super) meter: Option<Meter>,
    /// When that is to be looked at next.
    pub(super) look_ns: Option<u64>,
    /// The meter began after the counters were last read: what was used until they are read again is not charged.
    pub(super) fresh: bool,
    pub(super) gate_open: bool,
    pub(super) gates_closed: u64,
    pub(super) usage: Usage,
}

impl Group {
    pub(super) fn new(policy: Policy, share: Share, max_instances: u32) -> Self {
        let mut group = Self {
            share,
            max_instances: max_instances.max(1),
            kind: Kind::Plain,
            base: 1.0,
            boost: 1.0,
            owed_ns: 0.0,
            correction: 1.0,
            sated: false,
            unhurried: Unhurried::default(),
            contends: false,
            part_of_weight: 0.0,
            settled_ns: 0,
            hold: None,
            was_ahead: false,
            changed: true,
            slice: None,
            cap: 1.0,
            budget: None,
            meter: None,
            look_ns: None,
            fresh: false,
            gate_open: true,
            gates_closed: 0,
            usage: Usage::default(),
        };
        group.ask(policy, share);
        group
    }

    /// Asks for another share, or for the same under another policy.
    pub(super) fn ask(&mut self, policy: Policy, share: Share) {
        self.share = share;
        (self.kind, self.base) = Kind::of(policy, share, self.max_instances);
    }

    /// Hundredths of the GPU that it asks for.
    pub(super) fn asked(&self) -> u32 {
        self.share.core.map(Core::get).map_or(0, u32::from)
    }

    /// Parts of what nobody was promised.
    pub(super) fn parts(&self) -> f64 {
        f64::from(self.share.priority.parts())
    }

    /// Drops what it owes and is owed.
    pub(super) fn forget(&mut self) {
        self.sated = false;
        self.unhurried = Unhurried::default();
        self.owed_ns = 0.0;
        self.correction = 1.0;
        self.settled_ns = self.usage.engine_ns;
    }

    fn longest(&self) -> Duration {
        self.share.timeslice.unwrap_or(MAX_SLICE).min(MAX_SLICE)
    }

    /// How many times its longest slice it is to have, where its kind has `scale` seconds for each base.
    pub(super) fn over(&self, scale: f64) -> f64 {
        self.base * scale * self.boost * self.correction / self.longest().as_secs_f64()
    }

    /// The slice that it is to have, where its kind has `scale` seconds for each base.
    pub(super) fn wanted(&self, scale: f64) -> Duration {
        let longest = self.longest().as_secs_f64();
        let wanted = (self.base * scale * self.boost * self.correction).min(longest);
        let seconds = wanted.clamp(MIN_SLICE.as_secs_f64(), MAX_SLICE.as_secs_f64());
        Duration::try_from_secs_f64(seconds).unwrap_or(MIN_SLICE)
    }

    /// A decision about it, with what it was made from.
    pub(super) fn record(
        &self,
        at_ns: u64,
        vgpu: VgpuId,
        decision: Decision,
        cause: Cause,
    ) -> Record {
        Record {
            at_ns,
            vgpu,
            decision,
            cause,
            engine_ns: self.usage.engine_ns,
            wait_ns: self.usage.wait_ns,
            owed_ns: self.owed_ns as i64,
        }
    }
}
