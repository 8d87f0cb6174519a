//! What the control API says, as types.
//!
//! Lists are bare JSON arrays. Every error, whatever its status, is an [`ErrorBody`]. Names and shapes that mdevctl has
//! are mdevctl's (`mdev_type`, `start`, `attrs`), so that a definition can be copied between the two.

use std::collections::BTreeMap;
use std::fmt;

use mdev_core::definition::Start;
use mdev_core::ids::VgpuId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::private::AttachedClient;

pub use super::measuring::{EngineTimes, Limits, ParentStats, Stats, VgpuStats};
pub use super::scheduling::{Decided, ModifyScheduler, Scheduler, SchedulerDecision};
pub use super::screens::{Focused, PhysicalScreen, Rotate};

/// One attribute, in mdevctl's shape: an object with one member, `{"core": "80"}`.
pub type Attribute = BTreeMap<String, String>;

/// `GET /v1/version`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// Version of `vgpud`.
    pub version: String,
    /// Version of this API; a change that breaks clients changes it.
    pub api: String,
    /// The manager's process.
    pub pid: u32,
    /// The manager's `--run-dir`.
    pub run_dir: String,
    /// The manager's `--config-dir`.
    pub config_dir: String,
}

/// How a physical GPU is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ParentState {
    /// It takes vGPUs.
    Ready,
    /// It is being started, at first or after it was lost.
    Starting,
    /// It is gone; a new one is tried with growing pauses.
    Lost,
    /// Its process is of another version of vgpud: it goes on for the VMs that it has, and takes no more.
    Foreign,
}

/// A physical GPU: one of `GET /v1/parents`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Parent {
    /// `soft0`, or a PCI address.
    pub name: String,
    /// Which backend drives it: `soft`.
    pub backend: String,
    /// The model, as it begins the names of its types.
    pub model: String,
    /// For people.
    pub description: String,
    /// How it is.
    pub state: ParentState,
    /// Video memory that vGPUs may share, in bytes.
    pub vram_bytes: u64,
    /// Video memory that no running vGPU has, in bytes.
    pub vram_free_bytes: u64,
    /// What the backend can do, in lower case: `vram_aperture`, `compute`, ...
    pub capabilities: Vec<String>,
    /// The scheduling policy in force.
    pub scheduler: String,
    /// The process that is the GPU, or that owns it, where there is one.
    pub pid: Option<u32>,
    /// vGPUs that run on it.
    pub running: u32,
    /// Its physical screen, where it has one.
    #[serde(default)]
    pub screen: Option<PhysicalScreen>,
}

/// A parent with what it offers: one of `GET /v1/types`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ParentTypes {
    /// The parent's name.
    pub parent: String,
    /// Its types, in the order of their size.
    pub types: Vec<TypeInfo>,
}

/// A vGPU type as one parent offers it now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TypeInfo {
    /// Its name: `SOFT-1Q`.
    pub name: String,
    /// `num_heads=1, framebuffer=1024M, max_resolution=1920x1200, max_instance=8`.
    pub description: String,
    /// How a VM attaches: always `vfio-user`.
    pub device_api: String,
    /// How many more can be started now.
    pub available_instances: u32,
    /// How many an empty parent can take.
    pub max_instances: u32,
    /// Video memory of one vGPU, in bytes.
    pub vram_bytes: u64,
    /// Display heads: 0 or 1.
    pub heads: u32,
}

/// Whether the manager starts a defined vGPU when it starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum StartPolicy {
    /// At boot.
    Auto,
    /// On request.
    #[default]
    Manual,
}

/// How a vGPU is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VgpuState {
    /// Defined, and not running.
    Stopped,
    /// A VM can attach, or is attached.
    Running,
    /// Its worker died and is being started again.
    Restarting,
    /// Its GPU is lost, or its worker cannot be kept alive: stop and start it.
    Failed,
}

/// A vGPU, running or defined or both: one of `GET /v1/vgpus`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Vgpu {
    /// Its name.
    #[schema(value_type = String, format = "uuid")]
    pub uuid: VgpuId,
    /// The physical GPU it is, or will be, on.
    pub parent: String,
    /// Its type.
    pub mdev_type: String,
    /// Start policy of its definition; `manual` where it has none.
    pub start: StartPolicy,
    /// Attributes of its definition, in order; of the running vGPU where it has none.
    #[schema(value_type = Vec<BTreeMap<String, String>>)]
    pub attrs: Vec<Attribute>,
    /// The type that runs, which its definition may not say any more; absent where it does not run.
    #[serde(default)]
    pub live_type: Option<String>,
    /// Attributes in force, in order, live changes included; absent where it does not run.
    #[serde(default)]
    #[schema(value_type = Option<Vec<BTreeMap<String, String>>>)]
    pub live_attrs: Option<Vec<Attribute>>,
    /// True where it has a definition, that is, survives a reboot.
    pub defined: bool,
    /// How it is.
    pub state: VgpuState,
    /// Why it is `restarting` or `failed`, in one line.
    pub reason: Option<String>,
    /// Where QEMU attaches, while it runs.
    pub socket: Option<String>,
    /// Its worker's process, while it runs.
    pub pid: Option<u32>,
    /// The VM that is attached.
    pub vm: Option<AttachedClient>,
    /// Whether it is the one on its parent's physical screen, while it runs on a parent that has one.
    #[serde(default)]
    pub focus: Option<bool>,
    /// What the operator should know about the attached VM, for example memory that is not shared.
    pub warnings: Vec<String>,
}

/// `POST /v1/vgpus`: define a vGPU, start a transient one, or both.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateVgpu {
    /// Its name; a random one where absent.
    #[schema(value_type = Option<String>, format = "uuid")]
    #[serde(default)]
    pub uuid: Option<VgpuId>,
    /// The physical GPU; where absent, the first that offers the type and has room.
    #[serde(default)]
    pub parent: Option<String>,
    /// Its type. May be absent only with `define` of a vGPU that is running.
    #[serde(default)]
    pub mdev_type: Option<String>,
    /// Start policy of the definition.
    #[serde(default)]
    pub start: StartPolicy,
    /// Attributes, in order.
    #[serde(default)]
    #[schema(value_type = Vec<BTreeMap<String, String>>)]
    pub attrs: Vec<Attribute>,
    /// Write a definition. It is on disk before the answer.
    #[serde(default)]
    pub define: bool,
    /// Start it now. Without `define` it is transient: gone when stopped. One that is defined runs with what is given
    /// here, and its definition stays as it is.
    #[serde(default)]
    pub run: bool,
    /// Do it even though a callout script says no.
    #[serde(default)]
    pub force: bool,
}

/// `DELETE /v1/vgpus/{uuid}`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UndefineVgpu {
    /// Remove it even though a callout script says no.
    #[serde(default)]
    pub force: bool,
}

/// What a change is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ModifyTarget {
    /// The definition: in force from the next start on.
    #[default]
    Defined,
    /// The running vGPU: in force at once, until it is stopped. Only attributes such as `core` can change.
    Live,
    /// Both.
    Both,
}

/// `PATCH /v1/vgpus/{uuid}`: what is absent stays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ModifyVgpu {
    /// Another type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mdev_type: Option<String>,
    /// Another start policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartPolicy>,
    /// All attributes, in order: replaces the list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<BTreeMap<String, String>>>)]
    pub attrs: Option<Vec<Attribute>>,
    /// With target `both`: what the running vGPU's attributes are to be, where that is not `attrs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<BTreeMap<String, String>>>)]
    pub live_attrs: Option<Vec<Attribute>>,
    /// What to change.
    #[serde(default)]
    pub target: ModifyTarget,
    /// Change it even though a callout script says no.
    #[serde(default)]
    pub force: bool,
}

/// `POST /v1/vgpus/{uuid}/start`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartVgpu {
    /// Whom its socket belongs to: `USER` or `USER:GROUP`, by name or number, in place of the attribute `owner`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Start it even though a callout script says no.
    #[serde(default)]
    pub force: bool,
}

/// `POST /v1/vgpus/{uuid}/stop`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopVgpu {
    /// Stop it even though a VM uses it (the VM sees a device that fell off its bus) or a callout script says no.
    #[serde(default)]
    pub force: bool,
}

/// `POST /v1/vgpus/{uuid}/console`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OpenConsole {
    /// The QMP socket of the VM that the vGPU is attached to: keyboard and pointer go there. Without it, the screen can
    /// only be viewed.
    #[serde(default)]
    pub monitor: Option<String>,
}

/// `POST /v1/web`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OpenWeb {
    /// QMP sockets of VMs, by their vGPUs: whose screens have keyboard and pointer in the session that this opens.
    #[serde(default)]
    #[schema(value_type = BTreeMap<String, String>)]
    pub monitors: BTreeMap<VgpuId, String>,
}

/// Where a browser gets in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WebAddress {
    /// It opens one session, once, within five minutes.
    pub url: String,
}

/// Every error's body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// What went wrong.
    pub error: ErrorDetail,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorDetail {
    /// For programs.
    pub code: ErrorCode,
    /// For people: what is wrong and what would be right, in one line.
    pub message: String,
}

impl ErrorDetail {
    /// Says what went wrong.
    pub fn new(code: ErrorCode, message: impl fmt::Display) -> Self {
        // One line, whatever an operating system or a library put into it.
        Self { code, message: message.to_string().replace('\n', " ") }
    }
}

impl fmt::Display for ErrorDetail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ErrorDetail {}

/// What went wrong, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// 400: the request cannot be read, or a value in it cannot be.
    Invalid,
    /// 403: not for this user.
    Forbidden,
    /// 404: no such vGPU, parent, type or path.
    NotFound,
    /// 405: not with this method.
    MethodNotAllowed,
    /// 409: it exists already.
    Exists,
    /// 409: not in this state (already running, not running, not defined).
    Conflict,
    /// 409: a VM uses it.
    InUse,
    /// 409: the parent has no room for one more.
    NoRoom,
    /// 409: a callout script of this host says no.
    Callout,
    /// 413: the request is too long.
    TooLarge,
    /// 503: the GPU or the worker did not answer.
    Unavailable,
    /// 500: our own mistake, or the disk's.
    Internal,
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

impl ErrorCode {
    /// The HTTP status that goes with it.
    pub fn status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::MethodNotAllowed => 405,
            Self::Exists | Self::Conflict | Self::InUse | Self::NoRoom | Self::Callout => 409,
            Self::TooLarge => 413,
            Self::Internal => 500,
            Self::Unavailable => 503,
        }
    }
}
