//! vGPUs and their states.

use std::collections::BTreeMap;

use mdev_core::definition::Start;
use mdev_core::ids::VgpuId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::AttachedClient;

/// One attribute, in mdevctl's shape: an object with one member, `{"core": "80"}`.
pub type Attribute = BTreeMap<String, String>;

/// Start policy of a definition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum StartPolicy {
    /// The manager starts the vGPU when the manager starts.
    Auto,
    /// The vGPU starts on request.
    #[default]
    Manual,
}

impl From<Start> for StartPolicy {
    fn from(start: Start) -> Self {
        match start {
            Start::Auto => Self::Auto,
            Start::Manual => Self::Manual,
        }
    }
}

impl From<StartPolicy> for Start {
    fn from(start: StartPolicy) -> Self {
        match start {
            StartPolicy::Auto => Self::Auto,
            StartPolicy::Manual => Self::Manual,
        }
    }
}

/// State of a vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VgpuState {
    /// The vGPU is defined and not running.
    Stopped,
    /// The vGPU is running. A VM is attached or can attach.
    Running,
    /// The worker ended unexpectedly and is being restarted.
    Restarting,
    /// The GPU is lost, or the worker keeps failing. Stop and start the vGPU.
    Failed,
}

/// vGPU that is running, defined or both: element of `GET /v1/vgpus`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Vgpu {
    /// UUID of the vGPU.
    #[schema(value_type = String, format = "uuid")]
    pub uuid: VgpuId,
    /// Name of the vGPU: its attribute `name`. Paths take it in place of the UUID.
    #[serde(default)]
    pub name: Option<String>,
    /// Physical GPU on which the vGPU runs or will run.
    pub parent: String,
    /// vGPU type.
    pub mdev_type: String,
    /// Start policy of the definition; `manual` without a definition.
    pub start: StartPolicy,
    /// Attributes of the definition, in order; attributes of the running vGPU without a definition.
    #[schema(value_type = Vec<BTreeMap<String, String>>)]
    pub attrs: Vec<Attribute>,
    /// Type of the running vGPU, which can differ from a changed definition; absent while stopped.
    #[serde(default)]
    pub live_type: Option<String>,
    /// Attributes in force, in order, including live changes; absent while stopped.
    #[serde(default)]
    #[schema(value_type = Option<Vec<BTreeMap<String, String>>>)]
    pub live_attrs: Option<Vec<Attribute>>,
    /// Whether the vGPU has a definition, which survives a reboot.
    pub defined: bool,
    /// State of the vGPU.
    pub state: VgpuState,
    /// Reason for the state `restarting` or `failed`, in one line.
    pub reason: Option<String>,
    /// Path of the vfio-user socket for QEMU, while the vGPU runs.
    pub socket: Option<String>,
    /// Process ID of the worker, while the vGPU runs.
    pub pid: Option<u32>,
    /// Process ID of the context, which has the vGPU's memory and engine, on a GPU with contexts.
    #[serde(default)]
    pub context_pid: Option<u32>,
    /// Attached VM.
    pub vm: Option<AttachedClient>,
    /// Name of the attached VM, if its command line has one.
    #[serde(default)]
    pub vm_name: Option<String>,
    /// Whether the parent's physical screen shows this vGPU, while the vGPU runs on a parent with a
    /// screen.
    #[serde(default)]
    pub focus: Option<bool>,
    /// Warnings about the attached VM, for example memory that is not shared.
    pub warnings: Vec<String>,
}
