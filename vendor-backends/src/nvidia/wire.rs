//! What the manager and a worker say to each other about a GPU: postcard in packets.
//!
//! The manager leads; a worker speaks when it is asked, but for [`FromWorker::Ready`]. Neither waits long for the other:
//! orders are not answered, and a manager that gets no counters in time goes on with the last ones.

use std::time::Duration;

use mdev_core::gpu::{ClientSpec, GpuDescription, Usage};
use serde::{Deserialize, Serialize};

use super::device::Card;

/// Bumped with every change of the types in this file.
pub const VERSION: u32 = 3;

/// How a vGPU is to be opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// [`VERSION`].
    pub version: u32,
    /// Which GPU.
    pub card: Card,
    /// What it is.
    pub gpu: GpuDescription,
    /// What was granted.
    pub spec: ClientSpec,
    /// What the operator chose.
    pub options: Options,
}

/// What an operator chooses for a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// Preempt compute between thread blocks instead of waiting for a kernel's end.
    pub preempt_blocks: bool,
    /// Run although the process has CAP_SYS_ADMIN.
    pub allow_sys_admin: bool,
    /// How long one turn on the compute engine may take without progress while others wait: beyond it, the vGPU's
    /// compute channels are reset as hung. None: the driver alone ends it, after some seconds.
    pub hang: Option<Duration>,
    /// Guests have the GPU's own doorbell page, and can keep the others from theirs. Otherwise they are rung for.
    pub direct_doorbell: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            preempt_blocks: false,
            allow_sys_admin: false,
            hang: Some(DEFAULT_HANG),
            direct_doorbell: false,
        }
    }
}

/// Long enough for kernels that mean to end, and short enough that the others hardly notice one that does not.
pub const DEFAULT_HANG: Duration = Duration::from_millis(125);

/// From the manager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromManager {
    /// The first packet that a new worker finds.
    Grant(Box<Grant>),
    /// Sets the groups' time slice.
    SetTimeslice(Duration),
    /// Opens or closes the gate.
    SetGate(bool),
    /// Resets all groups.
    Reset,
    /// Asks for [`FromWorker::Usage`] with that number, and says whether another vGPU has work.
    Usage(u64, bool),
    /// Gives everything on the GPU up.
    Evict,
}

/// From a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromWorker {
    /// It has its place on the GPU.
    Ready,
    /// Its counters.
    Usage(u64, Report),
}

/// How a vGPU is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Its counters.
    pub usage: Usage,
    /// For how long it had something to copy, in nanoseconds. Copy engines keep no log of whose turn it was.
    pub copying_ns: u64,
    /// For how long it had work at all, in nanoseconds.
    pub had_work_ns: u64,
    /// False once it lost the GPU.
    pub alive: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seqpacket::{decode, encode};

    #[test]
    fn the_wire_has_not_changed_without_its_version() {
        // When this fails, bump VERSION and write down the new bytes.
        let order = encode(&FromManager::SetTimeslice(Duration::from_millis(5))).unwrap();
        assert_eq!(order, [1, 0, 192, 150, 177, 2]);
        let report = Report { copying_ns: 7, alive: true, ..Default::default() };
        let bytes = encode(&FromWorker::Usage(300, report)).unwrap();
        assert_eq!((bytes[..3].to_vec(), bytes.len()), (vec![1, 172, 2], 26));
        assert_eq!(decode::<FromWorker>(&bytes).unwrap(), FromWorker::Usage(300, report));
        assert_eq!(VERSION, 3);
    }
}
