//! An open VFIO device: its BARs, its interrupts, and the memory that it can reach.
//!
//! When this process ends, the kernel removes the DMA mappings, disables the interrupts and clears
//! bus mastering.

use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use ipc::mem::{self, Mapping};
use mdev_core::units::PAGE_SIZE;
use nix::errno::Errno;
use nix::sys::uio::{pread, pwrite};
use vfio_ioctls::{VfioDevice, VfioError};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::access::Access;
use super::dma::AddressSpace;
pub use super::dma::Attached;
use super::window::{Window, WindowError};
use host_inventory::family::Family;
use host_inventory::{HostError, PciAddress, PciHost};

/// VFIO region index of the configuration space.
const CONFIG_REGION: u32 = 7;
/// PCI command register, and its memory space and bus master bits.
const COMMAND: u64 = 4;
const MEMORY_AND_MASTER: u16 = 1 << 1 | 1 << 2;

/// Error of opening or using a device, with a remedy.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The host lacks a prerequisite.
    #[error("{0}")]
    Host(#[from] HostError),
    /// Another driver is bound to the device.
    #[error(
        "{address} is driven by {driver}: bind it to vfio-pci with `vgpuctl parents bind {address}`"
    )]
    NotBound {
        /// PCI address.
        address: PciAddress,
        /// The bound driver.
        driver: String,
    },
    /// The device belongs to no [`Family`].
    #[error(
        "{address} is a {vendor:04x}:{device:04x}, which Tessera does not support: it has no register table for it"
    )]
    Unknown {
        /// PCI address.
        address: PciAddress,
        /// PCI vendor id.
        vendor: u16,
        /// PCI device id.
        device: u16,
    },
    /// Another process has the device open.
    #[error("{0} is in use by another process: find it with `fuser -v {1}`")]
    Busy(PciAddress, String),
    /// Another process has another device of the IOMMU group open.
    #[error(
        "{address} shares IOMMU group {group} with {others}, which another process has: one process must own the whole group"
    )]
    Shared {
        /// PCI address.
        address: PciAddress,
        /// IOMMU group number.
        group: u32,
        /// The other devices in the group.
        others: String,
    },
    /// Missing permission to open a file.
    #[error(
        "No permission for {0}: run this as root, or make this user the file's owner; for vgpud's service, use \
         `vgpuctl parents bind`"
    )]
    Permission(String),
    /// The kernel lacks iommufd.
    #[error(
        "The kernel has no /dev/iommu: `modprobe iommufd`, or remove iommufd=yes if the kernel was built without it"
    )]
    NoIommufd,
    /// The kernel lacks files for single devices.
    #[error(
        "{0} has no file in /dev/vfio/devices: this kernel was built without CONFIG_VFIO_DEVICE_CDEV; remove iommufd=yes"
    )]
    NoCharacterDevice(PciAddress),
    /// The kernel lacks containers.
    #[error(
        "/dev/vfio/vfio does not exist: `modprobe vfio`; a kernel without containers needs iommufd (`modprobe iommufd`)"
    )]
    NoContainer,
    /// The platform has no interrupt remapping.
    #[error(
        "{address} could forge interrupts: enable interrupt remapping in the firmware, or accept the risk (parameter allow_unsafe_interrupts of {module})"
    )]
    Interrupts {
        /// PCI address.
        address: PciAddress,
        /// Module with the parameter.
        module: &'static str,
    },
    /// Another VFIO error, such as a missing IOMMU module.
    #[error("VFIO failed for {address}: {source}; see `dmesg`")]
    Vfio {
        /// PCI address.
        address: PciAddress,
        /// Error of the VFIO crate.
        source: VfioError,
    },
    /// The range is not in the BAR, or its table does not allow mapping.
    #[error("The device's table does not allow mapping {len:#x} bytes of BAR {bar} at {offset:#x}")]
    NotMapped {
        /// BAR number.
        bar: u8,
        /// Byte offset.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The limit of locked memory is reached.
    #[error(
        "{address} cannot map more memory: {account} may not lock so much; raise RLIMIT_MEMLOCK (LimitMEMLOCK=)"
    )]
    LockedMemory {
        /// PCI address.
        address: PciAddress,
        /// Account that the kernel charges.
        account: &'static str,
    },
    /// A DMA window is missing or was exceeded.
    #[error("{0}")]
    Window(#[from] WindowError),
    /// The service's sandbox makes the device's sysfs files read-only.
    #[error(
        "{0} cannot be shared: this service may not write the device's files in /sys: run `vgpuctl parents bind {0}`, \
         then `systemctl restart vgpud`"
    )]
    ReadOnly(PciAddress),
    /// The window length leaves no room for a window.
    #[error(
        "A DMA window of {mib} MiB is too long for a device with {bits} DMA address bits: choose a shorter one (window=SIZE)"
    )]
    NoWindows {
        /// DMA address bits of the device.
        bits: u8,
        /// Window length in MiB.
        mib: u64,
    },
    /// The device does not behave as its family does.
    #[error("The {family} device {fault}")]
    Broken {
        /// Family.
        family: &'static str,
        /// Deviation, as a predicate.
        fault: &'static str,
    },
    /// A system call failed.
    #[error("Cannot {what}: {source}")]
    Io {
        /// Operation.
        what: &'static str,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// A device that is open through vfio-pci.
pub struct Device {
    address: PciAddress,
    family: &'static Family,
    // Dropped before the address space that the device is attached to.
    vfio: VfioDevice,
    access: Access,
    space: Arc<AddressSpace>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("address", &self.address)
            .field("family", &self.family.name)
            .finish_non_exhaustive()
    }
}

impl Device {
    /// Opens a device that is bound to vfio-pci. `iommufd` is as in [`Access::choose`].
    pub fn open(
        host: &PciHost,
        address: PciAddress,
        iommufd: Option<bool>,
    ) -> Result<Self, DeviceError> {
        let found = host.device(address)?;
        let (vendor, device) = (found.vendor, found.device);
        let family = Family::of(vendor, device);
        let family = family.ok_or(DeviceError::Unknown { address, vendor, device })?;
        if !found.is_bound() {
            let driver = found.driver.unwrap_or_else(|| "no driver".to_owned());
            return Err(DeviceError::NotBound { address, driver });
        }
        host.isolated_group(&found)?;
        let access = Access::choose(host, &found, iommufd)?;
        let (vfio, space) = access.open(&found)?;
        log::info!("{address} is opened through {access}");
        let device = Self { address, family, vfio, access, space };
        // A function-level reset, where the device supports one, clears the state of the previous
        // user.
        device.vfio.reset();
        device.enable()?;
        Ok(device)
    }

    /// Enables memory space and bus mastering.
    fn enable(&self) -> Result<(), DeviceError> {
        let mut bytes = [0; 2];
        self.read(CONFIG_REGION, COMMAND, &mut bytes)?;
        let command = u16::from_le_bytes(bytes) | MEMORY_AND_MASTER;
        self.write(CONFIG_REGION, COMMAND, &command.to_le_bytes())
    }

    /// Returns the PCI address.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// Returns the interface through which the device was opened.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns the device family.
    pub fn family(&self) -> &'static Family {
        self.family
    }

    /// Returns the length of a BAR in bytes, 0 if the BAR is not implemented.
    pub fn bar_len(&self, bar: u8) -> u64 {
        self.vfio.get_region_size(bar.into())
    }

    /// Reads a register, for the mediator only.
    pub fn load<const N: usize>(&self, bar: u8, offset: u64) -> Result<[u8; N], DeviceError> {
        let mut bytes = [0; N];
        self.read(bar.into(), offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads `bytes.len()` bytes of registers, for the mediator only.
    pub fn load_bytes(&self, bar: u8, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.read(bar.into(), offset, bytes)
    }

    /// Writes a register, for the mediator only.
    pub fn store(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.write(bar.into(), offset, bytes)
    }

    /// Maps a range of a BAR that the family's table allows guests to map.
    pub fn map(&self, bar: u8, offset: u64, len: u64) -> Result<Arc<Mapping>, DeviceError> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.bar_len(bar));
        if !inside || !self.family.may_map(bar, offset, len) {
            return Err(DeviceError::NotMapped { bar, offset, len });
        }
        let at = self.vfio.get_region_offset(bar.into()) + offset;
        let mapped = Mapping::new(self.fd(), at, len, true);
        mapped.map_err(|source| DeviceError::Io { what: "map a BAR", source })
    }

    /// Maps a whole BAR, for the mediator only. Guests must not get this mapping.
    pub fn map_registers(&self, bar: u8) -> Result<Arc<Mapping>, DeviceError> {
        let at = self.vfio.get_region_offset(bar.into());
        let mapped = Mapping::new(self.fd(), at, self.bar_len(bar), true);
        mapped.map_err(|source| DeviceError::Io { what: "map registers", source })
    }

    /// Enables MSI and returns an eventfd for each of the first `count` vectors.
    pub fn interrupts(&self, count: usize) -> Result<Vec<EventFd>, DeviceError> {
        let event = || EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK);
        let events: io::Result<Vec<_>> = (0..count).map(|_| event()).collect();
        let events =
            events.map_err(|source| DeviceError::Io { what: "create an eventfd", source })?;
        let refused = |source| DeviceError::Vfio { address: self.address, source };
        self.vfio.enable_msi(events.iter().collect()).map_err(refused)?;
        Ok(events)
    }

    /// Allocates memory as long as a window and maps it for the device there.
    pub fn attach(&self, window: Window) -> Result<Attached, DeviceError> {
        let made = mem::sealed_memfd(c"tessera-dma", window.len)
            .and_then(|fd| Mapping::new(fd.as_fd(), 0, window.len, true));
        let memory =
            made.map_err(|source| DeviceError::Io { what: "allocate DMA memory", source })?;
        self.attach_memory(window.iova, memory)
    }

    /// Maps and pins memory for the device at `iova`. The device may write where this process may.
    pub fn attach_memory(&self, iova: u64, memory: Arc<Mapping>) -> Result<Attached, DeviceError> {
        let len = memory.len();
        if !iova.is_multiple_of(PAGE_SIZE) || !len.is_multiple_of(PAGE_SIZE) {
            return Err(WindowError::Outside { address: iova, len }.into());
        }
        self.space.attach(iova, memory).map_err(|errno| match errno {
            Errno::ENOMEM => DeviceError::LockedMemory {
                address: self.address,
                account: match self.access {
                    Access::Group => "this process",
                    Access::Iommufd => "this user's processes together",
                },
            },
            _ => DeviceError::Io { what: "map memory for DMA", source: errno.into() },
        })
    }

    /// Returns the IOVA ranges that the IOMMU can map, in ascending order.
    pub fn dma_ranges(&self) -> Result<Vec<RangeInclusive<u64>>, DeviceError> {
        let ranges = self.space.ranges();
        ranges.map_err(|source| DeviceError::Io { what: "read the IOMMU's address ranges", source })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the device, which outlives the borrow.
        unsafe { BorrowedFd::borrow_raw(self.vfio.as_raw_fd()) }
    }

    fn file_offset(&self, region: u32, offset: u64, len: usize) -> Result<i64, DeviceError> {
        let end = offset.checked_add(len as u64);
        let inside = end.is_some_and(|end| end <= self.vfio.get_region_size(region));
        let at = self.vfio.get_region_offset(region).checked_add(offset).filter(|_| inside);
        let at = at.and_then(|at| i64::try_from(at).ok());
        at.ok_or(DeviceError::Io {
            what: "access a register beyond the region",
            source: io::ErrorKind::InvalidInput.into(),
        })
    }

    fn read(&self, region: u32, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let at = self.file_offset(region, offset, bytes.len())?;
        let done = pread(self.fd(), bytes, at).map_err(io::Error::from);
        check_transferred("read a register", done, bytes.len())
    }

    fn write(&self, region: u32, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let at = self.file_offset(region, offset, bytes.len())?;
        let done = pwrite(self.fd(), bytes, at).map_err(io::Error::from);
        check_transferred("write a register", done, bytes.len())
    }
}

fn check_transferred(
    what: &'static str,
    done: io::Result<usize>,
    len: usize,
) -> Result<(), DeviceError> {
    match done {
        Ok(count) if count == len => Ok(()),
        Ok(_) => Err(DeviceError::Io { what, source: io::ErrorKind::UnexpectedEof.into() }),
        Err(source) => Err(DeviceError::Io { what, source }),
    }
}
