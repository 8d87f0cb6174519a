//! What the control API says of schedulers, as types.

use mdev_core::ids::VgpuId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How a physical GPU's time is divided: one of `GET /v1/schedulers`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Scheduler {
    /// The physical GPU.
    pub parent: String,
    /// `best-effort`, `equal-share`, `fixed-share` or `weighted`.
    pub policy: String,
    /// Mean time slice in force, in microseconds.
    pub timeslice_us: u64,
    /// Over how long a cap is kept, in microseconds.
    pub period_us: u64,
    /// Whether the time slice comes from `frequency`, and `averaging_factor` is in force.
    pub averaging: bool,
    /// Slices over which a deviation is made good.
    pub averaging_factor: u8,
    /// Slices in a second, on average.
    pub frequency: u16,
    /// Whether more than the whole GPU may be asked for.
    pub overcommit: bool,
    /// Hundredths of the GPU that running vGPUs ask for.
    pub asked: u32,
    /// Hundredths that one more could ask for without overcommitting.
    pub left: u8,
}

/// `PATCH /v1/schedulers/{parent}`: what is absent stays. In force at once, and kept for later managers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ModifyScheduler {
    /// `best-effort`, `equal-share`, `fixed-share` or `weighted`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Mean time slice, in microseconds: 100 to 30000. Not together with averaging.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeslice_us: Option<u64>,
    /// Over how long a cap is kept, in microseconds: 1000 to 30000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub period_us: Option<u64>,
    /// Whether the time slice comes from `frequency`. A factor or frequency switches it on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub averaging: Option<bool>,
    /// Slices over which a deviation is made good: 1 to 60.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub averaging_factor: Option<u8>,
    /// Slices in a second, on average: 63 to 960.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frequency: Option<u16>,
    /// Whether more than the whole GPU may be asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overcommit: Option<bool>,
}

/// One decision of a scheduler, with what it was made from: one of `GET /v1/schedulers/{parent}/log`, oldest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SchedulerDecision {
    /// How long ago, in milliseconds.
    pub age_ms: u64,
    /// Whom it concerns.
    #[schema(value_type = String, format = "uuid")]
    pub vgpu: VgpuId,
    /// What was decided.
    #[serde(flatten)]
    pub decision: Decided,
    /// Why: `started`, `stopped`, `share`, `policy`, `repay`, `cap`, `ahead` or `stale`.
    pub cause: String,
    /// Engine time that the vGPU had used since it started, in nanoseconds.
    pub engine_ns: u64,
    /// Time that it had waited for the engine since it started, in nanoseconds.
    pub wait_ns: u64,
    /// Engine time that it was owed, in nanoseconds; negative where it owed.
    pub owed_ns: i64,
}

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "decision")]
pub enum Decided {
    /// Its time slice.
    Timeslice {
        /// In microseconds.
        timeslice_us: u64,
    },
    /// Its cap: so much engine time in each period.
    Cap {
        /// In microseconds.
        time_us: u64,
        /// In microseconds.
        period_us: u64,
    },
    /// It has no cap any more.
    NoCap,
    /// Its gate.
    Gate {
        /// Closed, it gets no engine time.
        open: bool,
    },
}
