//! Physical PCI devices through VFIO.
//!
//! * [`host`]: which devices there are, who drives them, and how they are given to vfio-pci and back

pub mod host;
