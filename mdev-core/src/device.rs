//! Virtual function: one vGPU as a PCI device, on top of a [`Client`](crate::gpu::Client).
//!
//! | file | contents |
//! | --- | --- |
//! | `function` | [`VirtualFunction`], the interface for a session |
//! | `attachment` | arrival and departure of a VM |
//! | `dma` | guest memory |
//! | `interrupts` | interrupts: eventfds of the client, conditions of the GPU |
//! | `region` | VFIO regions and the layout of the BARs |
//! | `control`, `mailbox` | BAR 3: control registers and mailbox requests |
//! | `queue` | control queue |
//! | `checkpoint` | checkpoints of the guest's programs |
//! | `display`, `edid` | BAR 2: the Bochs display adapter and its monitor |
//! | `window` | trapped accesses to BARs that are normally mapped |
//! | `state` | saved registers |
//! | `journal` | state in a journal, from which another process adopts the function |
//! | `saved` | saved vGPU: registers, address spaces, channels |
//! | `handover` | another process of the VM attaches |
//! | `written` | guest memory that the vGPU writes |
//! | `saved_stream` | the same and video memory, as a stream in pieces |

mod attachment;
mod checkpoint;
mod control;
mod display;
mod dma;
mod edid;
mod function;
mod handover;
mod identity;
mod interrupts;
mod journal;
mod mailbox;
mod queue;
mod region;
mod saved;
mod saved_stream;
mod state;
mod window;
mod written;

use serde::{Deserialize, Serialize};

pub use crate::gpu::Scanout;
use crate::ids::VgpuId;
pub use function::VirtualFunction;
pub use handover::Handover;
pub use journal::{Descriptor, JournaledFunction};
pub use queue::ControlQueue;
pub use region::{REGIONS, Region, RegionEvent, RegionInfo, RegionMapping};
pub use saved::{ConfigWrite, RestoreError, SaveError, SavedImport, SavedMemory, SavedVgpu};
pub use saved_stream::{Incoming, IncomingError, Outgoing};
pub use state::{SavedFunction, StateError};
pub use written::WrittenError;

/// Specification of a virtual function, besides the resources of its
/// [`Client`](crate::gpu::Client).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionSpec {
    /// The vGPU, with the UUID that the guest reads.
    pub vgpu: VgpuId,
    /// Name of the type that the guest reads (truncated to 64 bytes).
    pub type_name: String,
    /// Limits of the display head, for types with a head.
    pub display: Option<DisplayLimits>,
    /// True to map the doorbell page if the GPU allows it, false to trap doorbells.
    pub doorbell_mapped: bool,
}

/// Limits of a display head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisplayLimits {
    /// Width of the largest mode in pixels, the preferred mode of the EDID block.
    pub max_width: u32,
    /// Height of the largest mode in pixels.
    pub max_height: u32,
}

/// Counters of trapped accesses since the creation of the function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traps {
    /// Config space accesses.
    pub config: u64,
    /// Accesses to the display registers.
    pub display: u64,
    /// Accesses to the control registers, including mailbox requests.
    pub control: u64,
    /// Mailbox requests.
    pub mailbox: u64,
    /// Trapped doorbell and wake writes.
    pub doorbell: u64,
    /// Trapped accesses to BARs that are normally mapped (video memory, framebuffer).
    pub memory: u64,
}

/// Error of an access to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// The device does not have the region.
    #[error("The device has no region {0}")]
    NoRegion(u32),
    /// The access leaves the region.
    #[error("Access of {len} bytes at {offset:#x} leaves region {region}")]
    OutOfRange {
        /// VFIO index of the region.
        region: u32,
        /// Offset of the access.
        offset: u64,
        /// Length of the access.
        len: usize,
    },
}

/// Error of the creation of a virtual function.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The granted resources do not match the type.
    #[error("Cannot create a virtual function: {0}")]
    Invalid(&'static str),
}

#[cfg(test)]
mod tests;
