//! A walk through the crate: a device of one's own, from its first register to migration.
//!
//! # What a device is
//!
//! A vfio-user client (QEMU, Cloud Hypervisor, another VMM) sees a PCI device: *regions* (the BARs and configuration
//! space), *interrupts* by index, and memory that it lets the device access. A [`Layout`] says which regions and
//! interrupts there are; [`Device`] has a method for each thing that can be done with them, and four are enough:
//!
//! ```
//! use vfio_user_server::device::{Device, pci};
//! use vfio_user_server::errno::Errno;
//! use vfio_user_server::irq::Irq;
//! use vfio_user_server::layout::{Layout, LayoutError};
//!
//! struct Counter {
//!     layout: Layout,
//!     config: [u8; 256],
//!     reads: u32,
//! }
//!
//! impl Counter {
//!     fn new() -> Result<Self, LayoutError> {
//!         let layout = Layout::builder()
//!             .trapped(pci::CONFIG, 256)
//!             .trapped(pci::BAR0, 4096)
//!             .irq(pci::MSI, Irq::messages(1))
//!             .build()?;
//!         Ok(Self { layout, config: [0; 256], reads: 0 })
//!     }
//! }
//!
//! impl Device for Counter {
//!     fn layout(&self) -> &Layout {
//!         &self.layout
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
//! # assert!(Counter::new().is_ok());
//! ```
//!
//! [`LayoutBuilder::build`] finds what a client would stumble over: a BAR that is no power of two, an area that is not
//! made of pages, a device without configuration space. A device whose regions change while it runs has no layout, and
//! answers [`Device::region`] and [`Device::irq`] by itself.
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
//! [`LayoutBuilder::mapped`] hands out a file descriptor, and the guest's accesses then never reach the server. Where only
//! parts may be mapped, [`LayoutBuilder::partly_mapped`] names them.
//!
//! # Doorbells
//!
//! A register whose write only says "look" need not be trapped: [`LayoutBuilder::signal`] offers an eventfd for it, which
//! the hypervisor's kernel signals by itself. The value that was written is lost, unless one value is waited for.
//!
//! # Interrupts
//!
//! [`LayoutBuilder::irq`] says what there is: [`Irq::INTX`], [`Irq::messages`] for MSI and MSI-X, [`Irq::notification`]
//! for "error" and "release request". What the client wants comes as an [`IrqCommand`], with eventfds to be written to.
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
//! `ENOTTY` to the features, as Linux does, and `ENOTSUP` to the messages.
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
//! [`Device::region`]: crate::device::Device::region
//! [`Layout`]: crate::layout::Layout
//! [`LayoutBuilder::build`]: crate::layout::LayoutBuilder::build
//! [`LayoutBuilder::irq`]: crate::layout::LayoutBuilder::irq
//! [`LayoutBuilder::mapped`]: crate::layout::LayoutBuilder::mapped
//! [`LayoutBuilder::partly_mapped`]: crate::layout::LayoutBuilder::partly_mapped
//! [`LayoutBuilder::signal`]: crate::layout::LayoutBuilder::signal
//! [`Session`]: crate::session::Session
//! [`Session::on_ready`]: crate::session::Session::on_ready
//! [`Session::serve`]: crate::session::Session::serve
//! [`Transfers`]: crate::transfer::Transfers
