//! Messages between the manager and a GPU process.

use std::time::Duration;

use mdev_core::gpu::{ClientSpec, GpuDescription, Quotas, ScreenStatus, Waits};
use mdev_core::ids::VgpuId;
use mdev_core::sched::Budget;
use serde::{Deserialize, Serialize};

#[cfg(doc)]
use super::{MAX_WAITS, VERSION, agreed};
use super::{Refusal, UsageReportOnWire};

/// Requests of the manager, on the admin socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdminRequest {
    /// Must be sent first. Its discriminant must never change, so that any two versions understand
    /// it.
    Hello {
        /// [`VERSION`].
        version: u32,
    },
    /// Admits a vGPU. Reply: [`AdminReply::Admitted`] with the client's connection.
    Admit(ClientSpec),
    /// Evicts a vGPU: frees all its resources.
    Evict(VgpuId),
    /// Sets a time slice.
    SetTimeslice(VgpuId, Duration),
    /// Opens or closes a gate.
    SetGate(VgpuId, bool),
    /// Faults all channels of a vGPU.
    Reset(VgpuId),
    /// Reads all counters but the waits. Reply: [`AdminReply::Usage`].
    Usage,
    /// Sets or removes a budget of engine time.
    SetBudget(VgpuId, Option<Budget>),
    /// Sets quotas.
    SetQuotas(VgpuId, Quotas),
    /// Shows a vGPU on the physical screen. Reply: [`AdminReply::Focused`].
    Focus(VgpuId),
    /// Starts the rotation of the screen with this interval, or stops it.
    Rotate(Option<Duration>),
    /// Reads the state of the screen. Reply: [`AdminReply::Screen`].
    Screen,
    /// Frees what is reserved for a removed vGPU.
    Forget(VgpuId),
    /// Reads the waits of these vGPUs, at most [`MAX_WAITS`]. Reply: [`AdminReply::Waits`].
    Waits(Vec<VgpuId>),
    /// Admits a vGPU of a GPU with contexts. Attached: a connection to its context, new or running,
    /// and `/proc/PID/schedstat` of the context, if the kernel has it.
    AdmitContext(ClientSpec),
}

/// Replies to the manager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdminReply {
    /// Reply to `Hello`. Its discriminant must never change.
    Hello {
        /// Negotiated version, as [`agreed`] returns it.
        version: u32,
        /// Description of the GPU.
        gpu: GpuDescription,
    },
    /// Success without data.
    Done,
    /// The vGPU is admitted. The client's connection is attached.
    Admitted,
    /// All counters but the waits.
    Usage(UsageReportOnWire),
    /// The request was refused.
    Refused(Refusal),
    /// The vGPU is on the screen. Contains the duration of the switch.
    Focused(Duration),
    /// State of the screen.
    Screen(ScreenStatus),
    /// Waits of those vGPUs that exist.
    Waits(Vec<(VgpuId, Waits)>),
}
