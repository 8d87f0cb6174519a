//! Scheduling policies and decisions.

use mdev_core::ids::VgpuId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Scheduler of a physical GPU: element of `GET /v1/schedulers`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Scheduler {
    /// Physical GPU.
    pub parent: String,
    /// `best-effort`, `equal-share`, `fixed-share` or `weighted`.
    pub policy: String,
    /// Mean time slice in force, in microseconds.
    pub timeslice_us: u64,
    /// Period over which caps are enforced, in microseconds.
    pub period_us: u64,
    /// Whether the time slice is derived from `frequency` and `averaging_factor` applies.
    pub averaging: bool,
    /// Number of slices over which a deviation is compensated.
    pub averaging_factor: u8,
    /// Mean number of slices per second.
    pub frequency: u16,
    /// Whether the sum of requested shares can exceed the whole GPU.
    pub overcommit: bool,
    /// Sum of the shares that running vGPUs request, in percent of the GPU.
    pub asked: u32,
    /// Largest share that another vGPU can request without overcommitting, in percent of the GPU.
    pub left: u8,
}

/// Request to change a scheduler: `PATCH /v1/schedulers/{parent}`. Absent members stay unchanged.
/// The change takes effect at once and persists across restarts of the manager.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ModifyScheduler {
    /// `best-effort`, `equal-share`, `fixed-share` or `weighted`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Mean time slice, in microseconds: 100 to 30000. Excludes averaging.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeslice_us: Option<u64>,
    /// Period over which caps are enforced, in microseconds: 1000 to 30000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub period_us: Option<u64>,
    /// Whether the time slice is derived from `frequency`. Setting a factor or frequency enables
    /// averaging.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub averaging: Option<bool>,
    /// Number of slices over which a deviation is compensated: 1 to 60.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub averaging_factor: Option<u8>,
    /// Mean number of slices per second: 63 to 960.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frequency: Option<u16>,
    /// Whether the sum of requested shares can exceed the whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overcommit: Option<bool>,
}

/// Scheduler decision with its inputs: element of `GET /v1/schedulers/{parent}/log`, oldest first
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SchedulerDecision {
    /// Age of the decision, in milliseconds.
    pub age_ms: u64,
    /// vGPU that the decision applies to.
    #[schema(value_type = String, format = "uuid")]
    pub vgpu: VgpuId,
    /// The decision.
    #[serde(flatten)]
    pub decision: Decided,
    /// Cause: `started`, `stopped`, `share`, `policy`, `repay`, `cap`, `ahead` or `stale`.
    pub cause: String,
    /// Engine time that the vGPU had used since its start, in nanoseconds.
    pub engine_ns: u64,
    /// Time that the vGPU had waited for the engine since its start, in nanoseconds.
    pub wait_ns: u64,
    /// Balance of engine time, in nanoseconds: positive if the vGPU is owed time, negative if it is
    /// in debt.
    pub owed_ns: i64,
}

/// New value that a scheduler decided on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "decision")]
pub enum Decided {
    /// Time slice.
    Timeslice {
        /// In microseconds.
        timeslice_us: u64,
    },
    /// Cap: engine time allowed in each period.
    Cap {
        /// Engine time, in microseconds.
        time_us: u64,
        /// Period, in microseconds.
        period_us: u64,
    },
    /// Removal of the cap.
    NoCap,
    /// Gate.
    Gate {
        /// False: the vGPU gets no engine time.
        open: bool,
    },
}
