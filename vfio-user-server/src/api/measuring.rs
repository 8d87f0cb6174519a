//! What the control API says of what vGPUs were given and used, as types.

use mdev_core::ids::VgpuId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::model::VgpuState;
use crate::private::Traps;

/// `GET /v1/stats`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    /// Each running vGPU.
    pub vgpus: Vec<VgpuStats>,
    /// Each physical GPU.
    pub parents: Vec<ParentStats>,
}

/// A physical GPU's part of [`Stats`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ParentStats {
    /// Its name.
    pub parent: String,
    /// How long the window was over which shares are measured, in milliseconds.
    pub window_ms: u64,
    /// How much of the window its engine was busy, in percent.
    pub busy: f64,
    /// The scheduling policy in force.
    pub policy: String,
    /// True while it takes vGPUs.
    pub ready: bool,
    /// Video memory that vGPUs may share, in bytes.
    pub vram_bytes: u64,
    /// Video memory that no running vGPU has, in bytes.
    pub vram_free_bytes: u64,
}

/// A running vGPU's part of [`Stats`]. Counters count from its start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VgpuStats {
    /// Its name.
    #[schema(value_type = String, format = "uuid")]
    pub uuid: VgpuId,
    /// The physical GPU it is on.
    pub parent: String,
    /// Its type.
    pub mdev_type: String,
    /// How it is.
    pub state: VgpuState,
    /// Its video memory, in bytes.
    pub vram_bytes: u64,
    /// Share asked for with `core`, in percent of the GPU.
    pub share_asked: Option<u8>,
    /// Share that it gets while all others are busy, in percent of the GPU.
    pub share_entitled: f64,
    /// Share that it gets at most, in percent of the GPU.
    pub share_cap: f64,
    /// `soft` or `hard`.
    pub mode: String,
    /// `low`, `normal` or `high`.
    pub priority: String,
    /// Its time slice, in microseconds.
    pub timeslice_us: u64,
    /// Share of the GPU's time used over the last second or so, in percent.
    pub share_measured: f64,
    /// Share of the engine's busy time over the last second or so, in percent: what it got of what was used.
    pub share_of_busy: f64,
    /// True while it has work.
    pub runnable: bool,
    /// Engine time used, in nanoseconds.
    pub engine_ns: u64,
    /// The same by engine.
    pub engines: EngineTimes,
    /// Time spent runnable and waiting, in nanoseconds, whatever the reason.
    pub wait_ns: u64,
    /// Of that, time held back by its cap, in nanoseconds.
    pub gated_ns: u64,
    /// Times that its cap began to hold it back.
    pub gate_closings: u64,
    /// Engine time used after that, until the engine was given up, in nanoseconds.
    pub gate_cost_ns: u64,
    /// GPFIFO entries completed.
    pub submissions: u64,
    /// Submissions that `submissions` per second held back.
    pub throttled: u64,
    /// Doorbells taken by polling, without an exit.
    pub polled_doorbells: u64,
    /// Wake-ups that needed a trapped write.
    pub wakeups: u64,
    /// Times it was switched out with work left.
    pub preemptions: u64,
    /// Turns that ended later than they should have.
    pub slice_overruns: u64,
    /// By how much together, in nanoseconds.
    pub overrun_ns: u64,
    /// Time of its turns in which the host ran something else, in nanoseconds. It is charged to nobody.
    pub stolen_ns: u64,
    /// Channel faults, hangs among them.
    pub faults: u64,
    /// Channels that were reset because they hung.
    pub hang_resets: u64,
    /// Channels that exist.
    pub channels: u32,
    /// Guest memory imported, in bytes.
    pub imported_bytes: u64,
    /// What it may have of that.
    pub limits: Limits,
    /// Trapped accesses of the attached VM.
    pub traps: Traps,
    /// Its worker's process.
    pub pid: Option<u32>,
    /// The VM that is attached: its process.
    pub vm_pid: Option<i32>,
}

/// Engine time by engine, in nanoseconds. What leads to a copy or a kernel counts with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EngineTimes {
    /// Copies.
    pub copy_ns: u64,
    /// Kernels.
    pub compute_ns: u64,
    /// Neither: semaphores, and methods that launch nothing.
    pub host_ns: u64,
}

/// What a vGPU may have besides engine time. What is absent has no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Limits {
    /// Channels at once.
    pub channels: u32,
    /// Guest memory imported at once, in bytes.
    pub imported_bytes: u64,
    /// GPFIFO entries taken in a second.
    pub submissions_per_second: Option<u32>,
    /// Pictures of its screen read out in a second; absent without a screen.
    pub refresh_per_second: Option<u32>,
    /// Engine time of one kernel or transfer, after which it has hung, in milliseconds.
    pub hang_timeout_ms: Option<u64>,
    /// Wait for a semaphore, after which it has hung, in milliseconds.
    pub acquire_timeout_ms: Option<u64>,
}
