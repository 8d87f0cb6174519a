//! The [`Device`] trait, which device authors implement, and its types.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::device_feature::Feature;
use crate::dma::{DmaMap, DmaUnmap};
use crate::errno::Errno;
use crate::irq::{Irq, IrqCommand};
use crate::journal::Journal;
use crate::layout::Layout;
use crate::migration::{DmaLogging, Migration};
use crate::transfer::Transfers;

/// Region and interrupt indices of a PCI device.
pub mod pci {
    use vfio_bindings::bindings::vfio;

    /// Region of BAR 0. The region of BAR n is this plus n, up to BAR 5.
    pub const BAR0: u32 = vfio::VFIO_PCI_BAR0_REGION_INDEX;
    /// Region of the expansion ROM.
    pub const ROM: u32 = vfio::VFIO_PCI_ROM_REGION_INDEX;
    /// Region of configuration space.
    pub const CONFIG: u32 = vfio::VFIO_PCI_CONFIG_REGION_INDEX;
    /// Region of legacy VGA.
    pub const VGA: u32 = vfio::VFIO_PCI_VGA_REGION_INDEX;

    /// INTx.
    pub const INTX: u32 = vfio::VFIO_PCI_INTX_IRQ_INDEX;
    /// MSI vectors.
    pub const MSI: u32 = vfio::VFIO_PCI_MSI_IRQ_INDEX;
    /// MSI-X vectors.
    pub const MSIX: u32 = vfio::VFIO_PCI_MSIX_IRQ_INDEX;
    /// Notification of a device error.
    pub const ERR: u32 = vfio::VFIO_PCI_ERR_IRQ_INDEX;
    /// Request to release the device.
    pub const REQ: u32 = vfio::VFIO_PCI_REQ_IRQ_INDEX;
}

/// Reply to DEVICE_GET_INFO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `VFIO_DEVICE_FLAGS_*`.
    pub flags: u32,
    /// Number of regions. Regions that [`Device::region`] does not return are reported with size 0.
    pub regions: u32,
    /// Number of interrupt indices.
    pub irqs: u32,
}

/// Region of a device: a BAR or configuration space.
#[derive(Clone, Copy, Debug)]
pub struct Region<'a> {
    /// Length in bytes.
    pub size: u64,
    /// True if the client may read.
    pub readable: bool,
    /// True if the client may write.
    pub writable: bool,
    /// Part of the region that the client may map.
    pub mapping: Option<Mapping<'a>>,
}

impl Region<'_> {
    /// Returns a region of `size` bytes whose accesses are trapped.
    pub const fn trapped(size: u64) -> Self {
        Self { size, readable: true, writable: true, mapping: None }
    }
}

impl<'a> Region<'a> {
    /// Returns a region that the client may map as a whole: the first `size` bytes of `fd`.
    pub const fn mapped(size: u64, fd: BorrowedFd<'a>) -> Self {
        let mapping = Mapping { fd, offset: 0, areas: &[] };
        Self { size, readable: true, writable: true, mapping: Some(mapping) }
    }
}

/// File mapping of a region.
#[derive(Clone, Copy, Debug)]
pub struct Mapping<'a> {
    /// File to map. The protocol allows one per region.
    pub fd: BorrowedFd<'a>,
    /// Offset of the region in the file.
    pub offset: u64,
    /// Areas that the client may map; empty for the whole region.
    pub areas: &'a [Area],
}

/// Part of a region that a client may map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// Offset in the region.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
}

/// An ioeventfd: a register whose writes KVM turns into eventfd signals, without messages.
#[derive(Debug)]
pub struct IoEventFd {
    /// Offset in the region.
    pub offset: u64,
    /// Length of the writes in bytes, or 0 for any.
    pub size: u64,
    /// `KVM_IOEVENTFD_FLAG_*`.
    pub flags: u32,
    /// Value to match, if the flags ask for it.
    pub datamatch: u64,
    /// Eventfd to signal.
    pub fd: OwnedFd,
}

/// A device behind a vfio-user socket.
///
/// The [session](crate::session::Session) checks all arguments: regions exist and allow the access,
/// accesses lie within their region, interrupts exist, ranges do not overflow, mappings do not
/// overlap. The thread that drives the session calls all methods, and the guest's vCPU waits for
/// them. No method may block or wait for the client.
pub trait Device {
    /// Returns the regions and interrupts. A device whose regions change, or that is not a PCI
    /// device, implements [`Self::info`], [`Self::region`], [`Self::irq`] and
    /// [`Self::io_event_fds`] instead.
    fn layout(&self) -> &Layout {
        const { &Layout::NONE }
    }

    /// Returns the flags and the numbers of regions and interrupt indices.
    fn info(&self) -> DeviceInfo {
        self.layout().info()
    }

    /// Returns the region with an index (for PCI, see [`pci`]), or `None` if the device lacks it.
    fn region(&self, index: u32) -> Option<Region<'_>> {
        self.layout().region(index)
    }

    /// Returns the interrupts of an index (for PCI, see [`pci`]).
    fn irq(&self, index: u32) -> Irq {
        self.layout().irq(index)
    }

    /// Reads from `offset` of a region into `data`. `data` is zeroed, and at most as long as the
    /// region and 1 MiB.
    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno>;

    /// Writes `data` to `offset` of a region.
    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno>;

    /// Adds a mapping of the client's memory.
    ///
    /// Mappings without a descriptor stand for memory that the client does not share: private
    /// memory, ROMs and the device's own mapped regions.
    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let _ = map;
        Ok(())
    }

    /// Removes mappings. Accesses to them must have ended when the method returns.
    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        let _ = unmap;
        Ok(())
    }

    /// Configures, masks or raises interrupts of an index, as the client requests.
    fn set_irqs(&mut self, index: u32, command: IrqCommand<'_>) -> Result<(), Errno> {
        let _ = (index, command);
        Err(Errno::ENOTSUP)
    }

    /// Returns the device to its power-on state. DMA mappings and eventfds stay: the client owns
    /// them.
    fn reset(&mut self) -> Result<(), Errno>;

    /// Returns the ioeventfds of a region.
    fn io_event_fds(&self, index: u32) -> &[IoEventFd] {
        self.layout().io_event_fds(index)
    }

    /// Returns the migration interface, if the device supports migration.
    fn migration(&mut self) -> Option<&mut dyn Migration> {
        None
    }

    /// Returns the interface for logging DMA writes, if the device supports it.
    fn dma_logging(&mut self) -> Option<&mut dyn DmaLogging> {
        None
    }

    /// Returns the interface for transfers of memory that the client does not share, if the device
    /// supports them.
    fn transfers(&mut self) -> Option<&mut dyn Transfers> {
        None
    }

    /// Probes, reads or sets a feature other than migration and DMA logging. A read appends its
    /// value to `reply`. A probe succeeds if the feature has all methods that the probe names.
    ///
    /// # Errors
    ///
    /// `ENOTTY` for unknown features, as in Linux.
    fn feature(&mut self, feature: Feature<'_>, reply: &mut Vec<u8>) -> Result<(), Errno> {
        let _ = (feature, reply);
        Err(Errno::ENOTTY)
    }

    /// Returns the journal, if another process can continue the session when this one has ended.
    /// Such a device has neither [`Self::transfers`] nor [`Self::dma_logging`].
    fn journal(&mut self) -> Option<&mut dyn Journal> {
        None
    }

    /// Drops all mappings and eventfds and leaves the stopped state. Called once, when the session
    /// ends.
    fn detach(&mut self) {}
}
