//! Physical PCI devices through VFIO, driven by [`crate::mediator`].
//!
//! * [`address`]: where a PCI function is
//! * [`host`]: which devices there are, who drives them, and how they are given to vfio-pci and back
//! * [`access`]: the two ways in which the kernel hands one out: by iommufd, or by its group
//! * [`device`]: one device in our hands: its BARs, its interrupt
//! * [`dma`]: memory that it may reach, and at which addresses it could (`ranges`)
//! * [`window`]: the DMA addresses of each vGPU
//! * [`family`]: for each kind of device, what a guest may map of it, what is emulated, and what it never sees
//! * [`edu`]: a DMA engine
//! * [`display`]: a linear framebuffer, and the screen behind it
//!
//! A new kind of device is a table in [`family`], a folder, and a line in [`open`].

pub mod access;
pub mod address;
pub mod device;
pub mod display;
pub mod dma;
pub mod edu;
pub mod family;
pub mod host;
mod ranges;
pub mod window;

use std::sync::Arc;

use self::device::{Device, DeviceError};
use self::display::DisplayAdapter;
use self::edu::EduEngine;
use self::family::Kind;
use self::host::{Address, Host};
use crate::mediator::Hardware;

/// What the parent's name begins with on `vgpud`'s command line.
pub const BACKEND: &str = "vfio";

/// What an operator chooses for a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// DMA addresses of one vGPU, and so the most memory that its VM may have, for devices that do DMA: a power of two.
    /// Where it is not chosen, it is made of how many the device can use.
    pub window_bytes: Option<u64>,
    /// Open it by iommufd, or not; nothing: where the kernel has it.
    pub iommufd: Option<bool>,
}

/// Takes a device that is bound to vfio-pci, as a parent of that name.
pub fn open(
    name: &str,
    address: Address,
    options: Options,
) -> Result<Arc<dyn Hardware>, DeviceError> {
    let host = Host::default();
    let device = Device::open(&host, address, options.iommufd)?;
    match device.family().kind {
        Kind::Dma => Ok(Arc::new(EduEngine::new(name, device, options.window_bytes)?)),
        Kind::Framebuffer => Ok(Arc::new(DisplayAdapter::new(name, device, &host)?)),
    }
}
