//! Division of a parent's engine time: the scheduler, its actions, and what the control API shows
//! and changes of it.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use mdev_core::gpu::{Gpu, GpuDescription, GpuError, Usage, UsageReport};
use mdev_core::ids::VgpuId;
use mdev_core::sched::account::{Measured, WaitTimes};
use mdev_core::sched::log::{Decision, Record};
use mdev_core::sched::{
    Action, Config, Core, Enforcement, Event, GpuFeatures, Scheduler, ShareRequest, Snapshot,
};

use super::Parent;
use super::readings::monotonic_ns;
use super::scheduler_config::SchedulerConfig;
use crate::manager::Result;
use vgpud_api::{Decided, ErrorCode, ErrorDetail, ModifyScheduler, SchedulerDecision};

/// Default slice of a parent before its GPU states one.
const UNKNOWN_GPU_SLICE: Duration = Duration::from_millis(2);

/// Scheduler of a parent, with its settings and the last reading of the usage counters.
#[derive(Debug)]
pub struct Scheduling {
    settings: SchedulerConfig,
    scheduler: Scheduler,
    /// Default slice of the GPU.
    default_slice: Duration,
    usage: BTreeMap<VgpuId, Usage>,
    pub(super) next_reading: Option<Instant>,
    pub(super) last_reading: Option<Instant>,
}

impl Scheduling {
    /// Reads a parent's settings.
    pub fn load(config_dir: &Path, parent: &str) -> Self {
        let settings = SchedulerConfig::load(config_dir, parent);
        let gates = Enforcement::Gates.into();
        Self {
            scheduler: scheduler(&settings, UNKNOWN_GPU_SLICE, gates),
            settings,
            default_slice: UNKNOWN_GPU_SLICE,
            usage: BTreeMap::new(),
            next_reading: None,
            last_reading: None,
        }
    }

    /// Starts anew with no vGPUs, on a GPU or, after its loss, without one.
    pub fn reset(&mut self, gpu: Option<&GpuDescription>) {
        let (slice, features) = match gpu {
            Some(gpu) => (gpu.default_timeslice, gpu.capabilities.into()),
            None => (UNKNOWN_GPU_SLICE, Enforcement::Gates.into()),
        };
        self.default_slice = slice;
        self.scheduler = scheduler(&self.settings, slice, features);
        self.usage.clear();
        self.next_reading = None;
    }

    /// Returns when the usage counters are to be read.
    pub fn next_reading(&self) -> Option<Instant> {
        self.next_reading
    }

    /// Returns when the scheduler wants the usage counters, in nanoseconds of `CLOCK_MONOTONIC`.
    pub fn wanted_reading_ns(&self) -> Option<u64> {
        self.scheduler.next_deadline()
    }

    /// Returns the policy's name.
    pub fn policy_name(&self) -> String {
        self.scheduler.policy().to_string()
    }

    /// Returns a vGPU's counters since its admission, as last read.
    pub fn usage(&self, vgpu: VgpuId) -> Usage {
        self.usage.get(&vgpu).copied().unwrap_or_default()
    }

    /// Returns a vGPU's use over the last second.
    pub fn measured(&self, vgpu: VgpuId) -> Measured {
        self.scheduler.measured(vgpu).unwrap_or_default()
    }

    /// Returns how long a vGPU's work waited for the engine in the last one to two seconds. None if
    /// no wait ended.
    pub fn waits(&self, vgpu: VgpuId) -> Option<WaitTimes> {
        self.scheduler.waits(vgpu)
    }

    /// Returns the use of all vGPUs over the last second.
    pub fn measured_total(&self) -> Measured {
        self.scheduler.measured_total()
    }

    /// Returns a vGPU's share, cap and slice.
    pub fn snapshot(&self, vgpu: VgpuId) -> Option<Snapshot> {
        self.scheduler.snapshot(vgpu)
    }

    /// Refuses a share that does not fit.
    pub fn check(&self, share: ShareRequest) -> Result<()> {
        self.scheduler.check(share).map_err(|error| ErrorDetail::new(ErrorCode::NoRoom, error))
    }

    /// Takes a reading of the usage counters.
    pub fn read(&mut self, report: &UsageReport) -> Vec<Action> {
        self.usage = report.vgpus.iter().copied().collect();
        self.handle(Event::UsageReport(report)).unwrap_or_default()
    }

    fn handle(&mut self, event: Event<'_>) -> Result<Vec<Action>> {
        self.scheduler.handle(event).map_err(|error| ErrorDetail::new(ErrorCode::NoRoom, error))
    }
}

fn scheduler(settings: &SchedulerConfig, slice: Duration, features: GpuFeatures) -> Scheduler {
    let defaults = Config::new(slice);
    // The settings were checked when they were set.
    let config = settings.config(defaults).unwrap_or(defaults);
    Scheduler::new(config, features, monotonic_ns())
}

/// Applies a scheduler's actions to the GPU.
pub fn apply(gpu: &mut dyn Gpu, actions: &[Action]) -> std::result::Result<(), GpuError> {
    for action in actions {
        let done = match *action {
            Action::SetTimeslice(vgpu, slice) => gpu.set_timeslice(vgpu, slice),
            Action::SetBudget(vgpu, budget) => gpu.set_budget(vgpu, budget),
            Action::Gate(vgpu, open) => gpu.set_gate(vgpu, open),
        };
        match done {
            // A vGPU whose worker has just died: its next admission repeats the actions.
            Ok(()) | Err(GpuError::NotFound(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns whole microseconds.
pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Parent {
    /// Refuses a share that does not fit.
    pub fn check_share(&self, share: ShareRequest) -> Result<()> {
        self.scheduling.check(share)
    }

    /// Schedules a vGPU that the GPU has admitted.
    pub(super) fn schedule(
        &mut self,
        id: VgpuId,
        share: ShareRequest,
        max_instances: u32,
    ) -> Result<()> {
        let actions = self.scheduling.handle(Event::VgpuStarted { id, share, max_instances })?;
        self.apply_actions(&actions)
    }

    /// Changes the share of a scheduled vGPU.
    pub(super) fn reschedule(&mut self, id: VgpuId, share: ShareRequest) -> Result<()> {
        let actions = self.scheduling.handle(Event::ShareChanged { id, share })?;
        self.apply_actions(&actions)
    }

    /// Removes a vGPU from the scheduler.
    pub(super) fn unschedule(&mut self, id: VgpuId) {
        self.scheduling.usage.remove(&id);
        let actions = self.scheduling.handle(Event::VgpuStopped { id }).unwrap_or_default();
        if self.is_ready()
            && let Err(error) = self.apply_actions(&actions)
        {
            log::warn!("Cannot set time slices: {error}");
        }
    }

    /// Applies actions to the GPU, and plans the next reading.
    fn apply_actions(&mut self, actions: &[Action]) -> Result<()> {
        let done = self.call_gpu(|gpu| apply(gpu, actions));
        self.plan_reading();
        done
    }

    /// Describes the scheduler for the control API.
    pub fn scheduler(&self) -> vgpud_api::Scheduler {
        let config = self.scheduling.scheduler.config();
        let averaging = self.scheduling.settings.averaging();
        vgpud_api::Scheduler {
            parent: self.name().to_owned(),
            policy: config.policy.to_string(),
            timeslice_us: micros(config.mean_slice()),
            period_us: micros(config.period),
            averaging: config.averaging.is_some(),
            averaging_factor: averaging.factor,
            frequency: averaging.frequency,
            overcommit: config.overcommit,
            asked: self.requested_core(),
            left: self.scheduling.scheduler.left(),
        }
    }

    /// Returns the sum of the `core` attributes of the scheduled vGPUs, in hundredths of the GPU.
    fn requested_core(&self) -> u32 {
        let scheduled = |id| self.scheduling.scheduler.entitled(id).is_some();
        self.vgpus()
            .filter(|vgpu| scheduled(vgpu.id))
            .filter_map(|vgpu| vgpu.settings.share.core)
            .map(|core| u32::from(Core::get(core)))
            .sum()
    }

    /// Changes the scheduler's settings, at once and for later managers.
    pub fn modify_scheduler(&mut self, change: &ModifyScheduler) -> Result<vgpud_api::Scheduler> {
        let settings = self.scheduling.settings.with(change)?;
        let config = settings.config(Config::new(self.scheduling.default_slice))?;
        let requested = self.requested_core();
        if !config.overcommit && requested > 100 {
            let what = format!(
                "{requested} of 100 are requested on {}; lower core of running vGPUs by {} before \
                 overcommit is switched off",
                self.name(),
                requested - 100
            );
            return Err(ErrorDetail::new(ErrorCode::Conflict, what));
        }
        settings.save()?;
        self.scheduling.settings = settings;
        log::info!("Parent {}: scheduling is {}", self.name(), config.policy);
        let actions = self.scheduling.handle(Event::ConfigChanged(config))?;
        if self.is_ready() {
            self.apply_actions(&actions)?;
        }
        Ok(self.scheduler())
    }

    /// Lists the scheduler's last decisions, oldest first.
    pub fn scheduler_log(&self) -> Vec<SchedulerDecision> {
        let now_ns = monotonic_ns();
        self.scheduling.scheduler.log().iter().map(|record| decision(record, now_ns)).collect()
    }
}

fn decision(record: &Record, now_ns: u64) -> SchedulerDecision {
    SchedulerDecision {
        age_ms: now_ns.saturating_sub(record.at_ns) / 1_000_000,
        vgpu: record.vgpu,
        decision: match record.decision {
            Decision::Slice(slice) => Decided::Timeslice { timeslice_us: micros(slice) },
            Decision::Budget(Some(cap)) => {
                Decided::Cap { time_us: cap.time_ns / 1000, period_us: cap.period_ns / 1000 }
            }
            Decision::Budget(None) => Decided::NoCap,
            Decision::Gate(open) => Decided::Gate { open },
        },
        cause: cause(record),
        engine_ns: record.engine_ns,
        wait_ns: record.wait_ns,
        owed_ns: record.owed_ns,
    }
}

/// Returns the serialized name of a decision's cause.
fn cause(record: &Record) -> String {
    let name = serde_json::to_value(record.cause).ok();
    name.and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}
