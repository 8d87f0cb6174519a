//! What the manager and a worker say to each other: JSON in SOCK_SEQPACKET packets, with descriptors attached.
//!
//! A worker listens on `control.sock` in its vGPU's folder, so that a new manager can adopt it. Each connection is a
//! sequence of one request and one reply. A worker is as old as its vGPU's start, so a manager speaks with workers of
//! other releases: fields are only added, each with a default, and what an older end does not know is left out. What
//! cannot be done like that raises [`OLDEST`], and a worker from before it goes on unasked until it is stopped.

use mdev_core::device::{self, FunctionSpec, Scanout};
use mdev_core::gpu::ClientSpec;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Bumped with every change of the types in this file.
pub const VERSION: u32 = 4;

/// The oldest version that is understood: workers of version 3 answer those who ask for just that.
pub const OLDEST: u32 = 3;

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
        /// [`OLDEST`] of the manager: any worker from then on answers.
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
    /// [`OLDEST`] of the worker, since version 4: a manager that is older than the worker goes by it.
    #[serde(default)]
    pub oldest: Option<u32>,
}

impl WorkerStatus {
    /// Whether this manager understands such a worker.
    pub fn is_understood(&self) -> bool {
        let newer = self.oldest.is_some_and(|oldest| oldest <= VERSION);
        self.version >= OLDEST && (self.version <= VERSION || newer)
    }
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// What a worker of version 3 says of itself.
    const THREE: &str = r#"{"reply":"status","version":3,"pid":7,"spec":{"version":3,
        "function":{"vgpu":"0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00a","type_name":"SOFT-1C","display":null,
        "doorbell_mapped":true},"backend":"soft","client":CLIENT,"parent":"soft0","core":null,"owner":0,
        "manager":0},"client":{"pid":8,"uid":9},"gpu_ok":true,"traps":{"config":1,"display":0,
        "control":0,"mailbox":0,"doorbell":0,"memory":0},"warnings":[]}"#;

    pub fn three() -> WorkerStatus {
        let client = ClientSpec {
            vgpu: "0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00a".parse().unwrap(),
            vram_bytes: 1 << 28,
            framebuffer_bytes: 0,
            max_channels: 8,
            max_import_bytes: 1 << 30,
        };
        let text = THREE.replace("CLIENT", &serde_json::to_string(&client).unwrap());
        match serde_json::from_str(&text).unwrap() {
            WorkerReply::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn workers_of_version_3_are_understood() {
        assert!(three().is_understood());
        assert_eq!(three().client, Some(AttachedClient { pid: 8, uid: 9 }));
    }

    #[test]
    fn a_worker_says_itself_whether_an_older_manager_may_have_it() {
        let with = |version, oldest| WorkerStatus { version, oldest, ..three() }.is_understood();
        assert!(with(VERSION, Some(OLDEST)) && with(VERSION + 9, Some(VERSION)));
        assert!(!with(VERSION + 1, Some(VERSION + 1)) && !with(VERSION + 1, None));
        assert!(!with(OLDEST - 1, None));
    }
}
