//! Guide for device authors, from the first register to migration.
//!
//! # Devices
//!
//! A vfio-user client (QEMU, Cloud Hypervisor or another VMM) sees a PCI device: *regions* (BARs
//! and configuration space), *interrupts* by index, and guest memory that the device may access.
//! The [`Device`] trait has a method for each operation of the client. Four methods are required:
//! regions and interrupts, reads, writes, and reset.
//!
//! Most of a PCI device is the same in every device and comes from tables. A [`PciFunction`] has
//! configuration space, BARs and interrupts; a [`Bank`] has the registers of a BAR. The device adds
//! the registers' behaviour:
//!
//! ```
//! use vfio_user_server::device::{Device, pci};
//! use vfio_user_server::errno::Errno;
//! use vfio_user_server::irq::IrqCommand;
//! use vfio_user_server::layout::{Layout, LayoutError};
//! use vfio_user_server::pci_function::PciFunction;
//! use vfio_user_server::pci_registers::{Bank, Bar, Identity, Row, Width};
//!
//! const BAR_BYTES: u64 = 4096;
//!
//! #[derive(Clone, Copy, Debug, PartialEq)]
//! enum Reg {
//!     Sum,
//!     Add,
//! }
//!
//! struct Adder {
//!     function: PciFunction,
//!     registers: Bank<Reg>,
//! }
//!
//! impl Adder {
//!     fn new() -> Result<Self, LayoutError> {
//!         let function = PciFunction::builder(Identity::new(0x1b36, 0x0010, 0xff_00_00))
//!             .bar(Bar::registers(0, "Registers", BAR_BYTES))
//!             .msi(1)
//!             .build()?;
//!         let rows = vec![
//!             Row::rw(Reg::Sum, "SUM", 0, Width::W32, 0, u32::MAX, "Sum of the addends"),
//!             Row::wo(Reg::Add, "ADD", 4, Width::W32, "A write adds to SUM and raises MSI vector 0"),
//!         ];
//!         Ok(Self { function, registers: Bank::new(BAR_BYTES, rows) })
//!     }
//! }
//!
//! impl Device for Adder {
//!     fn layout(&self) -> &Layout {
//!         self.function.layout()
//!     }
//!
//!     fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
//!         match index {
//!             pci::CONFIG => self.function.config_read(offset, data),
//!             _ => self.registers.read(offset, data, |_, value| value),
//!         }
//!         Ok(())
//!     }
//!
//!     fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
//!         match index {
//!             pci::CONFIG if self.function.config_write(offset, data).reset => self.reset()?,
//!             pci::CONFIG => {}
//!             _ => self.registers.write(offset, data, |bank, register, write| match register {
//!                 Reg::Sum => {}
//!                 Reg::Add => {
//!                     bank.set(Reg::Sum, bank.get(Reg::Sum).wrapping_add(write.raw));
//!                     self.function.signal_msi(0);
//!                 }
//!             }),
//!         }
//!         Ok(())
//!     }
//!
//!     fn set_irqs(&mut self, index: u32, command: IrqCommand<'_>) -> Result<(), Errno> {
//!         self.function.set_irqs(index, command)
//!     }
//!
//!     fn reset(&mut self) -> Result<(), Errno> {
//!         self.function.reset();
//!         self.registers.reset();
//!         Ok(())
//!     }
//!
//!     fn detach(&mut self) {
//!         self.function.detach();
//!     }
//! }
//! # let mut adder = Adder::new().unwrap();
//! # for addend in [2_u32, 3] {
//! #     adder.region_write(pci::BAR0, 4, &addend.to_le_bytes()).unwrap();
//! # }
//! # let mut sum = [0; 4];
//! # adder.region_read(pci::BAR0, 0, &mut sum).unwrap();
//! # assert_eq!(sum, [5, 0, 0, 0]);
//! ```
//!
//! The session has checked all arguments: the region exists and allows the access, and the access
//! lies within the region. A guest's invalid access to a register is not an error; the bank ignores
//! writes to read-only bits and to bytes without a register. An [`Errno`] that a method returns
//! becomes the error reply to the client, and the session continues.
//!
//! `examples/scratch.rs` is a complete server in less than a hundred lines: configuration space,
//! registers, an interrupt. `examples/dma_engine.rs` adds guest memory.
//!
//! # Registers
//!
//! A [`Row`] declares a register: id, name, offset, width, access, reset value, writable bits, and
//! a line of documentation. The bank applies masks, splits accesses that touch several registers or
//! parts of one, and calls the device's closure with the register's id. [`Bank::markdown`] returns
//! the table for a device's documentation.
//!
//! # BARs
//!
//! A [`Bar`] declares number, size, address width and prefetchability. The declared size alone
//! sizes the BAR: it is a power of two of at least 16 bytes (4096 for a BAR that clients map),
//! registers are within it, and accesses beyond the last register read zero. The function's
//! configuration space answers the guest's sizing, and the layout has the matching region:
//!
//! ```
//! # use vfio_user_server::device::pci;
//! # use vfio_user_server::layout::LayoutError;
//! # use vfio_user_server::pci_function::PciFunction;
//! # use vfio_user_server::pci_registers::{Bar, BarWidth, Identity};
//! # const IDENTITY: Identity = Identity::new(0x1b36, 0x0010, 0xff_00_00);
//! let memory =
//!     Bar { index: 2, doc: "Memory", size: 1 << 33, width: BarWidth::Bits64, prefetchable: true };
//! let mut function = PciFunction::builder(IDENTITY)
//!     .bar(Bar::registers(0, "Registers", 4096))
//!     .bar(memory)
//!     .build()?;
//! assert_eq!(function.layout().region(pci::BAR0 + 2).map(|region| region.size), Some(1 << 33));
//!
//! // The guest sizes BAR 0: it writes all ones and reads the address mask.
//! let _ = function.config_write(0x10, &[0xff; 4]);
//! let mut mask = [0; 4];
//! function.config_read(0x10, &mut mask);
//! assert_eq!(u32::from_le_bytes(mask), 0xffff_f000);
//! # Ok::<(), LayoutError>(())
//! ```
//!
//! [`PciFunctionBuilder::build`] reports mistakes that clients would reject: a BAR whose size is
//! not a power of two, BARs that share a register, mappable areas that are not page-aligned.
//!
//! # Mapped regions
//!
//! [`PciFunctionBuilder::mapped_bar`] passes a file descriptor to the client, which maps the BAR
//! into the guest. Guest accesses then do not reach the server.
//! [`PciFunctionBuilder::partly_mapped_bar`] limits the mapping to page-aligned areas; accesses to
//! the rest are trapped.
//!
//! # Doorbells
//!
//! A register that only announces work need not be trapped. [`PciFunctionBuilder::io_event_fd`]
//! adds an eventfd, which KVM signals on a write to the register. The written value is lost, unless
//! the eventfd matches a single value.
//!
//! # Interrupts
//!
//! [`PciFunctionBuilder::msi`] adds MSI vectors, and [`PciFunctionBuilder::intx`] adds INTA. The
//! client assigns eventfds through [`Device::set_irqs`], which the device forwards to
//! [`PciFunction::set_irqs`]. [`PciFunction::signal_msi`] signals a vector, and
//! [`PciFunction::set_intx`] sets the level of INTA:
//!
//! ```
//! use std::os::fd::AsFd;
//!
//! use nix::sys::eventfd::EventFd;
//! use vfio_user_server::device::pci;
//! use vfio_user_server::fds::Fds;
//! use vfio_user_server::irq::{IrqAction, IrqCommand};
//! # use vfio_user_server::pci_function::PciFunction;
//! # use vfio_user_server::pci_registers::Identity;
//! # const IDENTITY: Identity = Identity::new(0x1b36, 0x0010, 0xff_00_00);
//!
//! let mut function = PciFunction::builder(IDENTITY).msi(4).build()?;
//!
//! // A session passes this command when the client enables MSI with one vector.
//! let event = EventFd::new()?;
//! let mut eventfds = Fds::new();
//! let _ = eventfds.push(event.as_fd().try_clone_to_owned()?);
//! let action = IrqAction::Trigger;
//! function.set_irqs(pci::MSI, IrqCommand::Assign { action, start: 0, eventfds })?;
//!
//! function.signal_msi(0);
//! assert_eq!(event.read()?, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A device with INTx needs an event loop: the client unmasks INTx with an eventfd, which the loop
//! watches ([`PciFunction::intx_unmask_event`]). MSI has no such eventfd.
//!
//! # Reset
//!
//! The client resets a device with DEVICE_RESET, which calls [`Device::reset`]. The guest can start
//! a function-level reset through the PCI Express capability, which every [`PciFunction`] has.
//! [`PciFunction::config_write`] reports the request in [`ConfigEffect::reset`], and the device
//! performs the same reset. Mappings of guest memory and eventfds survive both.
//!
//! # Saved state
//!
//! Configuration space and banks save the registers that their tables mark as saved. The state is
//! plain data for any `serde` format. Restoring treats the state as untrusted: unknown registers,
//! missing registers and impossible values are errors, and a refused state changes nothing:
//!
//! ```
//! use vfio_user_server::pci_registers::{Bank, BankState, Row, Width};
//!
//! # #[derive(Clone, Copy, Debug, PartialEq)]
//! # enum Reg { Sum }
//! let rows = || vec![Row::rw(Reg::Sum, "SUM", 0, Width::W32, 0, 0xffff, "16-bit sum")];
//! let mut bank = Bank::new(4096, rows());
//! bank.set(Reg::Sum, 7);
//! let json = serde_json::to_string(&bank.save())?;
//! assert_eq!(json, r#"{"SUM":7}"#);
//!
//! let mut other = Bank::new(4096, rows());
//! let state: BankState = serde_json::from_str(&json)?;
//! other.restore(&state)?;
//! assert_eq!(other.get(Reg::Sum), 7);
//!
//! let impossible: BankState = serde_json::from_str(r#"{"SUM":65536}"#)?;
//! assert!(other.restore(&impossible).is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`PciFunction::save`] and [`PciFunction::restore`] do the same for configuration space.
//!
//! # Sessions
//!
//! A [`Session`] serves one client on one connected socket. [`Session::serve`] serves a device
//! without other event sources and returns when the client disconnects. In an event loop, the loop
//! watches the session's socket as [`Interest`] says and calls [`Session::on_ready`]. Neither
//! allocates memory per message. [`Session::serve`] polls for the next message instead of sleeping
//! if measurements show that polling helps (see [`BusyPoll`]).
//!
//! # Guest memory
//!
//! [`Device::dma_map`] brings a range of DMA addresses with a descriptor of the memory and an
//! offset in it, or without a descriptor if the client does not share the memory. The device maps
//! the descriptor, or reads and writes it, until [`Device::dma_unmap`]. `examples/dma_engine.rs`
//! keeps the ranges in a map by address and shows what a device has to check:
//!
//! * The descriptor is memory (`foreign_fds::is_memory`): a read of another file may never return.
//! * Each access lies in one range, which allows the access: addresses and lengths are the guest's.
//! * The guest has enabled bus mastering ([`ConfigSpace::bus_master`]).
//! * The length of work within a method is limited: the guest's vCPU waits for it. Longer work
//!   belongs on a thread of the device, which has ended its accesses when `dma_unmap` returns.
//!
//! A device that implements [`Transfers`] reads and writes unshared memory through messages to the
//! client. The device queues transfers and receives the results later: the client answers only
//! after the running method has returned.
//!
//! # Migration
//!
//! A device with migratable state implements [`Migration`]: a method for transitions between
//! states, one to read the state and one to write it. The session runs the state machine.
//! [`DmaLogging`] marks the pages that the device has written. Without these traits, the session
//! answers `ENOTTY` to the features, as Linux does, and `ENOTSUP` to the messages.
//!
//! # Other devices
//!
//! A device whose tables do not fit builds its [`Layout`] itself, or implements [`Device::region`]
//! and [`Device::irq`] if regions change at run time.
//!
//! [`Bank`]: pci_registers::Bank
//! [`Bank::markdown`]: pci_registers::Bank::markdown
//! [`Bar`]: pci_registers::Bar
//! [`BusyPoll`]: crate::busy_poll::BusyPoll
//! [`ConfigSpace::bus_master`]: pci_registers::ConfigSpace::bus_master
//! [`ConfigEffect::reset`]: pci_registers::ConfigEffect::reset
//! [`Device`]: crate::device::Device
//! [`Device::dma_map`]: crate::device::Device::dma_map
//! [`Device::dma_unmap`]: crate::device::Device::dma_unmap
//! [`Device::irq`]: crate::device::Device::irq
//! [`Device::region`]: crate::device::Device::region
//! [`Device::reset`]: crate::device::Device::reset
//! [`Device::set_irqs`]: crate::device::Device::set_irqs
//! [`DmaLogging`]: crate::migration::DmaLogging
//! [`Errno`]: crate::errno::Errno
//! [`Interest`]: crate::session::Interest
//! [`Layout`]: crate::layout::Layout
//! [`Migration`]: crate::migration::Migration
//! [`PciFunction`]: crate::pci_function::PciFunction
//! [`PciFunction::config_write`]: crate::pci_function::PciFunction::config_write
//! [`PciFunction::intx_unmask_event`]: crate::pci_function::PciFunction::intx_unmask_event
//! [`PciFunction::restore`]: crate::pci_function::PciFunction::restore
//! [`PciFunction::save`]: crate::pci_function::PciFunction::save
//! [`PciFunction::set_intx`]: crate::pci_function::PciFunction::set_intx
//! [`PciFunction::set_irqs`]: crate::pci_function::PciFunction::set_irqs
//! [`PciFunction::signal_msi`]: crate::pci_function::PciFunction::signal_msi
//! [`PciFunctionBuilder::build`]: crate::pci_function::PciFunctionBuilder::build
//! [`PciFunctionBuilder::intx`]: crate::pci_function::PciFunctionBuilder::intx
//! [`PciFunctionBuilder::io_event_fd`]: crate::pci_function::PciFunctionBuilder::io_event_fd
//! [`PciFunctionBuilder::mapped_bar`]: crate::pci_function::PciFunctionBuilder::mapped_bar
//! [`PciFunctionBuilder::msi`]: crate::pci_function::PciFunctionBuilder::msi
//! [`PciFunctionBuilder::partly_mapped_bar`]: crate::pci_function::PciFunctionBuilder::partly_mapped_bar
//! [`Row`]: pci_registers::Row
//! [`Session`]: crate::session::Session
//! [`Session::on_ready`]: crate::session::Session::on_ready
//! [`Session::serve`]: crate::session::Session::serve
//! [`Transfers`]: crate::transfer::Transfers
