//! What a scheduler is told, what it answers, and what it can be asked.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::gpu::{Usage, UsageReport};
use crate::ids::VgpuId;
use crate::sched::account::Measured;
use crate::sched::budget::Budget;
use crate::sched::policy::Config;
use crate::sched::share::Share;

/// What happens to a scheduler.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A vGPU was admitted (or adopted).
    VgpuStarted {
        /// Which one.
        id: VgpuId,
        /// What it asks for.
        share: Share,
        /// Most instances of its type on this parent, for fixed shares.
        max_instances: u32,
    },
    /// A vGPU is gone. One that is not known is no mistake.
    VgpuStopped {
        /// Which one.
        id: VgpuId,
    },
    /// A running vGPU asks for another share.
    ShareChanged {
        /// Which one.
        id: VgpuId,
        /// What it asks for from now on.
        share: Share,
    },
    /// The policy or its knobs are others from now on. Knobs out of their bounds are moved into them.
    ConfigChanged(Config),
    /// The silicon's counters were read: at [`Scheduler::next_deadline`], or whenever somebody wants to know.
    UsageReport(&'a UsageReport),
    /// Time has passed. Needed only while there are no usage reports.
    Tick {
        /// `CLOCK_MONOTONIC` in nanoseconds, the clock of usage reports.
        now_ns: u64,
    },
}

/// What is to be done to the silicon, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// [`crate::gpu::Gpu::set_timeslice`]
    SetTimeslice(VgpuId, Duration),
    /// [`crate::gpu::Gpu::set_budget`]; only on silicon that has budgets.
    SetBudget(VgpuId, Option<Budget>),
    /// [`crate::gpu::Gpu::set_gate`]
    Gate(VgpuId, bool),
}

/// Why an event was refused. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    /// More than the whole GPU.
    #[error("Not enough of the GPU is left: core={asked} asked, {left} of 100 left{}", hint(*left))]
    Overcommitted {
        /// Hundredths asked for.
        asked: u8,
        /// Hundredths that nobody asked for.
        left: u8,
    },
    /// It is scheduled already.
    #[error("vGPU {0} is scheduled already")]
    Duplicate(VgpuId),
    /// It is not scheduled.
    #[error("vGPU {0} is not scheduled")]
    Unknown(VgpuId),
}

fn hint(left: u8) -> String {
    match left {
        0 => "; lower another vGPU's core, or leave core out".to_owned(),
        left => format!("; ask for {left} or less, or lower another vGPU's core"),
    }
}

/// All that there is to know about one vGPU's share.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// What it asks for.
    pub share: Share,
    /// The part of the GPU that it gets while all are busy, 0 to 1.
    pub entitled: f64,
    /// The part that it gets at most, 0 to 1.
    pub cap: f64,
    /// What it used over the last second.
    pub measured: Measured,
    /// The silicon's counters, as last read.
    pub usage: Usage,
    /// Its slice.
    pub slice: Duration,
    /// False while it is held back by a gate.
    pub gate_open: bool,
    /// Times that a gate was closed on it. Budgets in the silicon are not counted here.
    pub gates_closed: u64,
    /// Engine time that the others owe it; negative where it owes.
    pub owed_ns: i64,
}
