//! Entitled and used engine time, memory and limits.

use mdev_core::ids::VgpuId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Programs, Traps, VgpuState};

/// Statistics of all vGPUs and parents: `GET /v1/stats`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    /// Running vGPUs.
    pub vgpus: Vec<VgpuStats>,
    /// Physical GPUs.
    pub parents: Vec<ParentStats>,
}

/// Statistics of a physical GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ParentStats {
    /// Name of the GPU.
    pub parent: String,
    /// Length of the window over which shares are measured, in milliseconds.
    pub window_ms: u64,
    /// Part of the window in which the engine was busy, in percent.
    pub busy: f64,
    /// Scheduling policy in force.
    pub policy: String,
    /// Whether the GPU accepts vGPUs.
    pub ready: bool,
    /// Video memory available to vGPUs in total, in bytes.
    pub vram_bytes: u64,
    /// Video memory that no running vGPU occupies, in bytes.
    pub vram_free_bytes: u64,
}

/// Statistics of a running vGPU. Counters start at zero when the vGPU starts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VgpuStats {
    /// UUID of the vGPU.
    #[schema(value_type = String, format = "uuid")]
    pub uuid: VgpuId,
    /// Name of the vGPU.
    #[serde(default)]
    pub name: Option<String>,
    /// Physical GPU on which the vGPU runs.
    pub parent: String,
    /// vGPU type.
    pub mdev_type: String,
    /// State of the vGPU.
    pub state: VgpuState,
    /// Video memory of the vGPU, in bytes.
    pub vram_bytes: u64,
    /// Share requested with `core`, in percent of the GPU.
    pub share_asked: Option<u8>,
    /// Entitled share while all other vGPUs are busy, in percent of the GPU.
    pub share_entitled: f64,
    /// Upper limit of the share, in percent of the GPU.
    pub share_cap: f64,
    /// `soft` or `hard`.
    pub mode: String,
    /// `low`, `normal` or `high`.
    pub priority: String,
    /// Time slice, in microseconds.
    pub timeslice_us: u64,
    /// Used share of the GPU's time over the last second or so, in percent.
    pub share_measured: f64,
    /// Used share of the engine's busy time over the last second or so, in percent.
    pub share_of_busy: f64,
    /// Whether the vGPU has work.
    pub runnable: bool,
    /// Engine time used, in nanoseconds.
    pub engine_ns: u64,
    /// Engine time used, by engine.
    pub engines: EngineTimes,
    /// Time spent runnable and waiting for any reason, in nanoseconds.
    pub wait_ns: u64,
    /// Number of times, in the last one to two seconds, that work waited for the engine and then
    /// ran. Work that found the engine idle counts.
    #[serde(default)]
    pub waits: u64,
    /// Median length of the waits that `waits` counts, in microseconds; null without a wait.
    #[serde(default)]
    pub wait_p50_us: Option<u64>,
    /// 99th percentile of the waits that `waits` counts, in microseconds; null without a wait.
    #[serde(default)]
    pub wait_p99_us: Option<u64>,
    /// Part of the waiting time that the cap caused, in nanoseconds.
    pub gated_ns: u64,
    /// Number of times that the cap closed the gate.
    pub gate_closings: u64,
    /// Engine time used after the gate closed, until the vGPU released the engine, in nanoseconds.
    pub gate_cost_ns: u64,
    /// Completed GPFIFO entries.
    pub submissions: u64,
    /// Submissions delayed by the limit of submissions per second.
    pub throttled: u64,
    /// Doorbells received by polling, without a VM exit.
    pub polled_doorbells: u64,
    /// Wake-ups that required a trapped write.
    pub wakeups: u64,
    /// Number of times that the vGPU was switched out with work left.
    pub preemptions: u64,
    /// Number of time slices that ended late.
    pub slice_overruns: u64,
    /// Total delay of late time slices, in nanoseconds.
    pub overrun_ns: u64,
    /// Part of the time slices in which the host ran other work, in nanoseconds. No vGPU is charged
    /// for this time.
    pub stolen_ns: u64,
    /// Channel faults, including hangs.
    pub faults: u64,
    /// Channels reset because of a hang.
    pub hang_resets: u64,
    /// Existing channels.
    pub channels: u32,
    /// Guest memory imported, in bytes.
    pub imported_bytes: u64,
    /// Limits of the vGPU.
    pub limits: Limits,
    /// Trapped accesses of the attached VM.
    pub traps: Traps,
    /// Process ID of the worker.
    pub pid: Option<u32>,
    /// Process ID of the attached VM.
    pub vm_pid: Option<i32>,
    /// Name of the attached VM, if its command line has one.
    #[serde(default)]
    pub vm_name: Option<String>,
    /// CUDA programs, while they use the vGPU.
    #[serde(default)]
    pub programs: Option<Programs>,
}

/// Engine time by engine, in nanoseconds. Methods that lead to a copy or a kernel count with that
/// copy or kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EngineTimes {
    /// Copies.
    pub copy_ns: u64,
    /// Kernels.
    pub compute_ns: u64,
    /// Semaphores, and methods that launch nothing.
    pub host_ns: u64,
}

/// Limits of a vGPU besides engine time. Absent members have no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Limits {
    /// Maximum number of channels.
    pub channels: u32,
    /// Maximum size of imported guest memory, in bytes.
    pub imported_bytes: u64,
    /// Maximum number of GPFIFO entries per second.
    pub submissions_per_second: Option<u32>,
    /// Maximum number of screen readouts per second; absent without a screen.
    pub refresh_per_second: Option<u32>,
    /// Hang limit for the engine time of one kernel or transfer, in milliseconds.
    pub hang_timeout_ms: Option<u64>,
    /// Hang limit for the wait on a semaphore, in milliseconds.
    pub acquire_timeout_ms: Option<u64>,
}
