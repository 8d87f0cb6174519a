//! The parts of a host that backends and `vgpuctl` look at.
//!
//! * [`pci_address`], [`pci`]: PCI devices in sysfs, their drivers, and binding to vfio-pci
//! * [`files`]: files and processes below a root directory
//! * [`finding`]: results of host checks
//! * [`support`]: what a host has to have for each kind of GPU: [`nvidia`], [`vfio`]
//! * [`family`]: which parts of which PCI devices guests may map

pub mod family;
pub mod files;
pub mod finding;
pub mod nvidia;
pub mod pci;
pub mod pci_address;
pub mod support;
pub mod vfio;

pub use files::HostFiles;
pub use finding::{Finding, Level};
pub use pci::{HostError, PciDevice, PciHost};
pub use pci_address::PciAddress;
pub use support::SUPPORT;
