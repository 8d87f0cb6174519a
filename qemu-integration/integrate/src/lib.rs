//! What a VM's owner adds so that the VM has a vGPU.
//!
//! * [`device`]: the device itself, as QEMU's `-device` takes it
//! * [`qemu_args`]: QEMU arguments, for a new command line or for one that exists
//! * [`libvirt_xml`]: the same for a libvirt domain
//! * [`domain`]: a libvirt domain that exists, with a vGPU and again without it; [`xml`] is how it is read and changed
//! * [`nodedev`]: parents and vGPUs in the words of libvirt's node devices
//! * [`shell`]: arguments as a shell reads them

pub mod device;
pub mod domain;
pub mod libvirt_xml;
pub mod nodedev;
pub mod qemu_args;
pub mod shell;
pub mod xml;

pub use device::Device;
