//! The host's PCI devices as sysfs shows them: what could be a parent, what drives it now, and how that is changed.
//!
//! A device is given to vfio-pci by name (`driver_override`), so that no other device of the same kind follows it, and
//! given back by clearing that name. Both are the kernel's to refuse; what it would refuse is said before, in words.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use super::address::Address;
use super::family::Family;

/// The driver that hands devices to userspace.
pub const VFIO_PCI: &str = "vfio-pci";

/// Where sysfs shows what.
const DEVICES: &str = "bus/pci/devices";
const DRIVERS: &str = "bus/pci/drivers";
const PROBE: &str = "bus/pci/drivers_probe";

/// Why a device is not what was asked for. Each says what to do.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// Not the address of a PCI device.
    #[error("{0:?} is no PCI address: write it as 0000:3b:00.0")]
    Address(String),
    /// There is no such device.
    #[error("There is no PCI device {0}; `vgpuctl parents` lists those that could be a parent")]
    NoDevice(Address),
    /// The module is not loaded.
    #[error("The kernel has no vfio-pci driver: `modprobe vfio-pci`, then try again")]
    NoDriver,
    /// There is no IOMMU between the device and memory.
    #[error(
        "{0} has no IOMMU group, so its DMA could not be confined: switch the IOMMU on in the firmware, and boot \
         with intel_iommu=on or amd_iommu=on"
    )]
    NoIommu(Address),
    /// The IOMMU cannot tell it from others.
    #[error(
        "{address} shares IOMMU group {group} with {others}: give these to vfio-pci too, or unbind their drivers, \
         before it can be a parent"
    )]
    NotAlone {
        /// The device.
        address: Address,
        /// Its group.
        group: u32,
        /// Others in it that a driver of the kernel uses, with that driver.
        others: String,
    },
    /// Somebody uses it.
    #[error("{address} is in use by its driver {driver}, which does not let it go: {source}")]
    Busy {
        /// The device.
        address: Address,
        /// The driver.
        driver: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A process holds it.
    #[error(
        "{0} is in use by a process: take it from vgpud's parents first; `fuser -v {1}` shows who has it"
    )]
    Held(Address, String),
    /// Bound by somebody else than vfio-pci.
    #[error("{address} is driven by {driver}, not by vfio-pci: there is nothing to give back")]
    NotOurs {
        /// The device.
        address: Address,
        /// The driver, or "no driver".
        driver: String,
    },
    /// The kernel took it and did not bind it.
    #[error("vfio-pci did not take {0}: see `dmesg` for its reason")]
    NotTaken(Address),
    /// Not allowed.
    #[error("No permission to write {}: run this as root", .0.display())]
    Permission(PathBuf),
    /// Anything else.
    #[error("Cannot {what} {}: {source}", path.display())]
    Io {
        /// Read or write.
        what: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// One PCI function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PciDevice {
    /// Where it is.
    pub address: Address,
    /// Who made it.
    pub vendor: u16,
    /// What it is, to its maker.
    pub device: u16,
    /// Class, subclass and programming interface.
    pub class: u32,
    /// What drives it now.
    pub driver: Option<String>,
    /// Which devices the IOMMU can confine it with only.
    pub iommu_group: Option<u32>,
    /// Others in that group, bridges aside.
    pub group_with: Vec<Address>,
    /// Its own file, once vfio-pci has it, where the kernel has one for each device.
    pub character_device: Option<PathBuf>,
}

impl PciDevice {
    /// True for display controllers and processing accelerators, and for what has a table of its own.
    pub fn is_candidate(&self) -> bool {
        matches!(self.class >> 16, 0x03 | 0x12) || self.family().is_some()
    }

    /// Its table, where there is one.
    pub fn family(&self) -> Option<&'static Family> {
        Family::of(self.vendor, self.device)
    }

    /// What its class is called.
    pub fn kind(&self) -> &'static str {
        match self.class >> 8 {
            0x0300 => "VGA display",
            0x0302 => "3D controller",
            0x0301 | 0x0303..=0x03ff => "display",
            0x1200..=0x12ff => "accelerator",
            _ => "device",
        }
    }

    /// True where vfio-pci has it.
    pub fn is_bound(&self) -> bool {
        self.driver.as_deref() == Some(VFIO_PCI)
    }

    /// The files through which a process gets it from vfio-pci, either of them, for people.
    pub fn files(&self) -> String {
        let group = self.iommu_group.map(|group| format!("/dev/vfio/{group}"));
        let own = self.character_device.as_ref().map(|file| file.display().to_string());
        group.into_iter().chain(own).collect::<Vec<_>>().join(" ")
    }
}

/// A host's sysfs.
#[derive(Clone, Debug)]
pub struct Host {
    sys: PathBuf,
    dev: PathBuf,
}

impl Default for Host {
    fn default() -> Self {
        Self { sys: "/sys".into(), dev: "/dev".into() }
    }
}

impl Host {
    /// That of another root, for tests.
    pub fn at(sys: &Path) -> Self {
        Self { sys: sys.to_owned(), dev: sys.join("dev") }
    }

    /// All devices, by address.
    pub fn devices(&self) -> Result<Vec<PciDevice>, HostError> {
        let folder = self.sys.join(DEVICES);
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            // A machine without PCI has none.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(HostError::Io { what: "read", path: folder, source }),
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut addresses: Vec<Address> = names.filter_map(|name| name.parse().ok()).collect();
        addresses.sort();
        // One that is unplugged meanwhile is none.
        Ok(addresses.into_iter().filter_map(|address| self.device(address).ok()).collect())
    }

    /// Those that could be a parent by their class.
    pub fn candidates(&self) -> Result<Vec<PciDevice>, HostError> {
        Ok(self.devices()?.into_iter().filter(PciDevice::is_candidate).collect())
    }

    /// One device.
    pub fn device(&self, address: Address) -> Result<PciDevice, HostError> {
        let folder = self.folder(address);
        let number = |name: &str| {
            let text = fs::read_to_string(folder.join(name)).ok()?;
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
            let other = name.and_then(|name| name.parse::<Address>().ok());
            let other = other.filter(|other| *other != address && !self.is_bridge(*other));
            group_with.extend(other);
        }
        group_with.sort();
        // A kernel without such files has the folder too, but no number of a file in it.
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

    /// Gives a device to vfio-pci. One that has it already keeps it.
    pub fn bind(&self, address: Address) -> Result<PciDevice, HostError> {
        let device = self.device(address)?;
        if device.is_bound() {
            return Ok(device);
        }
        if !self.sys.join(DRIVERS).join(VFIO_PCI).exists() {
            return Err(HostError::NoDriver);
        }
        self.confined(&device)?;
        write(&self.folder(address).join("driver_override"), VFIO_PCI)?;
        let taken = self.release(&device).and_then(|()| self.probe(address));
        match taken {
            Ok(device) if device.is_bound() => Ok(device),
            other => {
                // Whoever had it gets it back, as far as the kernel lets it.
                let _ = write(&self.folder(address).join("driver_override"), "\n");
                let _ = self.probe(address);
                other.and(Err(HostError::NotTaken(address)))
            }
        }
    }

    /// The group with which the IOMMU keeps a device from all other memory, or what is in the way.
    pub fn confined(&self, device: &PciDevice) -> Result<u32, HostError> {
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
        Err(HostError::NotAlone { address, group, others: others.join(", ") })
    }

    /// Gives a device back to whatever driver of the kernel wants it.
    pub fn unbind(&self, address: Address) -> Result<PciDevice, HostError> {
        let device = self.device(address)?;
        if !device.is_bound() {
            let driver = device.driver.unwrap_or_else(|| "no driver".to_owned());
            return Err(HostError::NotOurs { address, driver });
        }
        if self.is_held(&device) {
            // The kernel would wait for whoever has it, for ever.
            return Err(HostError::Held(address, device.files()));
        }
        write(&self.folder(address).join("driver_override"), "\n")?;
        self.release(&device)?;
        self.probe(address)
    }

    /// True where a process has the device. Only one can have the group, by whichever way; a kernel without groups does
    /// not say, but it is in the list of that process' open files.
    fn is_held(&self, device: &PciDevice) -> bool {
        let group = device.iommu_group.map(|group| self.dev.join("vfio").join(group.to_string()));
        let opened =
            group.map(|file| fs::OpenOptions::new().read(true).write(true).open(file).err());
        let busy = |error: io::Error| error.kind() == io::ErrorKind::ResourceBusy;
        opened.flatten().is_some_and(busy)
            || device.character_device.as_deref().is_some_and(is_open)
    }

    /// True where the kernel has iommufd.
    pub fn has_iommufd(&self) -> bool {
        self.dev.join("iommu").exists()
    }

    /// Where sysfs shows a device.
    pub fn folder(&self, address: Address) -> PathBuf {
        self.sys.join(DEVICES).join(address.to_string())
    }

    fn is_bridge(&self, address: Address) -> bool {
        let class = fs::read_to_string(self.folder(address).join("class")).unwrap_or_default();
        class.trim().starts_with("0x06")
    }

    /// Takes a device from its driver.
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

    /// Lets the kernel find a driver for a device.
    fn probe(&self, address: Address) -> Result<PciDevice, HostError> {
        write(&self.sys.join(PROBE), &address.to_string())?;
        self.device(address)
    }
}

/// True where a process that this user may look into has a file open.
fn is_open(file: &Path) -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut files = processes.flat_map(|process| fs::read_dir(process.path().join("fd")));
    files.any(|open| open.flatten().any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == file)))
}

/// Writes one of the kernel's files, in one call.
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

    /// A sysfs with a display adapter, as files. What the kernel does when they are written is tried in the lab, where
    /// there is one (tests/tests/vfio.rs).
    fn sysfs() -> (TempDir, Host) {
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
        let host = Host::at(root.path());
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

    fn gpu() -> Address {
        GPU.parse().unwrap()
    }

    #[test]
    fn candidates_are_displays_and_accelerators_with_what_drives_them() {
        let (root, host) = sysfs();
        group(&root, &[GPU, SOUND]);
        driver(&root, "bochs-drm", Some(GPU));
        let all = host.candidates().unwrap();
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].vendor, all[0].device, all[0].kind()), (0x1234, 0x1111, "VGA display"));
        assert_eq!(all[0].driver.as_deref(), Some("bochs-drm"));
        assert_eq!(
            (all[0].iommu_group, &all[0].group_with[..]),
            (Some(7), &[SOUND.parse().unwrap()][..])
        );
        assert!(Host::at(&root.path().join("nothing")).candidates().unwrap().is_empty());
    }

    #[test]
    fn what_the_kernel_would_refuse_is_said_before_anything_is_changed() {
        let (root, host) = sysfs();
        let refused = |host: &Host| host.bind(gpu()).unwrap_err().to_string();
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
        assert_eq!(name.unwrap(), "\n", "nothing was changed");
    }

    #[test]
    fn a_device_that_a_process_has_is_not_given_back() {
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
    fn a_device_that_vfio_does_not_take_is_given_back() {
        let (root, host) = sysfs();
        group(&root, &[GPU]);
        driver(&root, VFIO_PCI, None);
        driver(&root, "bochs-drm", Some(GPU));
        // Files do not bind anything.
        let text = host.bind(gpu()).unwrap_err().to_string();
        assert!(text.contains("did not take 0000:00:02.0"), "{text}");
        let name = fs::read_to_string(root.path().join(DEVICES).join(GPU).join("driver_override"));
        assert!(!name.unwrap().starts_with(VFIO_PCI));
        let asked = fs::read_to_string(root.path().join(DRIVERS).join("bochs-drm/unbind")).unwrap();
        assert_eq!(asked, GPU);
    }
}
