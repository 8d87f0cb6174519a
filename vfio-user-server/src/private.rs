//! What the manager and a worker say to each other: JSON in SOCK_SEQPACKET packets, with descriptors attached.
//!
//! A worker listens on `control.sock` in its vGPU's folder, so that a new manager can adopt it. Each connection is a
//! sequence of one request and one reply. Both ends come from one binary; the version is checked all the same, since a
//! worker may have been started by an older one.

use mdev_core::device::{self, FunctionSpec, Scanout};
use mdev_core::gpu::ClientSpec;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Bumped with every change of the types in this file.
pub const VERSION: u32 = 3;

/// What a worker is started with, as JSON on the descriptor that `--spec-fd` names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerSpec {
    /// [`VERSION`].
    pub version: u32,
    /// The PCI function it serves.
    pub function: FunctionSpec,
    /// Which backend opens the GPU: `soft`, `nvidia`.
    pub backend: String,
    /// What the GPU granted.
    pub client: ClientSpec,
    /// The parent, for log lines and adoption.
    pub parent: String,
    /// Share asked for, in hundredths of the GPU; the manager keeps it here so that adoption finds it.
    pub core: Option<u8>,
    /// The user, besides root, whose VM may attach.
    pub owner: u32,
    /// The user, besides root, whose manager it obeys.
    pub manager: u32,
}

/// A request to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request")]
pub enum WorkerRequest {
    /// How it is: [`WorkerReply::Status`].
    Status {
        /// [`VERSION`].
        version: u32,
    },
    /// What is on the screen: [`WorkerReply::Scanout`], with the video memory's descriptor attached. Its offset is one
    /// into that file.
    Scanout,
    /// Take the attached descriptor as the new connection to the GPU: [`WorkerReply::Done`].
    Attach,
    /// End: [`WorkerReply::Done`], then the process exits and everything is freed.
    Stop,
}

/// A worker's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reply")]
pub enum WorkerReply {
    /// Answer to `Status`.
    Status(Box<WorkerStatus>),
    /// Answer to `Scanout`.
    Scanout(Scanout),
    /// Answer to `Stop`.
    Done,
    /// It could not be done: one line for people.
    Error {
        /// What is wrong.
        message: String,
    },
}

/// How a worker is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// [`VERSION`].
    pub version: u32,
    /// Its process.
    pub pid: u32,
    /// What it was started with.
    pub spec: WorkerSpec,
    /// The VM attached to its vfio-user socket.
    pub client: Option<AttachedClient>,
    /// False once the GPU is lost.
    pub gpu_ok: bool,
    /// Trapped accesses since the worker started, by kind.
    pub traps: Traps,
    /// Warnings for the operator about the attached VM (for example memory that is not shared).
    pub warnings: Vec<String>,
}

/// Who is at the other end of a vfio-user socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttachedClient {
    /// Its process id (`SO_PEERCRED`).
    pub pid: i32,
    /// Its user id.
    pub uid: u32,
}

/// Counters of trapped accesses: [`device::Traps`] as it is told to people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Traps {
    /// Config space accesses.
    pub config: u64,
    /// Accesses to the display registers.
    pub display: u64,
    /// Accesses to the control registers, mailbox requests included.
    pub control: u64,
    /// Mailbox requests.
    pub mailbox: u64,
    /// Trapped doorbell and wake writes.
    pub doorbell: u64,
    /// Accesses to video memory that a client did not map.
    pub memory: u64,
}

impl From<device::Traps> for Traps {
    fn from(traps: device::Traps) -> Self {
        let device::Traps { config, display, control, mailbox, doorbell, memory } = traps;
        Self { config, display, control, mailbox, doorbell, memory }
    }
}
