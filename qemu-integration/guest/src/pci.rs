//! Platform of a VM: the PCI function, accessed through sysfs as root, without a kernel driver.
//!
//! A kernel driver that has claimed some BARs (bochs-drm: 0 and 2) does not prevent mapping the
//! others.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::thread;
use std::time::Duration;

use mdev_core::abi::control::{BAR_BYTES, MAGIC, reg};
use mdev_core::abi::doorbell;
use mdev_core::untrusted::{VALUE, read_text};
use memmap2::{MmapOptions, MmapRaw};

use crate::GuestError;
use crate::direct::{self, DirectNode};
use crate::lock_owner;
use crate::platform::{GuestPages, Platform, Window};
use crate::pool::Pool;

/// Folder in which Linux lists PCI functions.
const DEVICES: &str = "/sys/bus/pci/devices";
/// Vendor and device ids of vGPUs: the Bochs display adapter, and an accelerator without a display.
const IDS: [(u16, u16); 2] = [(0x1234, 0x1111), (0x1af4, 0x10f0)];
/// Offset of the command register; bits 1 and 2 enable memory space and bus mastering.
const COMMAND: u64 = 0x04;
const MEMORY_AND_MASTER: u16 = 0x6;
/// BAR of video memory, which no kernel driver claims.
const VRAM: usize = 4;

/// vGPU on this machine's PCI bus.
#[derive(Debug)]
pub struct PciPlatform {
    address: String,
    control: Bar,
    doorbell: Option<Bar>,
    vram: Option<Bar>,
    scanout_bytes: u64,
    pool: Pool,
    /// Node of the kernel driver that has the vGPU.
    direct: Option<DirectNode>,
    /// Lock that marks the vGPU as in use.
    _config: File,
}

/// Use of a vGPU by a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Submitting work. One process at a time has the channels and the mailbox.
    Exclusive,
    /// Reading registers, also while another process submits work.
    Shared,
}

impl PciPlatform {
    /// Opens the function at a PCI address, or the first vGPU.
    pub fn open(address: Option<&str>, access: Access) -> Result<Self, GuestError> {
        if let Some(address) = address {
            return Self::at(&Path::new(DEVICES).join(address), access);
        }
        let folder = vgpus(Path::new(DEVICES))?.into_iter().next().ok_or(GuestError::NoDevice)?;
        Self::at(&folder, access)
    }

    fn at(folder: &Path, access: Access) -> Result<Self, GuestError> {
        let address = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !looks_right(folder) {
            return Err(GuestError::NoDevice);
        }
        let config = open(&folder.join("config"))?;
        if access == Access::Exclusive {
            lock(&config, &address)?;
        }
        enable(folder, &config)?;
        let sizes = resource_sizes(folder)?;
        let direct = if access == Access::Exclusive
            && driver(folder).is_some_and(|driver| driver == direct::DRIVER)
        {
            DirectNode::open(&address)?
        } else {
            None
        };
        let bar = |number: usize| match &direct {
            Some(node) if number != VRAM => Bar::of_node(node, number, sizes[number]).transpose(),
            _ => Bar::map(folder, number, sizes[number]).transpose(),
        };
        let control = bar(3)
            .map_err(|error| match driver(folder) {
                // A driver that has claimed the registers keeps programs from mapping them.
                Some(driver) => GuestError::Driver { address: address.clone(), driver },
                None => error,
            })?
            .ok_or(GuestError::NoDevice)?;
        if control.window().read32(reg::MAGIC) != MAGIC {
            return Err(GuestError::NoDevice);
        }
        let scanout_bytes = sizes[0];
        Ok(Self {
            address,
            control,
            doorbell: bar(1)?,
            vram: bar(VRAM)?,
            scanout_bytes,
            pool: Pool::default(),
            direct,
            _config: config,
        })
    }
}

impl Platform for PciPlatform {
    fn location(&self) -> String {
        self.address.clone()
    }

    fn read32(&self, offset: u64) -> u32 {
        self.control.window().read32(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.control.window().write32(offset, value);
    }

    fn ring(&self, token: u32) {
        if let Some(bar) = &self.doorbell {
            bar.window().write32(doorbell::TOKEN, token);
        }
    }

    fn vram(&self) -> Option<Window<'_>> {
        self.vram.as_ref().map(Bar::window)
    }

    fn scanout_bytes(&self) -> u64 {
        self.scanout_bytes
    }

    fn allocate(&self, bytes: u64) -> Result<GuestPages, GuestError> {
        self.pool.allocate(bytes)
    }

    fn interrupts(&self) -> bool {
        self.direct.as_ref().is_some_and(DirectNode::interrupts)
    }

    fn wait(&self, limit: Duration) {
        match &self.direct {
            Some(node) if node.interrupts() => node.wait(limit),
            _ => thread::sleep(limit),
        }
    }
}

/// Mapped BAR.
#[derive(Debug)]
struct Bar(MmapRaw);

impl Bar {
    fn map(folder: &Path, number: usize, len: u64) -> Option<Result<Self, GuestError>> {
        (len > 0).then(|| {
            // Uses write-combining if the kernel offers it, which is the case for prefetchable
            // BARs.
            let combined = folder.join(format!("resource{number}_wc"));
            let plain = folder.join(format!("resource{number}"));
            let file = open(&combined).or_else(|_| open(&plain))?;
            MmapOptions::new()
                .len(len as usize)
                .map_raw(&file)
                .map(Self)
                .map_err(GuestError::os(format!("Mapping {} ({len} bytes)", plain.display())))
        })
    }

    /// Maps a BAR of a function that a kernel driver has.
    fn of_node(node: &DirectNode, number: usize, len: u64) -> Option<Result<Self, GuestError>> {
        (len > 0).then(|| {
            let what = format!("Mapping BAR {number} ({len} bytes)");
            node.map(number as u32, len).map(Self).map_err(GuestError::os(what))
        })
    }

    fn window(&self) -> Window<'_> {
        let base = NonNull::new(self.0.as_mut_ptr()).unwrap_or(NonNull::dangling());
        // SAFETY: the mapping lives as long as self and is accessed through windows only. It is
        // never at address 0.
        unsafe { Window::new(base, self.0.len()) }
    }
}

/// Returns the folders of all vGPUs in a folder of PCI functions, in order of their addresses.
pub(crate) fn vgpus(devices: &Path) -> Result<Vec<PathBuf>, GuestError> {
    let list = fs::read_dir(devices)
        .map_err(GuestError::os(format!("Listing {} (is /sys mounted?)", devices.display())))?;
    let mut folders: Vec<PathBuf> = list.filter_map(|entry| Some(entry.ok()?.path())).collect();
    folders.retain(|folder| looks_right(folder));
    folders.sort();
    Ok(folders)
}

/// Locks a vGPU for this process. Fails with the process that has the lock.
fn lock(config: &File, address: &str) -> Result<(), GuestError> {
    match config.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            let user = lock_owner::of(config);
            let user = user.map_or("another process".to_owned(), |user| user.to_string());
            Err(GuestError::Busy { address: address.to_owned(), user })
        }
        Err(TryLockError::Error(error)) => Err(GuestError::os(format!("Locking {address}"))(error)),
    }
}

/// Returns the name of the kernel driver that is bound to a function.
pub(crate) fn driver(folder: &Path) -> Option<String> {
    let link = fs::read_link(folder.join("driver")).ok()?;
    Some(link.file_name()?.to_string_lossy().into_owned())
}

/// Returns whether the function's BARs have the sizes of a vGPU's. Does not access the device.
fn looks_right(folder: &Path) -> bool {
    resource_sizes(folder).is_ok_and(|sizes| sizes[3] == BAR_BYTES && sizes[1] > 0)
        && id(folder, "vendor").zip(id(folder, "device")).is_some_and(|id| IDS.contains(&id))
}

fn id(folder: &Path, which: &str) -> Option<u16> {
    let text = read_text(&folder.join(which), VALUE).ok()?;
    u16::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
}

/// Enables memory decoding, which a function without a driver lacks, and bus mastering.
fn enable(folder: &Path, config: &File) -> Result<(), GuestError> {
    let what = || format!("Enabling {}", folder.display());
    match fs::write(folder.join("enable"), "1") {
        // The bound driver has enabled the function.
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
        result => result.map_err(GuestError::os(what()))?,
    }
    let mut command = [0; 2];
    config.read_exact_at(&mut command, COMMAND).map_err(GuestError::os(what()))?;
    let value = u16::from_le_bytes(command) | MEMORY_AND_MASTER;
    config.write_all_at(&value.to_le_bytes(), COMMAND).map_err(GuestError::os(what()))
}

fn resource_sizes(folder: &Path) -> Result<[u64; 6], GuestError> {
    let path = folder.join("resource");
    let text =
        read_text(&path, VALUE).map_err(GuestError::os(format!("Reading {}", path.display())))?;
    Ok(parse_sizes(&text))
}

/// Parses the lengths of the BARs. Each line of `resource` holds a first address, a last address,
/// and flags.
fn parse_sizes(text: &str) -> [u64; 6] {
    let mut sizes = [0; 6];
    for (size, line) in sizes.iter_mut().zip(text.lines()) {
        let mut numbers = line
            .split_whitespace()
            .map_while(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok());
        if let (Some(first), Some(last)) = (numbers.next(), numbers.next())
            && last > first
        {
            *size = (last - first).saturating_add(1);
        }
    }
    sizes
}

fn open(path: &Path) -> Result<File, GuestError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_SYNC)
        .open(path)
        .map_err(GuestError::os(format!("Opening {} (run as root)", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_bar_lengths() {
        let text = "\
            0x00000000fd000000 0x00000000fdffffff 0x0000000000042208\n\
            0x00000000febf0000 0x00000000febfffff 0x0000000000040200\n\
            0x00000000fec00000 0x00000000fec00fff 0x0000000000040200\n\
            0x00000000febd0000 0x00000000febd3fff 0x0000000000040200\n\
            0x0000000800000000 0x000000083fffffff 0x000000000014220c\n\
            0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        assert_eq!(parse_sizes(text), [16 << 20, 1 << 16, 1 << 12, 16 << 10, 1 << 30, 0]);
        assert_eq!(parse_sizes("garbage\n1 2"), [0, 2, 0, 0, 0, 0]);
    }
}
