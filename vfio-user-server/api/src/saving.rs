//! Saving, restoring and upgrading vGPUs.

use mdev_core::ids::VgpuId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Media type of a saved vGPU.
pub const SAVED_VGPU: &str = "application/vnd.tessera.vgpu";

/// Request to save a vGPU: `POST /v1/vgpus/{vgpu}/save`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SaveVgpu {
    /// Leaves the vGPU paused, until it is resumed, reset or its VM ends.
    #[serde(default)]
    pub keep_paused: bool,
    /// Only checks whether the vGPU can be saved now. The response is empty.
    #[serde(default)]
    pub check: bool,
    /// Adds the guest memory that the vGPU has written since `log-writes` began to record it.
    #[serde(default)]
    pub written: bool,
}

/// Result of `POST /v1/vgpus/{vgpu}/checkpoint`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Checkpoint {
    /// Whether no CUDA program uses the vGPU any more. Otherwise the VM is at work: ask again.
    pub done: bool,
}

/// Request to record the guest memory that a vGPU writes: `POST /v1/vgpus/{vgpu}/log-writes`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LogWrites {
    /// Whether to record, anew, or to end the record.
    #[serde(default)]
    pub enabled: bool,
}

/// Step of a handover of a vGPU to another process of its VM: `POST /v1/vgpus/{vgpu}/handover`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HandoverStep {
    /// Pauses the vGPU, and lets another process attach beside the attached one.
    Begin,
    /// Gives the vGPU, which stays paused, to the process that has attached. `resume` completes the
    /// handover and cuts the old process off.
    Adopt,
    /// Gives the vGPU, which stays paused, back to the old process. `resume` without `adopt` does
    /// the same first.
    #[default]
    Abandon,
}

/// Request for a step of a handover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Handover {
    /// The step.
    #[serde(default)]
    pub step: HandoverStep,
}

/// Request to restore a vGPU from a file whose descriptor comes with the request: `POST
/// /v1/vgpus/{vgpu}/restore-file`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RestoreFile {
    /// Which vGPU of a saved VM, from 0.
    #[serde(default)]
    pub index: usize,
}

/// Result of a restore, `POST /v1/vgpus/{vgpu}/restore`, and of a step of a handover. The vGPU is
/// paused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RestoredVgpu {
    /// Writes to configuration space, in this order, by which the VM's monitor learns of the
    /// restored addresses and interrupts.
    pub config: Vec<ConfigWrite>,
}

/// Write to configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigWrite {
    /// Offset in bytes, a multiple of 4.
    pub offset: u16,
    /// Value of 32 bits.
    pub value: u32,
}

impl From<mdev_core::device::ConfigWrite> for ConfigWrite {
    fn from(write: mdev_core::device::ConfigWrite) -> Self {
        let mdev_core::device::ConfigWrite { offset, value } = write;
        Self { offset, value }
    }
}

/// Result of `POST /v1/vgpus/{vgpu}/upgrade`: another worker serves the vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpgradedVgpu {
    /// UUID of the vGPU.
    #[schema(value_type = String, format = "uuid")]
    pub uuid: VgpuId,
    /// Process ID of the worker before.
    pub pid_before: u32,
    /// Process ID of the worker.
    pub pid: u32,
}
