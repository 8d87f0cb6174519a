//! Physical screens of display adapters.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::GpuError;
use crate::ids::VgpuId;

/// Physical screen of a GPU. It shows one vGPU at a time.
pub trait PhysicalScreen {
    /// Shows a vGPU until another vGPU is shown or the vGPU ends, and stops a rotation. Returns the
    /// time that programming the screen took.
    fn focus(&mut self, vgpu: VgpuId) -> Result<Duration, GpuError>;

    /// Shows the vGPUs in rotation, each for `interval`, or stops the rotation. vGPUs without a
    /// picture are skipped.
    fn rotate(&mut self, interval: Option<Duration>) -> Result<(), GpuError>;

    /// Returns which vGPU the screen shows.
    fn status(&mut self) -> Result<ScreenStatus, GpuError>;
}

/// Status of a physical screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScreenStatus {
    /// vGPU on the screen. The screen is dark without one, or while that vGPU has no picture.
    pub focus: Option<VgpuId>,
    /// Time that each vGPU is shown during a rotation.
    pub rotation: Option<Duration>,
}

/// The picture on a display head, in video memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scanout {
    /// False before the guest sets a mode and while the screen is blank; all other fields are zero
    /// then.
    pub enabled: bool,
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Bytes per row.
    pub stride: u32,
    /// Bits per pixel: 8, 15, 16, 24 or 32 (XRGB8888).
    pub bits_per_pixel: u32,
    /// Byte offset of the first pixel in video memory.
    pub offset: u64,
    /// True for big-endian pixels.
    pub big_endian: bool,
}
