//! Physical PCI devices through VFIO, driven by [`crate::mediator`].
//!
//! * [`VfioBackend`]: the registration
//! * [`access`]: the kernel's two interfaces for opening a device: iommufd and the IOMMU group
//! * [`device`]: an open device: its BARs, its interrupts and its DMA
//! * [`dma`]: the device's DMA mappings, and the IOVA ranges that the IOMMU accepts (`ranges`)
//! * [`window`]: the DMA window (IOVA range) of each vGPU
//! * [`family`](host_inventory::family): for each device family, which BAR ranges a guest may map,
//!   which are emulated, and which are refused
//! * [`edu`]: a DMA engine
//! * [`display`]: a linear framebuffer and its screen
//!
//! To add a family of devices, add a table to [`host_inventory::family`], a folder, and a line to
//! [`open`].

pub mod access;
mod backend;
pub mod device;
pub mod display;
pub mod dma;
pub mod edu;
mod ranges;
pub mod window;

use std::sync::Arc;

use self::device::{Device, DeviceError};
use self::display::DisplayAdapter;
use self::edu::EduEngine;
use crate::mediator::Hardware;
use host_inventory::family::Kind;
use host_inventory::{PciAddress, PciHost};

pub use backend::VfioBackend;

/// Prefix of the parent's name on `vgpud`'s command line.
pub const BACKEND: &str = "vfio";

/// Options of a device that the operator chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Bytes of one vGPU's DMA window, a power of two, for devices that do DMA. Bounds the memory
    /// of the vGPU's VM. `None` derives the length from the device's DMA address bits.
    pub window_bytes: Option<u64>,
    /// Opens the device through iommufd (`true`) or its IOMMU group (`false`). `None` prefers
    /// iommufd where the kernel has it.
    pub iommufd: Option<bool>,
}

/// Opens a device that is bound to vfio-pci, as the parent `name`.
pub fn open(
    name: &str,
    address: PciAddress,
    options: Options,
) -> Result<Arc<dyn Hardware>, DeviceError> {
    let host = PciHost::default();
    let device = Device::open(&host, address, options.iommufd)?;
    match device.family().kind {
        Kind::Dma => Ok(Arc::new(EduEngine::new(name, device, options.window_bytes)?)),
        Kind::Framebuffer => Ok(Arc::new(DisplayAdapter::new(name, device, &host)?)),
    }
}
