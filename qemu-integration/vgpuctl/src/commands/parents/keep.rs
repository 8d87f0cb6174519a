//! What keeps a device with vfio-pci over reboots, where systemd runs vgpud: a drop-in of its unit.
//!
//! The drop-in wants `vgpu-parent@ADDRESS.service`, which binds the device before vgpud starts, with the few rights that
//! this takes; vgpud itself gets none of them. And it lets the service write the files of the device that its guests'
//! pixels are mapped through, which it could not, since all of `/sys` can only be read there: these, and no other.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use vendor_backends::vfio::family::Access;
use vendor_backends::vfio::host::{Address, PciDevice};

use crate::failure::Failure;

/// Where systemd looks for units of packages and of operators.
const UNITS: [&str; 3] =
    ["usr/lib/systemd/system", "usr/local/lib/systemd/system", "etc/systemd/system"];
/// The unit that binds a device.
const TEMPLATE: &str = "vgpu-parent@.service";
const DROP_INS: &str = "etc/systemd/system/vgpud.service.d";
/// There where systemd is the host's first process.
const BOOTED: &str = "run/systemd/system";
/// What the service is started with.
const SETTINGS: &str = "etc/default/vgpud";

/// A host where systemd runs vgpud.
#[derive(Debug)]
pub struct Keeper {
    root: PathBuf,
    systemctl: PathBuf,
}

impl Keeper {
    /// This host, if it is one.
    pub fn find() -> Option<Self> {
        Self::at(Path::new("/"), Path::new("systemctl"))
    }

    fn at(root: &Path, systemctl: &Path) -> Option<Self> {
        let has_unit = UNITS.iter().any(|folder| root.join(folder).join(TEMPLATE).exists());
        let keeper = Self { root: root.to_owned(), systemctl: systemctl.to_owned() };
        (root.join(BOOTED).is_dir() && has_unit).then_some(keeper)
    }

    /// The drop-in of a device.
    pub fn file(&self, address: Address) -> PathBuf {
        self.root.join(DROP_INS).join(format!("parent-{address}.conf"))
    }

    /// Whether a device is kept.
    pub fn keeps(&self, address: Address) -> bool {
        self.file(address).exists()
    }

    /// Keeps a device; the drop-in.
    pub fn keep(&self, device: &PciDevice) -> Result<PathBuf, Failure> {
        let file = self.file(device.address);
        let new = file.with_extension("new");
        let written = fs::create_dir_all(file.with_file_name(""))
            .and_then(|()| fs::write(&new, drop_in(device)))
            .and_then(|()| fs::rename(&new, &file));
        written.map_err(|error| {
            let (address, path) = (device.address, file.display());
            Failure::Local(format!(
                "{address} is vfio-pci's until the next boot, and no longer: cannot write {path}: {error}"
            ))
        })?;
        self.reload()?;
        Ok(file)
    }

    /// Keeps a device no longer; false where it was not kept.
    pub fn forget(&self, address: Address) -> Result<bool, Failure> {
        let file = self.file(address);
        match fs::remove_file(&file) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => {
                let path = file.display();
                return Err(Failure::Local(format!(
                    "{address} will be vfio-pci's again after the next boot: cannot remove {path}: {error}"
                )));
            }
        }
        // Of no use without a drop-in; one with others in it stays.
        let _ = fs::remove_dir(self.root.join(DROP_INS));
        self.reload()?;
        Ok(true)
    }

    /// Whether vgpud is told to share a device.
    pub fn is_parent(&self, address: Address) -> bool {
        let text = fs::read_to_string(self.root.join(SETTINGS)).unwrap_or_default();
        let parent = format!("vfio:{address}");
        text.lines().any(|line| !line.trim_start().starts_with('#') && line.contains(&parent))
    }

    fn reload(&self) -> Result<(), Failure> {
        let mut command = Command::new(&self.systemctl);
        command.arg("daemon-reload").stdin(Stdio::null()).stdout(Stdio::null());
        let why = match command.stderr(Stdio::null()).status() {
            Ok(status) if status.success() => return Ok(()),
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        Err(Failure::Local(format!(
            "systemd does not know of it yet: `systemctl daemon-reload` failed ({why}); run it again"
        )))
    }
}

/// A drop-in of vgpud's unit.
fn drop_in(device: &PciDevice) -> String {
    let address = device.address;
    let mut text = format!(
        "# {address} is for vgpud, after each boot: `vgpuctl parents unbind {address}` removes this.\n\
         [Unit]\nWants=vgpu-parent@{address}.service\nAfter=vgpu-parent@{address}.service\n"
    );
    let ranges = device.family().map_or(&[][..], |family| family.ranges);
    let mapped = ranges.iter().filter(|range| range.access == Access::Mapped);
    let mut bars: Vec<_> = mapped.map(|range| range.bar).collect();
    bars.dedup();
    if !bars.is_empty() {
        text.push_str("\n[Service]\n# Guests map their memory through these; all else of /sys can only be read.\n");
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

    fn host(systemctl: &str) -> (tempfile::TempDir, Option<Keeper>) {
        let root = tempfile::tempdir().unwrap();
        for folder in [BOOTED, UNITS[0]] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let none = Keeper::at(root.path(), Path::new(systemctl));
        assert!(none.is_none(), "there is no unit");
        fs::write(root.path().join(UNITS[0]).join(TEMPLATE), "").unwrap();
        let keeper = Keeper::at(root.path(), Path::new(systemctl));
        (root, keeper)
    }

    fn words(result: Result<impl std::fmt::Debug, Failure>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn what_guests_map_is_opened_and_nothing_else() {
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
    fn a_device_is_kept_until_it_is_forgotten() {
        let (root, keeper) = host("true");
        let (keeper, device) = (keeper.unwrap(), device(0x1234, 0x1111));
        let address = device.address;
        assert!(!keeper.keeps(address) && !keeper.forget(address).unwrap());
        let file = keeper.keep(&device).unwrap();
        assert!(file.exists() && keeper.keeps(address));
        assert_eq!(keeper.keep(&device).unwrap(), file, "once more is no mistake");
        assert!(keeper.forget(address).unwrap());
        assert!(!root.path().join(DROP_INS).exists(), "nothing is left");
    }

    #[test]
    fn vgpuds_settings_say_whether_it_is_a_parent() {
        let (root, keeper) = host("true");
        let (keeper, address) = (keeper.unwrap(), device(0x1234, 0x1111).address);
        let settings = root.path().join(SETTINGS);
        fs::create_dir_all(settings.with_file_name("")).unwrap();
        let line = "VGPUD_ARGS=\"--parent vfio:0000:3b:00.0\"\n";
        fs::write(&settings, format!("# {line}")).unwrap();
        assert!(!keeper.is_parent(address));
        fs::write(&settings, line).unwrap();
        assert!(keeper.is_parent(address));
    }

    #[test]
    fn what_went_wrong_is_said() {
        let (root, keeper) = host("false");
        let (keeper, device) = (keeper.unwrap(), device(0x1234, 0x1111));
        let text = words(keeper.keep(&device));
        assert!(
            text.contains("systemd does not know of it yet: `systemctl daemon-reload` failed"),
            "{text}"
        );
        assert!(words(keeper.forget(device.address)).contains("run it again"));
        let missing = Keeper { systemctl: "/nowhere".into(), root: root.path().to_owned() };
        assert!(words(missing.keep(&device)).contains("No such file"));
        let folder = root.path().join(DROP_INS);
        fs::remove_dir_all(&folder).unwrap();
        fs::write(&folder, "").unwrap();
        let text = words(keeper.keep(&device));
        assert!(
            text.contains("is vfio-pci's until the next boot, and no longer: cannot write"),
            "{text}"
        );
        fs::remove_file(&folder).unwrap();
        fs::create_dir_all(keeper.file(device.address)).unwrap();
        let text = words(keeper.forget(device.address));
        assert!(
            text.contains("will be vfio-pci's again after the next boot: cannot remove"),
            "{text}"
        );
    }
}
