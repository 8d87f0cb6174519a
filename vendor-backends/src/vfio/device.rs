//! One physical device in our hands: its BARs, its interrupt, and memory that it may reach.
//!
//! Whatever happens to this process, the kernel takes all of it back: the IOMMU forgets the memory, interrupts are off,
//! and bus mastering with them.

use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use mdev_core::units::PAGE_SIZE;
use nix::errno::Errno;
use nix::sys::uio::{pread, pwrite};
use vfio_ioctls::{VfioDevice, VfioError};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::access::Access;
use super::dma::AddressSpace;
pub use super::dma::Attached;
use super::family::Family;
use super::host::{Address, Host, HostError};
use super::window::{Window, WindowError};
use crate::mem::{self, Mapping};

/// Index of the configuration space among a PCI device's regions, and of MSI among its interrupts.
const CONFIG_REGION: u32 = 7;
/// The command register, and its bits for memory and bus mastering.
const COMMAND: u64 = 4;
const MEMORY_AND_MASTER: u16 = 1 << 1 | 1 << 2;

/// Why a device cannot be used. Each says what to do.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The host says no.
    #[error("{0}")]
    Host(#[from] HostError),
    /// Its driver has it.
    #[error(
        "{address} is driven by {driver}: `vgpuctl parents bind {address}` gives it to vfio-pci"
    )]
    NotBound {
        /// The device.
        address: Address,
        /// What drives it.
        driver: String,
    },
    /// No table.
    #[error("{address} is a {vendor:04x}:{device:04x}, of which Tessera has no table of registers")]
    Unknown {
        /// The device.
        address: Address,
        /// Its maker.
        vendor: u16,
        /// What it is.
        device: u16,
    },
    /// Another process has it.
    #[error("{0} is in use by another process: `fuser -v {1}` shows which")]
    Busy(Address, String),
    /// Another process has a part of its group.
    #[error(
        "{address} shares IOMMU group {group} with {others}, which another process has: all of a group belongs to one"
    )]
    Shared {
        /// The device.
        address: Address,
        /// Its group.
        group: u32,
        /// The others in it.
        others: String,
    },
    /// Not ours to open.
    #[error(
        "No permission for {0}: run this as root, or give the file to this user; vgpud's service is given it by \
         `vgpuctl parents bind`"
    )]
    Permission(String),
    /// The kernel has no iommufd.
    #[error(
        "The kernel has no /dev/iommu: `modprobe iommufd`, or leave iommufd=yes away where it was built without"
    )]
    NoIommufd,
    /// The kernel has no files of single devices.
    #[error(
        "{0} has no file of its own in /dev/vfio/devices: this kernel was built without CONFIG_VFIO_DEVICE_CDEV; leave iommufd=yes away"
    )]
    NoCharacterDevice(Address),
    /// The kernel has no containers.
    #[error(
        "/dev/vfio/vfio is not there: `modprobe vfio`; a kernel without containers needs iommufd (`modprobe iommufd`)"
    )]
    NoContainer,
    /// The platform lets devices send any interrupt.
    #[error(
        "{address} could send interrupts that are not its own: switch interrupt remapping on in the firmware, or allow it (allow_unsafe_interrupts of {module})"
    )]
    Interrupts {
        /// The device.
        address: Address,
        /// Whose parameter it is.
        module: &'static str,
    },
    /// The module that confines DMA is missing, or something else of VFIO.
    #[error("VFIO does not work for {address}: {source}; see `dmesg`")]
    Vfio {
        /// The device.
        address: Address,
        /// What it said.
        source: VfioError,
    },
    /// Not in a register, not in the BAR, or not to be mapped.
    #[error("Its table does not let BAR {bar} be mapped at {offset:#x} for {len:#x} bytes")]
    NotMapped {
        /// Which BAR.
        bar: u8,
        /// From where.
        offset: u64,
        /// How much.
        len: u64,
    },
    /// Too much of it.
    #[error(
        "{address} cannot have more memory: {who} may not lock so much; raise RLIMIT_MEMLOCK (LimitMEMLOCK=)"
    )]
    Pinned {
        /// The device.
        address: Address,
        /// On whose account the kernel counts it.
        who: &'static str,
    },
    /// A DMA window.
    #[error("{0}")]
    Window(#[from] WindowError),
    /// The service that this is may only look at the device's files.
    #[error(
        "{0} cannot be shared: this service may not write its files in /sys: `vgpuctl parents bind {0}` lets it, after \
         `systemctl restart vgpud`"
    )]
    ReadOnly(Address),
    /// Its windows are too long.
    #[error(
        "A window of {mib} MiB is too long for a device with {bits} bits of DMA addresses: choose a smaller one (window=SIZE)"
    )]
    NoWindows {
        /// Bits of its addresses.
        bits: u8,
        /// How long.
        mib: u64,
    },
    /// It does not do what its kind does.
    #[error("This {what} {how}")]
    Broken {
        /// Its kind.
        what: &'static str,
        /// What it does not do.
        how: &'static str,
    },
    /// The kernel refused.
    #[error("Cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// A device that vfio-pci has handed to us.
pub struct Device {
    address: Address,
    family: &'static Family,
    // Before the address space, which it is in.
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
    /// Opens a device that is bound to vfio-pci: by iommufd or not, or as the kernel has it.
    pub fn open(host: &Host, address: Address, iommufd: Option<bool>) -> Result<Self, DeviceError> {
        let found = host.device(address)?;
        let (vendor, device) = (found.vendor, found.device);
        let family = Family::of(vendor, device);
        let family = family.ok_or(DeviceError::Unknown { address, vendor, device })?;
        if !found.is_bound() {
            let driver = found.driver.unwrap_or_else(|| "no driver".to_owned());
            return Err(DeviceError::NotBound { address, driver });
        }
        host.confined(&found)?;
        let access = Access::of(host, &found, iommufd)?;
        let (vfio, space) = access.open(&found)?;
        log::info!("{address} is opened by {access}");
        let device = Self { address, family, vfio, access, space };
        // Where it can be reset as a whole, it is: nothing of an earlier user is left.
        device.vfio.reset();
        device.enable()?;
        Ok(device)
    }

    /// Lets it answer, and do DMA.
    fn enable(&self) -> Result<(), DeviceError> {
        let mut bytes = [0; 2];
        self.read(CONFIG_REGION, COMMAND, &mut bytes)?;
        let command = u16::from_le_bytes(bytes) | MEMORY_AND_MASTER;
        self.write(CONFIG_REGION, COMMAND, &command.to_le_bytes())
    }

    /// Where it is.
    pub fn address(&self) -> Address {
        self.address
    }

    /// How it was opened.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Its kind.
    pub fn family(&self) -> &'static Family {
        self.family
    }

    /// How long a BAR is: 0 where there is none.
    pub fn bar_len(&self, bar: u8) -> u64 {
        self.vfio.get_region_size(bar.into())
    }

    /// Reads a register, for the mediator's own use.
    pub fn load<const N: usize>(&self, bar: u8, offset: u64) -> Result<[u8; N], DeviceError> {
        let mut bytes = [0; N];
        self.read(bar.into(), offset, &mut bytes)?;
        Ok(bytes)
    }

    /// The same, of any length.
    pub fn load_bytes(&self, bar: u8, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.read(bar.into(), offset, bytes)
    }

    /// Writes a register, for the mediator's own use.
    pub fn store(&self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.write(bar.into(), offset, bytes)
    }

    /// Maps what a guest may have of a BAR: what its family's table says, and nothing else.
    pub fn map(&self, bar: u8, offset: u64, len: u64) -> Result<Arc<Mapping>, DeviceError> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.bar_len(bar));
        if !inside || !self.family.may_map(bar, offset, len) {
            return Err(DeviceError::NotMapped { bar, offset, len });
        }
        let at = self.vfio.get_region_offset(bar.into()) + offset;
        let mapped = Mapping::new(self.fd(), at, len, true);
        mapped.map_err(|source| DeviceError::Io { what: "map a BAR", source })
    }

    /// Maps all of a BAR, for the mediator's own use: no guest gets anything of it.
    pub fn registers(&self, bar: u8) -> Result<Arc<Mapping>, DeviceError> {
        let at = self.vfio.get_region_offset(bar.into());
        let mapped = Mapping::new(self.fd(), at, self.bar_len(bar), true);
        mapped.map_err(|source| DeviceError::Io { what: "map registers", source })
    }

    /// Takes its message-signalled interrupts; an event for each of the first `count`.
    pub fn interrupts(&self, count: usize) -> Result<Vec<EventFd>, DeviceError> {
        let event = || EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK);
        let events: io::Result<Vec<_>> = (0..count).map(|_| event()).collect();
        let events = events.map_err(|source| DeviceError::Io { what: "make an event", source })?;
        let refused = |source| DeviceError::Vfio { address: self.address, source };
        self.vfio.enable_msi(events.iter().collect()).map_err(refused)?;
        Ok(events)
    }

    /// Lets the device reach new memory in a window, as much of it as the window is long.
    pub fn attach(&self, window: Window) -> Result<Attached, DeviceError> {
        let made = mem::sealed_memfd(c"tessera-dma", window.len)
            .and_then(|fd| Mapping::new(fd.as_fd(), 0, window.len, true));
        let memory = made.map_err(|source| DeviceError::Io { what: "take memory", source })?;
        self.attach_memory(window.iova, memory)
    }

    /// Lets the device reach memory from an address on. It is pinned; the device may write it where this process may.
    pub fn attach_memory(&self, iova: u64, memory: Arc<Mapping>) -> Result<Attached, DeviceError> {
        let len = memory.len();
        if !iova.is_multiple_of(PAGE_SIZE) || !len.is_multiple_of(PAGE_SIZE) {
            return Err(WindowError::Outside { address: iova, len }.into());
        }
        self.space.attach(iova, memory).map_err(|errno| match errno {
            Errno::ENOMEM => DeviceError::Pinned {
                address: self.address,
                who: match self.access {
                    Access::Group => "this process",
                    Access::Iommufd => "this user's processes together",
                },
            },
            _ => DeviceError::Io { what: "map memory for DMA", source: errno.into() },
        })
    }

    /// Which DMA addresses the IOMMU lets be mapped, in order.
    pub fn dma_ranges(&self) -> Result<Vec<RangeInclusive<u64>>, DeviceError> {
        let ranges = self.space.ranges();
        ranges.map_err(|source| DeviceError::Io { what: "ask for the IOMMU's addresses", source })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the device's, which lives as long as what is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.vfio.as_raw_fd()) }
    }

    fn place(&self, region: u32, offset: u64, len: usize) -> Result<i64, DeviceError> {
        let end = offset.checked_add(len as u64);
        let inside = end.is_some_and(|end| end <= self.vfio.get_region_size(region));
        let at = self.vfio.get_region_offset(region).checked_add(offset).filter(|_| inside);
        let at = at.and_then(|at| i64::try_from(at).ok());
        at.ok_or(DeviceError::Io {
            what: "reach a register",
            source: io::ErrorKind::InvalidInput.into(),
        })
    }

    fn read(&self, region: u32, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let at = self.place(region, offset, bytes.len())?;
        let done = pread(self.fd(), bytes, at).map_err(io::Error::from);
        whole("read a register", done, bytes.len())
    }

    fn write(&self, region: u32, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let at = self.place(region, offset, bytes.len())?;
        let done = pwrite(self.fd(), bytes, at).map_err(io::Error::from);
        whole("write a register", done, bytes.len())
    }
}

fn whole(what: &'static str, done: io::Result<usize>, len: usize) -> Result<(), DeviceError> {
    match done {
        Ok(count) if count == len => Ok(()),
        Ok(_) => Err(DeviceError::Io { what, source: io::ErrorKind::UnexpectedEof.into() }),
        Err(source) => Err(DeviceError::Io { what, source }),
    }
}
