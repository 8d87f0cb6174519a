//! The host's PCI devices in sysfs: candidates for parents, their drivers, and binding them to
//! vfio-pci and back.
//!
//! `driver_override` binds one device to vfio-pci without affecting other devices of the same kind.
//! Clearing `driver_override` gives the device back. The kernel may refuse both; this module checks
//! the known reasons first and reports them with a remedy.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use mdev_core::untrusted::{VALUE, read_text};
use serde::Serialize;

use crate::pci_address::PciAddress;

/// The kernel driver that exposes PCI devices to userspace.
pub const VFIO_PCI: &str = "vfio-pci";

/// Paths below the root of sysfs.
const DEVICES: &str = "bus/pci/devices";
const DRIVERS: &str = "bus/pci/drivers";
const PROBE: &str = "bus/pci/drivers_probe";

/// Error of finding or binding a device, with a remedy.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The text is not a PCI address.
    #[error("{0:?} is not a PCI address: write it as 0000:3b:00.0")]
    Address(String),
    /// No such device.
    #[error("There is no PCI device {0}; `vgpuctl parents` lists those that could be a parent")]
    NoDevice(PciAddress),
    /// The vfio-pci module is not loaded.
    #[error("The kernel has no vfio-pci driver: `modprobe vfio-pci`, then try again")]
    NoDriver,
    /// No IOMMU isolates the device.
    #[error(
        "{0} has no IOMMU group, so its DMA cannot be isolated: enable the IOMMU in the firmware, and boot \
         with intel_iommu=on or amd_iommu=on"
    )]
    NoIommu(PciAddress),
    /// The IOMMU cannot isolate the device from other devices that kernel drivers use.
    #[error(
        "{address} shares IOMMU group {group} with {others}: give these to vfio-pci too, or unbind their drivers, \
         before it can be a parent"
    )]
    SharedGroup {
        /// PCI address.
        address: PciAddress,
        /// IOMMU group number.
        group: u32,
        /// Other devices in the group, with their drivers.
        others: String,
    },
    /// The driver refuses to unbind the device.
    #[error("{address} is in use: its driver {driver} refused to unbind it: {source}")]
    Busy {
        /// PCI address.
        address: PciAddress,
        /// Bound driver.
        driver: String,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A process has the device open.
    #[error(
        "{0} is in use by a process: remove it from vgpud's parents first; find the process with `fuser -v {1}`"
    )]
    InUse(PciAddress, String),
    /// The device is not bound to vfio-pci.
    #[error("{address} is driven by {driver}, not by vfio-pci: there is nothing to give back")]
    NotBound {
        /// PCI address.
        address: PciAddress,
        /// Bound driver, or "no driver".
        driver: String,
    },
    /// vfio-pci did not bind the device.
    #[error("vfio-pci did not bind {0}: see `dmesg` for the reason")]
    NotBoundByVfio(PciAddress),
    /// Missing permission.
    #[error("No permission to write {}: run this as root", .0.display())]
    Permission(PathBuf),
    /// Another system call failed.
    #[error("Cannot {what} {}: {source}", path.display())]
    Io {
        /// Operation: read or write.
        what: &'static str,
        /// File.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// A PCI function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PciDevice {
    /// PCI address.
    pub address: PciAddress,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Class, subclass and programming interface.
    pub class: u32,
    /// Bound driver.
    pub driver: Option<String>,
    /// IOMMU group number.
    pub iommu_group: Option<u32>,
    /// Other devices in the group, except bridges.
    pub group_with: Vec<PciAddress>,
    /// The device's own VFIO file, if the device is bound to vfio-pci and the kernel has such
    /// files.
    pub character_device: Option<PathBuf>,
}

impl PciDevice {
    /// Returns true for display controllers and processing accelerators.
    pub fn is_display_or_accelerator(&self) -> bool {
        matches!(self.class >> 16, 0x03 | 0x12)
    }

    /// Returns the name of the device class.
    pub fn kind(&self) -> &'static str {
        match self.class >> 8 {
            0x0300 => "VGA display",
            0x0302 => "3D controller",
            0x0301 | 0x0303..=0x03ff => "display",
            0x1200..=0x12ff => "accelerator",
            _ => "device",
        }
    }

    /// Returns true if the device is bound to vfio-pci.
    pub fn is_bound(&self) -> bool {
        self.driver.as_deref() == Some(VFIO_PCI)
    }

    /// Returns the paths of the VFIO files of the device, separated by spaces.
    pub fn files(&self) -> String {
        let group = self.iommu_group.map(|group| format!("/dev/vfio/{group}"));
        let own = self.character_device.as_ref().map(|file| file.display().to_string());
        group.into_iter().chain(own).collect::<Vec<_>>().join(" ")
    }
}

/// sysfs and /dev of a host.
#[derive(Clone, Debug)]
pub struct PciHost {
    sys: PathBuf,
    dev: PathBuf,
}

impl Default for PciHost {
    fn default() -> Self {
        Self::below(Path::new("/"))
    }
}

impl PciHost {
    /// Uses `sys` and `dev` in a root directory.
    pub fn below(root: &Path) -> Self {
        Self { sys: root.join("sys"), dev: root.join("dev") }
    }

    /// Uses another directory in place of `/sys`, with `dev` in it, for tests.
    pub fn at(sys: &Path) -> Self {
        Self { sys: sys.to_owned(), dev: sys.join("dev") }
    }

    /// Returns all devices in ascending order of address.
    pub fn devices(&self) -> Result<Vec<PciDevice>, HostError> {
        let folder = self.sys.join(DEVICES);
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            // A machine without PCI.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(HostError::Io { what: "read", path: folder, source }),
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut addresses: Vec<PciAddress> = names.filter_map(|name| name.parse().ok()).collect();
        addresses.sort();
        // A device that was unplugged meanwhile is skipped.
        Ok(addresses.into_iter().filter_map(|address| self.device(address).ok()).collect())
    }

    /// Returns one device.
    pub fn device(&self, address: PciAddress) -> Result<PciDevice, HostError> {
        let folder = self.folder(address);
        let number = |name: &str| {
            let text = read_text(&folder.join(name), VALUE).ok()?;
            u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
        };
        let known = (number("vendor"), number("device"), number("class"));
        let (Some(vendor), Some(device), Some(class)) = known else {
            return Err(HostError::NoDevice(address));
        };
        let last = |link: &str| {
            let target = fs::read_link(folder.join(link)).ok()?;
            Some(target.file_name()?.to_string_lossy().into_owned())
        };
        let group = last("iommu_group").and_then(|name| name.parse().ok());
        let mut group_with = Vec::new();
        for entry in fs::read_dir(folder.join("iommu_group/devices")).into_iter().flatten() {
            let name = entry.ok().and_then(|entry| entry.file_name().into_string().ok());
            let other = name.and_then(|name| name.parse::<PciAddress>().ok());
            let other = other.filter(|other| *other != address && !self.is_bridge(*other));
            group_with.extend(other);
        }
        group_with.sort();
        // A kernel without such files has the folder too, but without a `dev` file in it.
        let mut own = fs::read_dir(folder.join("vfio-dev")).into_iter().flatten().flatten();
        let own = own.find(|entry| entry.path().join("dev").exists());
        let character_device =
            own.map(|entry| self.dev.join("vfio/devices").join(entry.file_name()));
        Ok(PciDevice {
            address,
            vendor: vendor as u16,
            device: device as u16,
            class,
            driver: last("driver"),
            iommu_group: group,
            group_with,
            character_device,
        })
    }

    /// Binds a device to vfio-pci. A device that is bound already stays bound.
    pub fn bind(&self, address: PciAddress) -> Result<PciDevice, HostError> {
        let device = self.device(address)?;
        if device.is_bound() {
            return Ok(device);
        }
        if !self.sys.join(DRIVERS).join(VFIO_PCI).exists() {
            return Err(HostError::NoDriver);
        }
        self.isolated_group(&device)?;
        write(&self.folder(address).join("driver_override"), VFIO_PCI)?;
        let taken = self.release(&device).and_then(|()| self.probe(address));
        match taken {
            Ok(device) if device.is_bound() => Ok(device),
            other => {
                // Give the device back to its previous driver as far as the kernel allows.
                let _ = write(&self.folder(address).join("driver_override"), "\n");
                let _ = self.probe(address);
                other.and(Err(HostError::NotBoundByVfio(address)))
            }
        }
    }

    /// Returns the IOMMU group that isolates the device, or the reason why none does.
    pub fn isolated_group(&self, device: &PciDevice) -> Result<u32, HostError> {
        let address = device.address;
        let Some(group) = device.iommu_group else { return Err(HostError::NoIommu(address)) };
        let others: Vec<String> = device
            .group_with
            .iter()
            .filter_map(|other| {
                let driver =
                    self.device(*other).ok()?.driver.filter(|driver| driver != VFIO_PCI)?;
                Some(format!("{other} ({driver})"))
            })
            .collect();
        if others.is_empty() {
            return Ok(group);
        }
        Err(HostError::SharedGroup { address, group, others: others.join(", ") })
    }

    /// Gives a device back to its kernel driver.
    pub fn unbind(&self, address: PciAddress) -> Result<PciDevice, HostError> {
        let device = self.device(address)?;
        if !device.is_bound() {
            let driver = device.driver.unwrap_or_else(|| "no driver".to_owned());
            return Err(HostError::NotBound { address, driver });
        }
        if self.has_user(&device) {
            // The kernel would wait for that process without limit.
            return Err(HostError::InUse(address, device.files()));
        }
        write(&self.folder(address).join("driver_override"), "\n")?;
        self.release(&device)?;
        self.probe(address)
    }

    /// Returns true if a process has the device open. Opening the group file fails with EBUSY then.
    /// A kernel without group files does not report this, so the open files of all processes are
    /// searched too.
    fn has_user(&self, device: &PciDevice) -> bool {
        let group = device.iommu_group.map(|group| self.dev.join("vfio").join(group.to_string()));
        let opened =
            group.map(|file| fs::OpenOptions::new().read(true).write(true).open(file).err());
        let busy = |error: io::Error| error.kind() == io::ErrorKind::ResourceBusy;
        opened.flatten().is_some_and(busy)
            || device.character_device.as_deref().is_some_and(is_open)
    }

    /// Returns true if the kernel has iommufd.
    pub fn has_iommufd(&self) -> bool {
        self.dev.join("iommu").exists()
    }

    /// Returns the device's folder in sysfs.
    pub fn folder(&self, address: PciAddress) -> PathBuf {
        self.sys.join(DEVICES).join(address.to_string())
    }

    fn is_bridge(&self, address: PciAddress) -> bool {
        let class = read_text(&self.folder(address).join("class"), VALUE).unwrap_or_default();
        class.trim().starts_with("0x06")
    }

    /// Unbinds a device from its driver.
    fn release(&self, device: &PciDevice) -> Result<(), HostError> {
        let Some(driver) = &device.driver else { return Ok(()) };
        let path = self.sys.join(DRIVERS).join(driver).join("unbind");
        let address = device.address;
        write(&path, &address.to_string()).map_err(|error| match error {
            HostError::Io { source, .. } => {
                HostError::Busy { address, driver: driver.clone(), source }
            }
            other => other,
        })
    }

    /// Makes the kernel find a driver for a device.
    fn probe(&self, address: PciAddress) -> Result<PciDevice, HostError> {
        write(&self.sys.join(PROBE), &address.to_string())?;
        self.device(address)
    }
}

/// Returns true if a process that this user may inspect has the file open.
fn is_open(file: &Path) -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut files = processes.flat_map(|process| fs::read_dir(process.path().join("fd")));
    files.any(|open| open.flatten().any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == file)))
}

/// Writes a sysfs file in one call.
fn write(path: &Path, text: &str) -> Result<(), HostError> {
    let open = fs::OpenOptions::new().write(true).open(path);
    let written = open.and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes()));
    written.map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => HostError::Permission(path.to_owned()),
        _ => HostError::Io { what: "write", path: path.to_owned(), source },
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    const GPU: &str = "0000:00:02.0";
    const SOUND: &str = "0000:00:02.1";

    /// A file tree that looks like a sysfs with a display adapter. tests/tests/vfio/access.rs tests
    /// a real kernel's reactions to writes.
    fn sysfs() -> (TempDir, PciHost) {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for (address, class) in
            [(GPU, "0x030000"), (SOUND, "0x040300"), ("0000:00:1f.0", "0x060100")]
        {
            let folder = at(DEVICES).join(address);
            fs::create_dir_all(&folder).unwrap();
            for (name, text) in [
                ("vendor", "0x1234"),
                ("device", if address == GPU { "0x1111" } else { "0x293e" }),
                ("class", class),
                ("driver_override", ""),
            ] {
                fs::write(folder.join(name), format!("{text}\n")).unwrap();
            }
        }
        fs::create_dir_all(at(DRIVERS)).unwrap();
        fs::write(at(PROBE), "").unwrap();
        let host = PciHost::at(root.path());
        (root, host)
    }

    fn group(root: &TempDir, members: &[&str]) {
        let group = root.path().join("kernel/iommu_groups/7");
        fs::create_dir_all(group.join("devices")).unwrap();
        for member in members {
            fs::write(group.join("devices").join(member), "").unwrap();
            symlink(&group, root.path().join(DEVICES).join(member).join("iommu_group")).unwrap();
        }
    }

    fn driver(root: &TempDir, name: &str, of: Option<&str>) {
        let folder = root.path().join(DRIVERS).join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("unbind"), "").unwrap();
        if let Some(of) = of {
            symlink(&folder, root.path().join(DEVICES).join(of).join("driver")).unwrap();
        }
    }

    fn gpu() -> PciAddress {
        GPU.parse().unwrap()
    }

    #[test]
    fn candidates_are_displays_and_accelerators_with_their_drivers() {
        let (root, host) = sysfs();
        group(&root, &[GPU, SOUND]);
        driver(&root, "bochs-drm", Some(GPU));
        let mut all = host.devices().unwrap();
        all.retain(PciDevice::is_display_or_accelerator);
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].vendor, all[0].device, all[0].kind()), (0x1234, 0x1111, "VGA display"));
        assert_eq!(all[0].driver.as_deref(), Some("bochs-drm"));
        assert_eq!(
            (all[0].iommu_group, &all[0].group_with[..]),
            (Some(7), &[SOUND.parse().unwrap()][..])
        );
        assert!(PciHost::at(&root.path().join("nothing")).devices().unwrap().is_empty());
    }

    #[test]
    fn bind_reports_known_obstacles_before_changing_sysfs() {
        let (root, host) = sysfs();
        let refused = |host: &PciHost| host.bind(gpu()).unwrap_err().to_string();
        assert!(refused(&host).contains("modprobe vfio-pci"));
        driver(&root, VFIO_PCI, None);
        assert!(refused(&host).contains("no IOMMU group"), "{}", refused(&host));
        group(&root, &[GPU, SOUND, "0000:00:1f.0"]);
        driver(&root, "snd_hda_intel", Some(SOUND));
        let text = refused(&host);
        assert!(text.contains("group 7 with 0000:00:02.1 (snd_hda_intel)"), "{text}");
        let none = host.bind("0000:00:09.0".parse().unwrap()).unwrap_err().to_string();
        assert!(none.contains("no PCI device 0000:00:09.0"), "{none}");
        let back = host.unbind(gpu()).unwrap_err().to_string();
        assert!(back.contains("nothing to give back"), "{back}");
        let name = fs::read_to_string(root.path().join(DEVICES).join(GPU).join("driver_override"));
        assert_eq!(name.unwrap(), "\n", "sysfs is unchanged");
    }

    #[test]
    fn unbind_refuses_a_device_that_a_process_has_open() {
        let (root, host) = sysfs();
        group(&root, &[GPU]);
        driver(&root, VFIO_PCI, Some(GPU));
        let own = root.path().join("dev/vfio/devices");
        fs::create_dir_all(&own).unwrap();
        let shown = root.path().join(DEVICES).join(GPU).join("vfio-dev/vfio0");
        fs::create_dir_all(&shown).unwrap();
        assert_eq!(host.device(gpu()).unwrap().character_device, None);
        fs::write(shown.join("dev"), "510:0\n").unwrap();
        let file = fs::File::create(own.join("vfio0")).unwrap();
        let device = host.device(gpu()).unwrap();
        assert!(device.files().starts_with("/dev/vfio/7 "), "{}", device.files());
        assert_eq!(device.character_device.as_deref(), Some(own.join("vfio0").as_path()));
        let text = host.unbind(gpu()).unwrap_err().to_string();
        assert!(text.contains("`fuser -v /dev/vfio/7 "), "{text}");
        drop(file);
        host.unbind(gpu()).unwrap();
    }

    #[test]
    fn a_failed_bind_gives_the_device_back_to_its_driver() {
        let (root, host) = sysfs();
        group(&root, &[GPU]);
        driver(&root, VFIO_PCI, None);
        driver(&root, "bochs-drm", Some(GPU));
        // Writing to a plain file binds nothing.
        let text = host.bind(gpu()).unwrap_err().to_string();
        assert!(text.contains("did not bind 0000:00:02.0"), "{text}");
        let name = fs::read_to_string(root.path().join(DEVICES).join(GPU).join("driver_override"));
        assert!(!name.unwrap().starts_with(VFIO_PCI));
        let asked = fs::read_to_string(root.path().join(DRIVERS).join("bochs-drm/unbind")).unwrap();
        assert_eq!(asked, GPU);
    }
}
