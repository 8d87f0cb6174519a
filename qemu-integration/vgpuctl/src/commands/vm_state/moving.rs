//! `vm migrate` and `vm receive`: a running VM moves to another host with its vGPUs.
//!
//! QEMU copies the VM's memory while the VM runs. Meanwhile vgpud records which of it the vGPUs
//! write: QEMU does not know. At the end QEMU pauses the VM, the vGPUs are saved with the memory
//! that they have written, and the destination restores QEMU's state first and the vGPUs then.
//!
//! Until the source says `Go`, every failure leaves the VM on the source.
//!
//! * `peer`: connection between both commands
//! * `source`: `vm migrate`; `destination`: `vm receive`

mod destination;
mod peer;
mod source;

pub use destination::receive;
pub use source::migrate;
