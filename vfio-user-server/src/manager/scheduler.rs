//! What the API asks of schedulers, and changes.

use std::time::Duration;

use mdev_core::sched::log::{Decision, Record};
use mdev_core::sched::{Config, Core, Event};

use super::tick::monotonic_ns;
use super::{Manager, Result};
use crate::api::model::{
    self, Decided, ErrorCode, ErrorDetail, ModifyScheduler, SchedulerDecision,
};

/// Whole microseconds.
pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Manager {
    /// How the time of every parent is divided.
    pub fn schedulers(&self) -> Vec<model::Scheduler> {
        (0..self.parents.len()).map(|index| self.scheduler_view(index)).collect()
    }

    /// How a parent's time is divided.
    pub fn scheduler(&self, parent: &str) -> Result<model::Scheduler> {
        Ok(self.scheduler_view(self.parent_index(parent)?))
    }

    fn scheduler_view(&self, index: usize) -> model::Scheduler {
        let parent = &self.parents[index];
        let config = parent.shares.scheduler.config();
        let averaging = parent.knobs.averaging();
        model::Scheduler {
            parent: parent.name().to_owned(),
            policy: config.policy.to_string(),
            timeslice_us: micros(config.mean_slice()),
            period_us: micros(config.period),
            averaging: config.averaging.is_some(),
            averaging_factor: averaging.factor,
            frequency: averaging.frequency,
            overcommit: config.overcommit,
            asked: self.asked(index),
            left: parent.shares.scheduler.left(),
        }
    }

    /// Hundredths that the running vGPUs of a parent ask for.
    fn asked(&self, index: usize) -> u32 {
        let name = self.parents[index].name();
        let running = self.vgpus.values().filter(|vgpu| vgpu.parent == name);
        let scheduled =
            running.filter(|vgpu| self.parents[index].shares.scheduler.entitled(vgpu.id).is_some());
        scheduled
            .filter_map(|vgpu| vgpu.settings.share.core)
            .map(|core| u32::from(Core::get(core)))
            .sum()
    }

    /// Changes how a parent's time is divided: at once, and for later managers.
    pub fn modify_scheduler(
        &mut self,
        parent: &str,
        change: &ModifyScheduler,
    ) -> Result<model::Scheduler> {
        let index = self.parent_index(parent)?;
        let knobs = self.parents[index].knobs.with(change)?;
        let config = knobs.config(Config::new(self.parents[index].shares.default_slice))?;
        let asked = self.asked(index);
        if !config.overcommit && asked > 100 {
            let what = format!(
                "{asked} of 100 are asked for on {parent}; lower core of running vGPUs by {} before \
                 overcommit is switched off",
                asked - 100
            );
            return Err(ErrorDetail::new(ErrorCode::Conflict, what));
        }
        knobs.save()?;
        let parent = &mut self.parents[index];
        parent.knobs = knobs;
        log::info!("Parent {}: scheduling is {}", parent.name(), config.policy);
        let actions = parent.shares.handle(Event::ConfigChanged(config))?;
        if parent.is_ready() {
            self.act(index, &actions)?;
        }
        Ok(self.scheduler_view(index))
    }

    /// The last decisions of a parent's scheduler, oldest first.
    pub fn scheduler_log(&self, parent: &str) -> Result<Vec<SchedulerDecision>> {
        let parent = &self.parents[self.parent_index(parent)?];
        let now_ns = monotonic_ns();
        Ok(parent.shares.scheduler.log().iter().map(|record| decision(record, now_ns)).collect())
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

/// The cause as programs read it.
fn cause(record: &Record) -> String {
    let name = serde_json::to_value(record.cause).ok();
    name.and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}
