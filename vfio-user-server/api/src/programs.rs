//! CUDA programs that use a vGPU.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Programs that use a vGPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Programs {
    /// Video memory that the programs have allocated, in bytes.
    pub vram_used_bytes: u64,
    /// Processes, by process ID.
    pub processes: Vec<ProgramProcess>,
    /// The programs run in the VM, which chooses their process IDs.
    #[serde(default)]
    pub in_vm: bool,
}

/// Process of a program on a vGPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProgramProcess {
    /// Process ID on the host, or in the VM.
    pub pid: i32,
    /// Name of the process; empty if the process has ended, belongs to another user, or is in a VM.
    pub name: String,
    /// Video memory that the process can use, in bytes. Memory that processes share counts for
    /// each.
    pub vram_used_bytes: u64,
}
