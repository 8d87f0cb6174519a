//! The VM attached to a vGPU, and its trapped accesses.

use mdev_core::device;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Client of a vfio-user socket: the process of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttachedClient {
    /// Process ID (`SO_PEERCRED`).
    pub pid: i32,
    /// User ID.
    pub uid: u32,
}

/// Counters of trapped accesses: the public form of [`device::Traps`].
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
