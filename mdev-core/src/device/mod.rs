//! The virtual function: one vGPU as a PCI device, over a [`Client`](crate::gpu::Client) of its GPU.
//!
//! | file | what |
//! | --- | --- |
//! | `function` | [`VirtualFunction`]: puts the parts together; what a session calls |
//! | `interrupts` | its interrupts: what a client sets, and what the GPU raises |
//! | `region` | regions by VFIO's numbers, and the layout of the BARs |
//! | `control`, `mailbox` | BAR 3: control registers, and the requests behind them |
//! | `display`, `edid` | BAR 2: the Bochs display adapter and its monitor |
//! | `window` | trapped accesses to BARs that are normally mapped |
//! | `state` | saved state |

mod control;
mod display;
mod edid;
mod function;
mod interrupts;
mod mailbox;
mod region;
mod state;
mod window;

use serde::{Deserialize, Serialize};

use crate::ids::VgpuId;
pub use function::VirtualFunction;
pub use region::{REGIONS, Region, RegionEvent, RegionInfo, RegionMapping};
pub use state::{SavedFunction, StateError};

/// What a virtual function is made as, besides what its [`Client`](crate::gpu::Client) was granted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionSpec {
    /// The vGPU, whose UUID the guest can read.
    pub vgpu: VgpuId,
    /// The type's name, which the guest can read (at most 64 bytes are kept).
    pub type_name: String,
    /// The display head, for types that have one.
    pub display: Option<DisplayLimits>,
    /// Whether the doorbell page is mapped where the GPU allows it, or trapped.
    pub doorbell_mapped: bool,
}

/// A display head's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisplayLimits {
    /// Largest mode, pixels. The EDID block prefers it.
    pub max_width: u32,
    /// Largest mode, pixels.
    pub max_height: u32,
}

/// Counters of trapped accesses since the function was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Trapped accesses to BARs that are normally mapped (video memory, framebuffer).
    pub memory: u64,
}

/// The picture on a display head, in video memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scanout {
    /// False while the guest has not set a mode, or has blanked the screen; the rest is zero then.
    pub enabled: bool,
    /// Pixels.
    pub width: u32,
    /// Pixels.
    pub height: u32,
    /// Bytes from one row to the next.
    pub stride: u32,
    /// Bits per pixel: 8, 15, 16, 24 or 32 (XRGB8888).
    pub bits_per_pixel: u32,
    /// Byte offset of the first pixel in video memory.
    pub offset: u64,
    /// True where the bytes of a pixel are in big-endian order.
    pub big_endian: bool,
}

/// An access to a region that could not be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// The device does not have the region.
    #[error("The device has no region {0}")]
    NoRegion(u32),
    /// The access leaves the region.
    #[error("Access of {len} bytes at {offset:#x} leaves region {region}")]
    OutOfRange {
        /// VFIO's number of the region.
        region: u32,
        /// Where it starts.
        offset: u64,
        /// How long it is.
        len: usize,
    },
}

/// Why a virtual function could not be made.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The grant and the type do not fit together.
    #[error("Cannot make a virtual function: {0}")]
    Invalid(&'static str),
}

#[cfg(test)]
mod tests;
