//! vfio-user server: emulated PCI devices in a userspace process, for QEMU and other VMMs.
//!
//! [`guide`] introduces the crate with examples. In reading order:
//!
//! * [`device`], [`layout`], [`device_feature`]: the [`Device`](device::Device) trait, regions and
//!   interrupts, features
//! * [`pci_function`]: configuration space, BARs and interrupts from tables
//! * [`dma`], [`irq`], [`migration`], [`transfer`], [`errno`]: types of the trait's methods
//! * [`session`]: connection of one client
//! * [`journal`]: sessions that another process adopts
//! * [`busy_poll`]: policy that decides between polling and sleeping
//! * [`transport`], [`fds`]: messages and file descriptors on a socket
//! * [`proto`]: codec of the messages

pub mod busy_poll;
pub mod device;
pub mod device_feature;
pub mod dma;
pub mod errno;
pub mod fds;
pub mod guide;
pub mod irq;
pub mod journal;
pub mod layout;
pub mod migration;
pub mod pci_function;
pub mod proto;
pub mod session;
mod sys;
#[cfg(feature = "test-util")]
pub mod testing;
pub mod transfer;
pub mod transport;

pub use pci_registers;
