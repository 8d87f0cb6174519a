//! A walk through the crate: a device of one's own, from its first register to migration.
//!
//! # What a device is
//!
//! A vfio-user client (QEMU, Cloud Hypervisor, another VMM) sees a PCI device: *regions* (the BARs and configuration
//! space), *interrupts* by index, and memory that it lets the device access. [`Device`] has a method for each, and
//! three of them are enough:
//!
//! ```
//! use vfio_user_server::device::{Device, Region, pci};
//! use vfio_user_server::errno::Errno;
//!
//! struct Counter {
//!     config: [u8; 256],
//!     reads: u32,
//! }
//!
//! impl Device for Counter {
//!     fn region(&self, index: u32) -> Option<Region<'_>> {
//!         match index {
//!             pci::BAR0 => Some(Region::trapped(4096)),
//!             pci::CONFIG => Some(Region::trapped(256)),
//!             _ => None,
//!         }
//!     }
//!
//!     fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
//!         let at = offset as usize;
//!         match index {
//!             pci::CONFIG => data.copy_from_slice(&self.config[at..at + data.len()]),
//!             _ if data.len() == 4 => {
//!                 self.reads += 1;
//!                 data.copy_from_slice(&self.reads.to_ne_bytes());
//!             }
//!             _ => {} // It was zeroed.
//!         }
//!         Ok(())
//!     }
//!
//!     fn region_write(&mut self, _: u32, _: u64, _: &[u8]) -> Result<(), Errno> {
//!         Ok(())
//!     }
//!
//!     fn reset(&mut self) -> Result<(), Errno> {
//!         self.reads = 0;
//!         Ok(())
//!     }
//! }
//! ```
//!
//! What arrives has been checked: the region exists, the access lies within it and is allowed, ranges do not overflow
//! and maps do not overlap. A guest's mistake is not an error of the access; what a handler returns as an [`Errno`]
//! becomes the error that the client sees, and the session goes on.
//!
//! `examples/scratch.rs` is a whole server in less than a hundred lines.
//!
//! # Serving it
//!
//! Whoever has accepted a connection makes a [`Session`] of it. A device that waits for nothing else is served by
//! [`Session::serve`], which returns when the client is gone. One with an event loop watches the session's socket for
//! what [`Interest`](crate::session::Interest) says and calls [`Session::on_ready`]. Neither costs an allocation for a
//! message, and both wait awake for the next one where that was found to help (see [`Patience`]).
//!
//! # Mapped regions
//!
//! [`Region::mapped`] hands out a file descriptor, and the guest's accesses then never reach the server. Where only
//! parts may be mapped, [`Mapping::areas`](crate::device::Mapping::areas) names them.
//!
//! # Interrupts
//!
//! [`Device::irq`] says what there is: [`Irq::INTX`], [`Irq::messages`] for MSI and MSI-X, [`Irq::notification`] for
//! "error" and "release request". What the client wants comes as an [`IrqCommand`], with eventfds to be written to.
//!
//! # The guest's memory
//!
//! [`Device::dma_map`] brings a descriptor to map, or none where the client does not share the memory. For that there
//! is [`Transfers`]: the device names what it wants, and is handed the answer later. It never waits, since the client
//! answers only once the handler has returned.
//!
//! # Migration
//!
//! [`Migration`] has one method for a step between states, one that reads the state and one that takes it. The session
//! keeps the state machine. [`DmaLogging`] marks the pages that were written. A device that has neither answers
//! `ENOTSUP`, as the specification asks.
//!
//! [`Device`]: crate::device::Device
//! [`Device::irq`]: crate::device::Device::irq
//! [`Device::dma_map`]: crate::device::Device::dma_map
//! [`DmaLogging`]: crate::migration::DmaLogging
//! [`Errno`]: crate::errno::Errno
//! [`Irq::INTX`]: crate::irq::Irq::INTX
//! [`Irq::messages`]: crate::irq::Irq::messages
//! [`Irq::notification`]: crate::irq::Irq::notification
//! [`IrqCommand`]: crate::irq::IrqCommand
//! [`Migration`]: crate::migration::Migration
//! [`Patience`]: crate::patience::Patience
//! [`Region::mapped`]: crate::device::Region::mapped
//! [`Session`]: crate::session::Session
//! [`Session::on_ready`]: crate::session::Session::on_ready
//! [`Session::serve`]: crate::session::Session::serve
//! [`Transfers`]: crate::transfer::Transfers
