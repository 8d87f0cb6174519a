//! Control protocol between the manager and a worker: JSON in SOCK_SEQPACKET packets, with
//! descriptors attached.
//!
//! A worker listens on `control.sock` in its vGPU's folder, so that a new manager can adopt it. A
//! connection carries pairs of one request and one reply. A worker keeps the version of vgpud that
//! started it, so a manager talks to workers of other versions: fields are only added, each with a
//! default, and an older end ignores them. Any other change raises [`OLDEST`]; a worker of an
//! earlier version then continues without queries until its vGPU is stopped.

use mdev_core::device::{ConfigWrite, FunctionSpec, Scanout};
use mdev_core::gpu::{ClientSpec, StagedCopy};
use serde::{Deserialize, Serialize};
use vgpud_api::{AttachedClient, Traps};

/// Version of the protocol. Raised with every change of the types in this file.
pub const VERSION: u32 = 1;

/// Oldest supported version.
pub const OLDEST: u32 = 1;

/// Specification of a worker, as JSON in the file that `--spec-fd` names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerSpec {
    /// [`VERSION`].
    pub version: u32,
    /// PCI function of the vGPU.
    pub function: FunctionSpec,
    /// Backend that opens the GPU: `soft`, `nvidia`.
    pub backend: String,
    /// Resources that the GPU granted.
    pub client: ClientSpec,
    /// Name of the parent, for log lines and adoption.
    pub parent: String,
    /// Requested share in hundredths of the GPU, kept here for adoption.
    pub core: Option<u8>,
    /// User that may attach, besides root.
    pub owner: u32,
    /// User whose manager may connect, besides root.
    pub manager: u32,
    /// Present if CUDA programs can use the vGPU.
    pub programs: Option<ProgramsSpec>,
}

/// What CUDA programs on a vGPU see.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramsSpec {
    /// Name of the GPU.
    pub name: String,
}

/// Request to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request")]
pub enum WorkerRequest {
    /// Requests [`WorkerReply::Status`].
    Status {
        /// [`OLDEST`] of the manager. Workers that support this version answer.
        version: u32,
    },
    /// Requests [`WorkerReply::Scanout`], with the descriptor of the video memory attached. The
    /// scanout's offset is an offset into that file.
    Scanout,
    /// Passes a new connection to the GPU as attached descriptor. The reply is
    /// [`WorkerReply::Done`].
    Attach,
    /// Tells the worker to exit after it has replied [`WorkerReply::Done`].
    Stop,
    /// Asks whether the vGPU can be saved now. The reply is [`WorkerReply::Done`], or the reason
    /// why not.
    CheckSave,
    /// Stops the vGPU's work until `Resume`, so that its memory can be copied. The reply is
    /// [`WorkerReply::Done`].
    Pause,
    /// Continues the work of a paused vGPU, and has the guest restore its programs. The reply is
    /// [`WorkerReply::Done`].
    Resume,
    /// Requests the state of a paused vGPU. The reply is [`WorkerReply::Saved`], with a file that
    /// holds a `SavedVgpu` in JSON and the file of the video memory attached.
    Save,
    /// Restores the state in the attached file, and clears video memory. The vGPU is paused then.
    /// The reply is [`WorkerReply::Restored`], with the file of the video memory attached.
    Restore,
    /// Gives up a restore: resets the vGPU and clears its video memory. The reply is
    /// [`WorkerReply::Done`].
    Discard,
    /// Pauses the vGPU, so that another process of its VM can attach beside the attached one. The
    /// reply is [`WorkerReply::Done`].
    BeginHandover,
    /// Gives the vGPU, still paused, to the process that has attached. The reply is
    /// [`WorkerReply::Adopted`]. `Resume` then cuts the old process off.
    Adopt,
    /// Gives the vGPU, still paused, back to the old process, and cuts the new one off. The reply
    /// is [`WorkerReply::Done`].
    AbandonHandover,
    /// Tells a worker with an anchor to end, so that another one continues. The reply is
    /// [`WorkerReply::Done`], or the reason why another one could not continue.
    Leave,
    /// Begins or ends a record of the guest memory that the vGPU writes. The reply is
    /// [`WorkerReply::Done`].
    LogWrites {
        /// Whether to record, anew.
        enabled: bool,
    },
    /// Requests guest memory that a paused vGPU has written, from an address on. The reply is
    /// [`WorkerReply::Written`], with a file of [`guest_pieces`](crate::guest_pieces) attached.
    Written {
        /// Guest-physical address.
        from: u64,
    },
    /// Writes the guest memory in the attached file of the same kind. The reply is
    /// [`WorkerReply::Done`].
    FillGuest,
    /// Copies between the video memory of a paused vGPU and its staging memory, which `Save` and
    /// `Restore` return. The reply is [`WorkerReply::Done`].
    CopyStaged(StagedCopy),
    /// Asks the guest to checkpoint its CUDA programs until `Resume`, if it was not asked yet. The
    /// reply is [`WorkerReply::Checkpoint`], or the reason why the guest refuses.
    Checkpoint,
}

/// Reply of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reply")]
pub enum WorkerReply {
    /// Reply to `Status`.
    Status(Box<WorkerStatus>),
    /// Reply to `Scanout`.
    Scanout(Scanout),
    /// Reply to requests without a result.
    Done,
    /// Reply to `Save`.
    Saved(MemoryRange),
    /// Reply to `Restore`.
    Restored(Restored),
    /// Reply to `Adopt`.
    Adopted {
        /// Writes to configuration space by which a VMM learns of the BARs and interrupts.
        config: Vec<ConfigWrite>,
    },
    /// Reply to `Written`.
    Written {
        /// Address from which there is more, if the file has
        /// [`BATCH`](crate::guest_pieces::BATCH) bytes of guest memory.
        next: Option<u64>,
    },
    /// Reply to `Checkpoint`.
    Checkpoint {
        /// Whether no program uses the vGPU any more.
        done: bool,
    },
    /// The request failed.
    Error {
        /// Cause, in one line.
        message: String,
    },
}

/// Video memory in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRange {
    /// Offset in the file in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// The file is staging memory, which is shorter than video memory.
    pub staged: bool,
}

/// Result of a restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    /// Video memory, to be filled.
    pub memory: MemoryRange,
    /// Writes to configuration space by which a VMM learns of the restored BARs and interrupts.
    pub config: Vec<ConfigWrite>,
}

/// Status of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// [`VERSION`].
    pub version: u32,
    /// Process ID of the worker.
    pub pid: u32,
    /// Specification that the worker was started with.
    pub spec: WorkerSpec,
    /// Client attached to the vfio-user socket.
    pub client: Option<AttachedClient>,
    /// False once the GPU is lost.
    pub gpu_ok: bool,
    /// Trapped accesses since the worker started, by kind.
    pub traps: Traps,
    /// Warnings for the operator about the attached VM, such as memory that is not shared.
    pub warnings: Vec<String>,
    /// [`OLDEST`] of the worker. Tells an older manager whether it supports the worker.
    pub oldest: u32,
    /// CUDA programs, while they use the vGPU.
    pub programs: Option<ProgramsStatus>,
}

/// Limit of the processes in [`ProgramsStatus`].
pub const MAX_PROCESSES: usize = 256;

/// CUDA programs on a vGPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramsStatus {
    /// Video memory that they have allocated, in bytes.
    pub vram_used_bytes: u64,
    /// Process IDs, with the bytes of video memory that each process can use.
    pub processes: Vec<(i32, u64)>,
    /// The process IDs are those in the VM, as its driver says.
    pub in_vm: bool,
    /// Process that has allocated managed memory.
    pub with_managed: Option<i32>,
}

impl WorkerStatus {
    /// Returns true if this manager supports the worker's version.
    pub fn is_supported(&self) -> bool {
        self.version >= OLDEST && self.oldest <= VERSION
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Status reply of a worker of version 1.
    const VERSION_1: &str = r#"{"reply":"status","version":1,"pid":7,"spec":{"version":1,
        "function":{"vgpu":"0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00a","type_name":"SOFT-1C","display":null,
        "doorbell_mapped":true},"backend":"soft","client":{
        "vgpu":"0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00a","vram_bytes":268435456,"framebuffer_bytes":0,
        "max_channels":8,"max_import_bytes":1073741824},"parent":"soft0","core":null,"owner":0,
        "manager":0,"programs":null},"client":{"pid":8,"uid":9},"gpu_ok":true,"traps":{"config":1,
        "display":0,"control":0,"mailbox":0,"doorbell":0,"memory":0},"warnings":[],"oldest":1,
        "programs":null}"#;

    /// Returns the status of a worker of version 1.
    pub fn status_of_version_1() -> WorkerStatus {
        match serde_json::from_str(VERSION_1).unwrap() {
            WorkerReply::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn workers_of_version_1_are_supported() {
        let status = status_of_version_1();
        assert!(status.is_supported());
        assert_eq!(status.client, Some(AttachedClient { pid: 8, uid: 9 }));
        let json: String = VERSION_1.split_whitespace().collect();
        assert_eq!(serde_json::to_string(&WorkerReply::Status(Box::new(status))).unwrap(), json);
    }

    #[test]
    fn newer_worker_states_the_oldest_manager_it_supports() {
        let with = |version, oldest| {
            WorkerStatus { version, oldest, ..status_of_version_1() }.is_supported()
        };
        assert!(with(VERSION, OLDEST) && with(VERSION + 9, VERSION));
        assert!(!with(VERSION + 1, VERSION + 1) && !with(OLDEST - 1, OLDEST - 1));
    }
}
