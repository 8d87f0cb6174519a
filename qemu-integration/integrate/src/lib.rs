//! What a VM's owner adds so that the VM has a vGPU.
//!
//! * [`device`]: the device itself, as QEMU's `-device` takes it
//! * [`qemu_args`]: QEMU arguments, for a new command line or for one that exists
//! * [`libvirt_xml`]: the same for a libvirt domain
//! * [`shell`]: arguments as a shell reads them

pub mod device;
pub mod libvirt_xml;
pub mod qemu_args;
pub mod shell;

pub use device::Device;
