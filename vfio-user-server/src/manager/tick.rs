//! Measuring shares and enforcing them: the silicon's counters into the policy, the policy's actions into the silicon.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mdev_core::gpu::{Gpu, GpuDescription, GpuError, Usage, UsageReport};
use mdev_core::ids::VgpuId;
use mdev_core::sched::account::Measured;
use mdev_core::sched::{Action, Config, Enforcement, Event, Scheduler, Share, Silicon};
use nix::time::ClockId;

use super::knobs::Knobs;
use super::{Manager, Result};
use crate::api::model::{ErrorCode, ErrorDetail};

/// Statistics from a reading that is not older are not worth another one.
const FRESH: Duration = Duration::from_millis(25);

/// The shortest pause between two readings, whatever a scheduler asks for. A reading is one small packet each way.
const SHORTEST_PAUSE: Duration = Duration::from_micros(250);

/// The slice of a parent that has not said its own yet; nothing runs on it.
const NO_SLICE: Duration = Duration::from_millis(2);

/// Who used how much of one parent's time, and who is to have how much.
#[derive(Debug)]
pub struct Shares {
    pub(super) scheduler: Scheduler,
    usage: BTreeMap<VgpuId, Usage>,
    /// The slice that is best on this GPU.
    pub(super) default_slice: Duration,
}

impl Shares {
    /// Those of a parent that is not there.
    pub fn with_knobs(knobs: &Knobs) -> Self {
        Self::with(NO_SLICE, Enforcement::Gates.into(), knobs)
    }

    /// Those of a GPU on which nothing runs yet.
    pub fn of(gpu: &GpuDescription, knobs: &Knobs) -> Self {
        Self::with(gpu.default_timeslice, gpu.capabilities.into(), knobs)
    }

    fn with(slice: Duration, silicon: Silicon, knobs: &Knobs) -> Self {
        let defaults = Config::new(slice);
        // They were checked when they were set.
        let config = knobs.config(defaults).unwrap_or(defaults);
        let scheduler = Scheduler::new(config, silicon, monotonic_ns());
        Self { default_slice: slice, scheduler, usage: BTreeMap::new() }
    }

    /// The policy in force, as people write it.
    pub fn policy_name(&self) -> String {
        self.scheduler.policy().to_string()
    }

    /// What a vGPU has used since it was admitted, as last read.
    pub fn usage(&self, vgpu: VgpuId) -> Usage {
        self.usage.get(&vgpu).copied().unwrap_or_default()
    }

    /// What a vGPU used over the last second or so.
    pub fn measured(&self, vgpu: VgpuId) -> Measured {
        self.scheduler.measured(vgpu).unwrap_or_default()
    }

    /// What all vGPUs used over the last second or so.
    pub fn total(&self) -> Measured {
        self.scheduler.measured_total()
    }

    /// Whether one more vGPU with that share may start.
    pub fn check(&self, share: Share) -> Result<()> {
        self.scheduler.check(share).map_err(|error| ErrorDetail::new(ErrorCode::NoRoom, error))
    }

    fn read(&mut self, report: &UsageReport) -> Vec<Action> {
        self.usage = report.vgpus.iter().copied().collect();
        self.handle(Event::UsageReport(report)).unwrap_or_default()
    }

    pub(super) fn handle(&mut self, event: Event<'_>) -> Result<Vec<Action>> {
        self.scheduler.handle(event).map_err(|error| ErrorDetail::new(ErrorCode::NoRoom, error))
    }
}

fn apply(gpu: &mut dyn Gpu, actions: &[Action]) -> std::result::Result<(), GpuError> {
    for action in actions {
        let done = match *action {
            Action::SetTimeslice(vgpu, slice) => gpu.set_timeslice(vgpu, slice),
            Action::SetBudget(vgpu, budget) => gpu.set_budget(vgpu, budget),
            Action::Gate(vgpu, open) => gpu.set_gate(vgpu, open),
        };
        match done {
            // Not admitted yet, or its worker has just died: it is told again when it is admitted.
            Ok(()) | Err(GpuError::NotFound(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Manager {
    /// Counts a vGPU in, with the share it asks for.
    pub(super) fn schedule(
        &mut self,
        index: usize,
        id: VgpuId,
        share: Share,
        max_instances: u32,
    ) -> Result<()> {
        let started = Event::VgpuStarted { id, share, max_instances };
        let actions = self.parents[index].shares.handle(started)?;
        self.act(index, &actions)
    }

    /// Does what the policy says, and reads the counters when it wants that next.
    pub(super) fn act(&mut self, index: usize, actions: &[Action]) -> Result<()> {
        let done = self.with_gpu(index, |gpu| apply(gpu, actions));
        self.plan_reading(index);
        done
    }

    /// Changes the share that a running vGPU asks for.
    pub(super) fn reschedule(&mut self, index: usize, id: VgpuId, share: Share) -> Result<()> {
        let actions = self.parents[index].shares.handle(Event::ShareChanged { id, share })?;
        self.act(index, &actions)
    }

    /// Counts a vGPU out.
    pub(super) fn unschedule(&mut self, index: usize, id: VgpuId) {
        let shares = &mut self.parents[index].shares;
        shares.usage.remove(&id);
        let actions = shares.handle(Event::VgpuStopped { id }).unwrap_or_default();
        if self.parents[index].is_ready()
            && let Err(error) = self.act(index, &actions)
        {
            log::warn!("Cannot set time slices: {error}");
        }
    }

    /// Sees to it that a parent's counters are read when its scheduler wants that. Without vGPUs there is nothing to
    /// read, and an idle manager sleeps.
    pub(super) fn plan_reading(&mut self, index: usize) {
        let parent = &mut self.parents[index];
        let deadline = parent.shares.scheduler.next_deadline().filter(|_| parent.is_ready());
        parent.next_read = deadline.map(|at| {
            let pause = Duration::from_nanos(at.saturating_sub(monotonic_ns()));
            Instant::now() + pause.max(SHORTEST_PAUSE)
        });
    }

    pub(super) fn read_what_is_due(&mut self, now: Instant) {
        for index in 0..self.parents.len() {
            if self.parents[index].next_read.is_some_and(|at| at <= now) {
                self.read_counters(index);
            }
        }
    }

    /// Reads the counters, except where that was done just now.
    pub(super) fn read_counters_if_old(&mut self) {
        for index in 0..self.parents.len() {
            let parent = &self.parents[index];
            let fresh = parent.last_read.is_some_and(|at| at.elapsed() < FRESH);
            if !fresh && parent.next_read.is_some() {
                self.read_counters(index);
            }
        }
    }

    /// Reads the counters of a parent, and does what the policy says.
    fn read_counters(&mut self, index: usize) {
        self.parents[index].last_read = Some(Instant::now());
        let read = self.with_gpu(index, |gpu| gpu.usage()).and_then(|report| {
            let actions = self.parents[index].shares.read(&report);
            self.with_gpu(index, |gpu| apply(gpu, &actions))
        });
        self.plan_reading(index);
        if let Err(error) = read {
            log::warn!("Cannot schedule parent {}: {error}", self.parents[index].name());
            // Not more often than it can be read in the log.
            let later = Instant::now() + Duration::from_secs(1);
            let next = &mut self.parents[index].next_read;
            *next = next.map(|at| at.max(later));
        }
    }
}

/// `CLOCK_MONOTONIC` in nanoseconds, the clock of usage reports.
pub fn monotonic_ns() -> u64 {
    let now = ClockId::CLOCK_MONOTONIC.now().map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
