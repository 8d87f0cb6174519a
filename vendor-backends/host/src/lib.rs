//! The parts of a host that backends and `vgpuctl` look at.
//!
//! * [`pci_address`], [`pci`]: PCI devices in sysfs, their drivers, and binding to vfio-pci
//! * [`files`]: files and processes below a root directory
//! * [`finding`]: results of host checks

pub mod files;
pub mod finding;
pub mod pci;
pub mod pci_address;

pub use files::HostFiles;
pub use finding::{Finding, Level};
pub use pci::{HostError, PciDevice, PciHost};
pub use pci_address::PciAddress;
