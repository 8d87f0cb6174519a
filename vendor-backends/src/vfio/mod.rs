//! Physical PCI devices through VFIO.
//!
//! * [`host`]: which devices there are, who drives them, and how they are given to vfio-pci and back
//! * [`family`]: for each kind of device, what a guest may map of it, what is emulated, and what it never sees
//! * [`window`]: the DMA addresses of each vGPU
//! * [`device`]: one device: its BARs, its interrupt, memory that it may reach
//! * [`edu`]: what the mediator does with those of a family

pub mod device;
pub mod edu;
pub mod family;
pub mod host;
pub mod window;
