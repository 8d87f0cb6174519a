//! Measuring shares and enforcing them: the silicon's counters into the policy, the policy's actions into the silicon.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mdev_core::gpu::{Gpu, GpuDescription, GpuError, Usage, UsageReport};
use mdev_core::ids::VgpuId;
use mdev_core::sched::account::Measured;
use mdev_core::sched::{Action, Config, Enforcement, Event, Scheduler, Share};

use super::{Manager, Result};
use crate::api::model::{ErrorCode, ErrorDetail};

/// How often counters are read while vGPUs run. A reading is one small packet each way.
const PERIOD: Duration = Duration::from_millis(100);

/// The slice of a parent that has not said its own yet; nothing runs on it.
const NO_SLICE: Duration = Duration::from_millis(2);

/// Who used how much of one parent's time, and who is to have how much.
#[derive(Debug)]
pub struct Shares {
    scheduler: Scheduler,
    usage: BTreeMap<VgpuId, Usage>,
}

impl Default for Shares {
    fn default() -> Self {
        Self::with(NO_SLICE, Enforcement::Gates)
    }
}

impl Shares {
    /// Those of a GPU on which nothing runs yet.
    pub fn of(gpu: &GpuDescription) -> Self {
        Self::with(gpu.default_timeslice, gpu.capabilities.into())
    }

    fn with(slice: Duration, enforcement: Enforcement) -> Self {
        let scheduler = Scheduler::new(Config::new(slice), enforcement);
        Self { scheduler, usage: BTreeMap::new() }
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

    fn handle(&mut self, event: Event<'_>) -> Result<Vec<Action>> {
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
        self.with_gpu(index, |gpu| apply(gpu, &actions))
    }

    /// Changes the share that a running vGPU asks for.
    pub(super) fn reschedule(&mut self, index: usize, id: VgpuId, share: Share) -> Result<()> {
        let actions = self.parents[index].shares.handle(Event::ShareChanged { id, share })?;
        self.with_gpu(index, |gpu| apply(gpu, &actions))
    }

    /// Counts a vGPU out.
    pub(super) fn unschedule(&mut self, index: usize, id: VgpuId) {
        let shares = &mut self.parents[index].shares;
        shares.usage.remove(&id);
        let actions = shares.handle(Event::VgpuStopped { id }).unwrap_or_default();
        if self.parents[index].is_ready()
            && let Err(error) = self.with_gpu(index, |gpu| apply(gpu, &actions))
        {
            log::warn!("Cannot set time slices: {error}");
        }
    }

    /// Sees to it that counters are read from now on.
    pub(super) fn tick_soon(&mut self) {
        self.next_tick.get_or_insert_with(|| Instant::now() + PERIOD);
    }

    pub(super) fn tick_if_due(&mut self, now: Instant) {
        if self.next_tick.is_some_and(|at| at <= now) {
            // Without vGPUs there is nothing to read, and an idle manager sleeps.
            self.next_tick = (!self.vgpus.is_empty()).then(|| now + PERIOD);
            self.read_counters();
        }
    }

    /// Reads the counters, except where that was done just now: however often somebody asks, the policy sees intervals
    /// that mean something.
    pub(super) fn read_counters_if_old(&mut self) {
        let fresh = |at: Instant| at.elapsed() < PERIOD / 4;
        if !self.last_read.is_some_and(fresh) {
            self.read_counters();
        }
    }

    /// Reads the counters of every parent that has vGPUs, and does what the policy says.
    fn read_counters(&mut self) {
        self.last_read = Some(Instant::now());
        for index in 0..self.parents.len() {
            let parent = &self.parents[index];
            let used = self.vgpus.values().any(|vgpu| vgpu.parent == parent.name());
            if !used || !parent.is_ready() {
                continue;
            }
            let read = self.with_gpu(index, |gpu| gpu.usage()).and_then(|report| {
                let actions = self.parents[index].shares.read(&report);
                self.with_gpu(index, |gpu| apply(gpu, &actions))
            });
            if let Err(error) = read {
                log::warn!("Cannot schedule parent {}: {error}", self.parents[index].name());
            }
        }
    }
}
