//! Interface of the scheduler: events, actions, errors and snapshots.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::gpu::{Usage, UsageReport};
use crate::ids::VgpuId;
use crate::sched::account::Measured;
use crate::sched::budget::Budget;
use crate::sched::policy::Config;
use crate::sched::share::ShareRequest;

/// Input of the scheduler.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A vGPU was admitted (or adopted).
    VgpuStarted {
        /// The vGPU.
        id: VgpuId,
        /// The requested share.
        share: ShareRequest,
        /// Maximum number of instances of its type on this parent, for fixed shares.
        max_instances: u32,
    },
    /// A vGPU was removed. The scheduler ignores unknown vGPUs.
    VgpuStopped {
        /// The vGPU.
        id: VgpuId,
    },
    /// A running vGPU requests another share.
    ShareChanged {
        /// The vGPU.
        id: VgpuId,
        /// The requested share.
        share: ShareRequest,
    },
    /// The policy or another setting changed. The scheduler clamps settings to their bounds.
    ConfigChanged(Config),
    /// The GPU's counters were read, at [`Scheduler::next_deadline`] or on demand.
    ///
    /// [`Scheduler::next_deadline`]: crate::sched::Scheduler::next_deadline
    UsageReport(&'a UsageReport),
    /// Time has passed. Required only while there are no usage reports.
    Tick {
        /// `CLOCK_MONOTONIC` in nanoseconds, the clock of usage reports.
        now_ns: u64,
    },
}

/// Command for the GPU. The caller executes actions in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// [`crate::gpu::Gpu::set_timeslice`]
    SetTimeslice(VgpuId, Duration),
    /// [`crate::gpu::Gpu::set_budget`]; only on a GPU that has budgets.
    SetBudget(VgpuId, Option<Budget>),
    /// [`crate::gpu::Gpu::set_gate`]; true opens the gate.
    Gate(VgpuId, bool),
}

/// Reason for refusing an event. A refused event changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    /// The requests exceed the whole GPU.
    #[error("Not enough of the GPU is left: core={asked} asked, {left} of 100 left{}", hint(*left))]
    Overcommitted {
        /// Requested percentage.
        asked: u8,
        /// Percentage that no vGPU requested.
        left: u8,
    },
    /// The vGPU is already scheduled.
    #[error("vGPU {0} is scheduled already")]
    Duplicate(VgpuId),
    /// The vGPU is not scheduled.
    #[error("vGPU {0} is not scheduled")]
    Unknown(VgpuId),
}

fn hint(left: u8) -> String {
    match left {
        0 => "; lower another vGPU's core, or leave core out".to_owned(),
        left => format!("; ask for {left} or less, or lower another vGPU's core"),
    }
}

/// Scheduling state of one vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The requested share.
    pub share: ShareRequest,
    /// Part of the GPU, 0 to 1, that the vGPU gets while all vGPUs are busy.
    pub entitled: f64,
    /// Largest part of the GPU, 0 to 1, that the vGPU may get.
    pub cap: f64,
    /// Engine time used over the last second.
    pub measured: Measured,
    /// The GPU's counters, as last read.
    pub usage: Usage,
    /// Time slice.
    pub slice: Duration,
    /// False while the gate is closed.
    pub gate_open: bool,
    /// Number of times that the scheduler closed the gate. Budgets in the GPU do not count.
    pub gates_closed: u64,
    /// Engine time that other vGPUs owe to this vGPU; negative if this vGPU owes.
    pub owed_ns: i64,
}
