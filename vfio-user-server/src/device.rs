//! What a device author writes: the [`Device`] trait and the types of its methods.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::dma::{DmaMap, DmaUnmap};
use crate::errno::Errno;
use crate::irq::{Irq, IrqCommand};
use crate::layout::Layout;
use crate::migration::{DmaLogging, Migration};
use crate::proto::message::Feature;
use crate::transfer::Transfers;

/// Indices of regions and interrupts of a PCI device.
pub mod pci {
    use vfio_bindings::bindings::vfio;

    /// The region of BAR 0; BAR n is this plus n, to BAR 5.
    pub const BAR0: u32 = vfio::VFIO_PCI_BAR0_REGION_INDEX;
    /// The expansion ROM's region.
    pub const ROM: u32 = vfio::VFIO_PCI_ROM_REGION_INDEX;
    /// Configuration space.
    pub const CONFIG: u32 = vfio::VFIO_PCI_CONFIG_REGION_INDEX;
    /// Legacy VGA.
    pub const VGA: u32 = vfio::VFIO_PCI_VGA_REGION_INDEX;

    /// The interrupt pin.
    pub const INTX: u32 = vfio::VFIO_PCI_INTX_IRQ_INDEX;
    /// Message signalled interrupts.
    pub const MSI: u32 = vfio::VFIO_PCI_MSI_IRQ_INDEX;
    /// Message signalled interrupts, extended.
    pub const MSIX: u32 = vfio::VFIO_PCI_MSIX_IRQ_INDEX;
    /// "The device had an error."
    pub const ERR: u32 = vfio::VFIO_PCI_ERR_IRQ_INDEX;
    /// "Please release the device."
    pub const REQ: u32 = vfio::VFIO_PCI_REQ_IRQ_INDEX;
}

/// The device as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `VFIO_DEVICE_FLAGS_*`.
    pub flags: u32,
    /// Regions; those that [`Device::region`] does not know are reported with size 0.
    pub regions: u32,
    /// Interrupt indices.
    pub irqs: u32,
}

/// One region of a device: a BAR, or configuration space.
#[derive(Clone, Copy, Debug)]
pub struct Region<'a> {
    /// Length in bytes.
    pub size: u64,
    /// Reads are answered.
    pub readable: bool,
    /// Writes are taken.
    pub writable: bool,
    /// What of it the client may map.
    pub mapping: Option<Mapping<'a>>,
}

impl Region<'_> {
    /// A region of `size` bytes that is read and written by messages only.
    pub const fn trapped(size: u64) -> Self {
        Self { size, readable: true, writable: true, mapping: None }
    }
}

impl<'a> Region<'a> {
    /// A region that the client may map as a whole: `size` bytes of `fd`, from its beginning.
    pub const fn mapped(size: u64, fd: BorrowedFd<'a>) -> Self {
        let mapping = Mapping { fd, offset: 0, areas: &[] };
        Self { size, readable: true, writable: true, mapping: Some(mapping) }
    }
}

/// How a client maps a region.
#[derive(Clone, Copy, Debug)]
pub struct Mapping<'a> {
    /// The file that is mapped. A client takes exactly one for each region.
    pub fd: BorrowedFd<'a>,
    /// Where in the file the region begins.
    pub offset: u64,
    /// The areas that may be mapped; empty for the whole region.
    pub areas: &'a [Area],
}

/// A part of a region that may be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// Where it begins in the region.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
}

/// A place in a region whose writes a hypervisor turns into a signal, without a message.
#[derive(Debug)]
pub struct IoEventFd {
    /// Where it begins in the region.
    pub offset: u64,
    /// Length of the writes, or 0 for any.
    pub size: u64,
    /// `KVM_IOEVENTFD_FLAG_*`.
    pub flags: u32,
    /// The value that is waited for, where the flags say so.
    pub datamatch: u64,
    /// What is signalled.
    pub fd: OwnedFd,
}

/// A device behind a vfio-user socket.
///
/// The [session](crate::session::Session) has checked what it hands over: a region exists and allows the access, which
/// lies within it; interrupt numbers exist; ranges do not overflow; maps do not overlap. All methods are called from
/// the thread that drives the session, and while one runs the guest's CPU waits: none may block, and none may wait for
/// the client.
pub trait Device {
    /// What it consists of. A device of which that changes, or that is none of PCI, answers [`Self::info`],
    /// [`Self::region`], [`Self::irq`] and [`Self::io_event_fds`] by itself instead.
    fn layout(&self) -> &Layout {
        const { &Layout::NONE }
    }

    /// The device as a whole.
    fn info(&self) -> DeviceInfo {
        self.layout().info()
    }

    /// The region with this index (for PCI, see [`pci`]), `None` where the device has none.
    fn region(&self, index: u32) -> Option<Region<'_>> {
        self.layout().region(index)
    }

    /// The interrupts with this index (for PCI, see [`pci`]).
    fn irq(&self, index: u32) -> Irq {
        self.layout().irq(index)
    }

    /// Fills `data` from `offset` of a region. `data` is zeroed, and can be as long as the region or 1 MiB.
    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno>;

    /// Writes `data` at `offset` of a region.
    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno>;

    /// The client lets the device access a range of its memory.
    ///
    /// Maps without a descriptor come too: memory that is not shared, ROMs, and the device's own mapped regions.
    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let _ = map;
        Ok(())
    }

    /// The client takes memory back: no access to it may be under way once this returns.
    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        let _ = unmap;
        Ok(())
    }

    /// The client configures, masks or raises interrupts of an index.
    fn set_irqs(&mut self, index: u32, command: IrqCommand<'_>) -> Result<(), Errno> {
        let _ = (index, command);
        Err(Errno::ENOTSUP)
    }

    /// Back to the state after power-on. Memory maps and interrupt eventfds stay: they are the client's.
    fn reset(&mut self) -> Result<(), Errno>;

    /// The places of a region whose writes may come as signals.
    fn io_event_fds(&self, index: u32) -> &[IoEventFd] {
        self.layout().io_event_fds(index)
    }

    /// How its state is saved and restored, where it can be.
    fn migration(&mut self) -> Option<&mut dyn Migration> {
        None
    }

    /// How it logs what it writes, where it does.
    fn dma_logging(&mut self) -> Option<&mut dyn DmaLogging> {
        None
    }

    /// What it wants of memory that the client does not share, where it can work with that.
    fn transfers(&mut self) -> Option<&mut dyn Transfers> {
        None
    }

    /// A feature other than migration and DMA logging is probed, read or set. What is read is appended to `reply`.
    /// `ENOTTY` says that there is no such feature, as Linux does; a probe of one that is there must find all methods
    /// that it names.
    fn feature(&mut self, feature: Feature<'_>, reply: &mut Vec<u8>) -> Result<(), Errno> {
        let _ = (feature, reply);
        Err(Errno::ENOTTY)
    }

    /// The client is gone: drop every map and every interrupt's eventfd, and run again if it was stopped. Called once,
    /// when the session ends.
    fn detach(&mut self) {}
}
