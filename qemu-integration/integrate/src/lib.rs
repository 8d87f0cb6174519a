//! QEMU arguments and libvirt XML that attach a vGPU to a VM.
//!
//! * [`device`]: the value of QEMU's `-device`
//! * [`qemu_args`]: QEMU arguments for a new or an existing command line
//! * [`boot`]: the command line of a VM that boots from a disk image
//! * [`qmp`]: a running QEMU's monitor
//! * [`libvirt_xml`]: the fragment of a libvirt domain with the same content
//! * [`domain`]: attaches a vGPU to an existing libvirt domain and detaches it; [`xml`] parses and
//!   edits the domain's text
//! * [`nodedev`]: parents and vGPUs as libvirt node devices
//! * [`shell`]: quoting for a POSIX shell

pub mod boot;
pub mod device;
pub mod domain;
pub mod libvirt_xml;
pub mod nodedev;
pub mod qemu_args;
pub mod qmp;
pub mod shell;
pub mod xml;

pub use device::Device;
