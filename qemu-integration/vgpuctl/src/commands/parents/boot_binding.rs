//! Persistent binding of devices to vfio-pci by drop-ins of vgpud's systemd unit.
//!
//! The drop-in wants `vgpu-parent@ADDRESS.service`, which binds the device before vgpud starts,
//! with minimal privileges that vgpud itself does not need. The drop-in also makes the device's
//! mapped BAR files writable for vgpud's service, to which the rest of `/sys` is read-only.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use host_inventory::family::{Access, Family};
use host_inventory::{PciAddress, PciDevice};
use mdev_core::untrusted::{TABLE, read_text};

use crate::failure::Failure;

/// Folders of systemd units.
const UNITS: [&str; 3] =
    ["usr/lib/systemd/system", "usr/local/lib/systemd/system", "etc/systemd/system"];
/// Template of the unit that binds a device.
const TEMPLATE: &str = "vgpu-parent@.service";
/// Folder of drop-ins for vgpud's unit.
const DROP_INS: &str = "etc/systemd/system/vgpud.service.d";
/// Folder that exists if systemd is the init process.
const BOOTED: &str = "run/systemd/system";
/// File with the arguments of vgpud's service.
const SETTINGS: &str = "etc/default/vgpud";

/// Persistent bindings of a host where systemd runs vgpud.
#[derive(Debug)]
pub struct BootBindings {
    root: PathBuf,
    systemctl: PathBuf,
}

impl BootBindings {
    /// Returns the bindings of this host, or `None` without systemd and the unit.
    pub fn find() -> Option<Self> {
        Self::at(Path::new("/"), Path::new("systemctl"))
    }

    fn at(root: &Path, systemctl: &Path) -> Option<Self> {
        let has_unit = UNITS.iter().any(|folder| root.join(folder).join(TEMPLATE).exists());
        let bindings = Self { root: root.to_owned(), systemctl: systemctl.to_owned() };
        (root.join(BOOTED).is_dir() && has_unit).then_some(bindings)
    }

    /// Returns the path of a device's drop-in.
    pub fn file(&self, address: PciAddress) -> PathBuf {
        self.root.join(DROP_INS).join(format!("parent-{address}.conf"))
    }

    /// Returns whether a device has a persistent binding.
    pub fn contains(&self, address: PciAddress) -> bool {
        self.file(address).exists()
    }

    /// Makes the binding of a device persistent and returns the path of the drop-in.
    pub fn add(&self, device: &PciDevice) -> Result<PathBuf, Failure> {
        let file = self.file(device.address);
        let new = file.with_extension("new");
        let written = fs::create_dir_all(file.with_file_name(""))
            .and_then(|()| fs::write(&new, drop_in(device)))
            .and_then(|()| fs::rename(&new, &file));
        written.map_err(|error| {
            let (address, path) = (device.address, file.display());
            Failure::Local(format!(
                "{address} is bound to vfio-pci until the next boot only: cannot write {path}: {error}"
            ))
        })?;
        self.reload()?;
        Ok(file)
    }

    /// Removes the persistent binding of a device. Returns `false` if there was none.
    pub fn remove(&self, address: PciAddress) -> Result<bool, Failure> {
        let file = self.file(address);
        match fs::remove_file(&file) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => {
                let path = file.display();
                return Err(Failure::Local(format!(
                    "{address} will be bound to vfio-pci at the next boot: cannot remove {path}: {error}"
                )));
            }
        }
        // Remove the folder if it is empty.
        let _ = fs::remove_dir(self.root.join(DROP_INS));
        self.reload()?;
        Ok(true)
    }

    /// Returns whether vgpud's settings name a device as a parent.
    pub fn is_parent(&self, address: PciAddress) -> bool {
        let text = read_text(&self.root.join(SETTINGS), TABLE).unwrap_or_default();
        let parent = format!("vfio:{address}");
        text.lines().any(|line| !line.trim_start().starts_with('#') && line.contains(&parent))
    }

    fn reload(&self) -> Result<(), Failure> {
        let mut command = Command::new(&self.systemctl);
        command.arg("daemon-reload").stdin(Stdio::null()).stdout(Stdio::null());
        let reason = match command.stderr(Stdio::null()).status() {
            Ok(status) if status.success() => return Ok(()),
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        Err(Failure::Local(format!(
            "systemd has not loaded the change: `systemctl daemon-reload` failed ({reason}); run it again"
        )))
    }
}

/// Returns the content of a device's drop-in.
fn drop_in(device: &PciDevice) -> String {
    let address = device.address;
    let mut text = format!(
        "# Binds {address} for vgpud at each boot: `vgpuctl parents unbind {address}` removes this file.\n\
         [Unit]\nWants=vgpu-parent@{address}.service\nAfter=vgpu-parent@{address}.service\n"
    );
    let ranges = Family::of(device.vendor, device.device).map_or(&[][..], |family| family.ranges);
    let mapped = ranges.iter().filter(|range| range.access == Access::Mapped);
    let mut bars: Vec<_> = mapped.map(|range| range.bar).collect();
    bars.dedup();
    if !bars.is_empty() {
        text.push_str("\n[Service]\n# Guests map device memory through these files; the rest of /sys is read-only.\n");
    }
    for bar in bars {
        let file = format!("/sys/bus/pci/devices/{address}/resource{bar}");
        let _ = writeln!(text, "ReadWritePaths=-{file} -{file}_wc");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(vendor: u16, device: u16) -> PciDevice {
        PciDevice {
            address: "3b:00.0".parse().unwrap(),
            vendor,
            device,
            class: 0x03_0000,
            driver: Some("vfio-pci".into()),
            iommu_group: Some(1),
            group_with: Vec::new(),
            character_device: None,
        }
    }

    fn host(systemctl: &str) -> (tempfile::TempDir, Option<BootBindings>) {
        let root = tempfile::tempdir().unwrap();
        for folder in [BOOTED, UNITS[0]] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let none = BootBindings::at(root.path(), Path::new(systemctl));
        assert!(none.is_none(), "the unit does not exist");
        fs::write(root.path().join(UNITS[0]).join(TEMPLATE), "").unwrap();
        let bindings = BootBindings::at(root.path(), Path::new(systemctl));
        (root, bindings)
    }

    fn message(result: Result<impl std::fmt::Debug, Failure>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn only_mapped_bars_are_writable() {
        let text = drop_in(&device(0x1234, 0x1111));
        assert!(text.contains("Wants=vgpu-parent@0000:3b:00.0.service\n"), "{text}");
        let files = "ReadWritePaths=-/sys/bus/pci/devices/0000:3b:00.0/resource0 \
                     -/sys/bus/pci/devices/0000:3b:00.0/resource0_wc\n";
        assert!(text.ends_with(files), "{text}");
        assert_eq!(text.matches("/sys/").count(), 2, "{text}");
        // A DMA engine maps nothing.
        let text = drop_in(&device(0x1234, 0x11e8));
        assert!(text.contains("Wants=") && !text.contains("[Service]"), "{text}");
    }

    #[test]
    fn a_binding_persists_until_it_is_removed() {
        let (root, bindings) = host("true");
        let (bindings, device) = (bindings.unwrap(), device(0x1234, 0x1111));
        let address = device.address;
        assert!(!bindings.contains(address) && !bindings.remove(address).unwrap());
        let file = bindings.add(&device).unwrap();
        assert!(file.exists() && bindings.contains(address));
        assert_eq!(bindings.add(&device).unwrap(), file, "adding again succeeds");
        assert!(bindings.remove(address).unwrap());
        assert!(!root.path().join(DROP_INS).exists(), "the folder is removed");
    }

    #[test]
    fn parents_are_read_from_the_settings() {
        let (root, bindings) = host("true");
        let (bindings, address) = (bindings.unwrap(), device(0x1234, 0x1111).address);
        let settings = root.path().join(SETTINGS);
        fs::create_dir_all(settings.with_file_name("")).unwrap();
        let line = "VGPUD_ARGS=\"--parent vfio:0000:3b:00.0\"\n";
        fs::write(&settings, format!("# {line}")).unwrap();
        assert!(!bindings.is_parent(address));
        fs::write(&settings, line).unwrap();
        assert!(bindings.is_parent(address));
    }

    #[test]
    fn errors_have_the_cause() {
        let (root, bindings) = host("false");
        let (bindings, device) = (bindings.unwrap(), device(0x1234, 0x1111));
        let text = message(bindings.add(&device));
        assert!(
            text.contains("systemd has not loaded the change: `systemctl daemon-reload` failed"),
            "{text}"
        );
        assert!(message(bindings.remove(device.address)).contains("run it again"));
        let missing = BootBindings { systemctl: "/nowhere".into(), root: root.path().to_owned() };
        assert!(message(missing.add(&device)).contains("No such file"));
        let folder = root.path().join(DROP_INS);
        fs::remove_dir_all(&folder).unwrap();
        fs::write(&folder, "").unwrap();
        let text = message(bindings.add(&device));
        assert!(
            text.contains("is bound to vfio-pci until the next boot only: cannot write"),
            "{text}"
        );
        fs::remove_file(&folder).unwrap();
        fs::create_dir_all(bindings.file(device.address)).unwrap();
        let text = message(bindings.remove(device.address));
        assert!(
            text.contains("will be bound to vfio-pci at the next boot: cannot remove"),
            "{text}"
        );
    }
}
