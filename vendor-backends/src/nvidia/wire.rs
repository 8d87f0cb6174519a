//! Messages between the manager and a worker about a GPU, encoded with postcard, one per packet.
//!
//! The worker sends [`FromWorker::Ready`] and answers [`FromManager::Usage`]; other messages of the
//! manager have no reply. A manager that gets no usage in time continues with the last one.

use std::time::Duration;

use mdev_core::gpu::{ClientSpec, GpuDescription, Usage};
use serde::{Deserialize, Serialize};

/// Version of the messages. Must be bumped with every change of the types in this file.
pub const VERSION: u32 = 5;

/// Maximum number of channels of a vGPU. A context of CUDA has 20.
pub const MAX_CHANNELS: u32 = 128;

/// GPU of the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// PCI address, such as `0000:3b:00.0`.
    pub address: String,
    /// Minor number: N in `/dev/nvidiaN`.
    pub minor: u32,
    /// ID that the driver gives to the GPU.
    pub gpu_id: u32,
}

/// Parameters with which a worker opens a vGPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// [`VERSION`].
    pub version: u32,
    /// The GPU.
    pub card: Card,
    /// Description of the GPU.
    pub gpu: GpuDescription,
    /// Resources granted to the vGPU.
    pub spec: ClientSpec,
    /// Options of the GPU.
    pub options: Options,
}

/// Options of a GPU, set by the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// Preempt kernels at thread-block boundaries instead of waiting for their end.
    pub preempt_blocks: bool,
    /// Run even if the process has CAP_SYS_ADMIN.
    pub allow_sys_admin: bool,
    /// Hang limit of the compute engine: time without progress, while other vGPUs wait, after which
    /// the vGPU's compute channels are reset. None leaves hangs to the driver, which takes seconds.
    pub hang_limit: Option<Duration>,
    /// Map the GPU's doorbell page into guests, which can then delay the rings of other vGPUs.
    /// Without this, the worker rings for its guest.
    pub direct_doorbell: bool,
    /// Map the partition of video memory into VMMs (BAR 4). The driver does not revoke such a
    /// mapping when the memory is freed: it then shows the memory of later vGPUs.
    pub direct_vram: bool,
}

#[cfg(feature = "test-util")]
impl Options {
    /// Options for the fake driver, which also work as root.
    pub const FOR_TESTS: Self = Self {
        allow_sys_admin: true,
        preempt_blocks: false,
        hang_limit: None,
        direct_doorbell: false,
        direct_vram: true,
    };
}

impl Default for Options {
    fn default() -> Self {
        Self {
            preempt_blocks: false,
            allow_sys_admin: false,
            hang_limit: Some(DEFAULT_HANG_LIMIT),
            direct_doorbell: false,
            direct_vram: false,
        }
    }
}

/// Default hang limit: longer than usual kernels, and short enough that a hang hardly delays other
/// vGPUs.
pub const DEFAULT_HANG_LIMIT: Duration = Duration::from_millis(125);

/// Load of the GPU by other vGPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Another vGPU has work.
    pub contended: bool,
    /// Length of a round in which all vGPUs with channels use up their slices.
    pub round: Duration,
}

/// Message from the manager to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromManager {
    /// Opens the vGPU. First message to a new worker.
    Grant(Box<Grant>),
    /// Sets the time slice of the vGPU's groups.
    SetTimeslice(Duration),
    /// Opens or closes the gate.
    SetGate(bool),
    /// Resets all groups.
    Reset,
    /// Requests [`FromWorker::Usage`] with this number.
    Usage(u64, Load),
    /// Frees all resources on the GPU.
    Evict,
}

/// Message from a worker to the manager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromWorker {
    /// The vGPU is open.
    Ready,
    /// Usage of the vGPU, with the number of the request.
    Usage(u64, Box<Report>),
}

/// Usage of a vGPU, as its worker reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Counters.
    pub usage: Usage,
    /// Time with copies to do, in nanoseconds. Copy engines have no log of context switches.
    pub copying_ns: u64,
    /// Time with any work to do, in nanoseconds.
    pub had_work_ns: u64,
    /// A kernel of a program runs for long. It loses little by short slices.
    pub long_kernel: bool,
    /// False after the vGPU has lost the GPU.
    pub alive: bool,
}

#[cfg(test)]
mod tests {
    use ipc::seqpacket::{decode, encode};

    use super::*;

    #[test]
    fn a_change_of_the_messages_bumps_their_version() {
        // If this fails, bump VERSION and update the bytes.
        let order = encode(&FromManager::SetTimeslice(Duration::from_millis(5))).unwrap();
        assert_eq!(order, [1, 0, 192, 150, 177, 2]);
        let report = Report { copying_ns: 7, alive: true, ..Default::default() };
        let bytes = encode(&FromWorker::Usage(300, Box::new(report))).unwrap();
        assert_eq!((bytes[..3].to_vec(), bytes.len()), (vec![1, 172, 2], 116));
        assert_eq!(decode::<FromWorker>(&bytes).unwrap(), FromWorker::Usage(300, Box::new(report)));
        assert_eq!(VERSION, 5);
    }
}
