//! The kernel's two interfaces for opening a VFIO device: iommufd with the device's own file, and
//! the older IOMMU group file with a container.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use iommufd_ioctls::{IommuFd, IommufdError};
use vfio_ioctls::{VfioContainer, VfioDevice, VfioError, VfioIommufd};

use super::device::DeviceError;
use super::dma::AddressSpace;
use host_inventory::{PciDevice, PciHost};

/// Interface through which a device is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The IOMMU group's file and a container.
    Group,
    /// The device's own file and iommufd.
    Iommufd,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Group => "its IOMMU group",
            Self::Iommufd => "iommufd",
        })
    }
}

impl Access {
    /// Chooses the interface for a device. Prefers iommufd where the kernel has it, unless the
    /// operator chose.
    pub fn choose(
        host: &PciHost,
        device: &PciDevice,
        iommufd: Option<bool>,
    ) -> Result<Self, DeviceError> {
        let address = device.address;
        match (iommufd, host.has_iommufd(), device.character_device.is_some()) {
            (Some(false), ..) => Ok(Self::Group),
            (_, true, true) => Ok(Self::Iommufd),
            (None, ..) => Ok(Self::Group),
            (Some(true), false, _) => Err(DeviceError::NoIommufd),
            (Some(true), true, false) => Err(DeviceError::NoCharacterDevice(address)),
        }
    }

    /// Opens a device that is bound to vfio-pci.
    pub(super) fn open(
        self,
        device: &PciDevice,
    ) -> Result<(VfioDevice, Arc<AddressSpace>), DeviceError> {
        let failed = |error| device_error(device, error);
        let space = match self {
            Self::Group => {
                AddressSpace::Container(VfioContainer::new(None).map_err(failed)?.into())
            }
            Self::Iommufd => {
                let iommufd = IommuFd::new().map_err(|error| match error {
                    IommufdError::OpenIommufd(error) => iommufd_error(device, error),
                    other => failed(VfioError::NewVfioIommufd(other)),
                })?;
                let space = VfioIommufd::new(iommufd.into(), None, None).map_err(failed)?;
                AddressSpace::Iommufd(space.into())
            }
        };
        let path = Path::new("/sys/bus/pci/devices").join(device.address.to_string());
        let attach = self == Self::Iommufd;
        let opened = VfioDevice::new(&path, space.ops(), attach).map_err(failed)?;
        Ok((opened, Arc::new(space)))
    }
}

/// Converts a failure to open `/dev/iommu`.
fn iommufd_error(device: &PciDevice, source: io::Error) -> DeviceError {
    match source.kind() {
        io::ErrorKind::NotFound => DeviceError::NoIommufd,
        io::ErrorKind::PermissionDenied => DeviceError::Permission("/dev/iommu".to_owned()),
        _ => device_error(device, VfioError::NewVfioIommufd(IommufdError::OpenIommufd(source))),
    }
}

/// Converts the kernel's error to a [`DeviceError`] with a remedy.
fn device_error(device: &PciDevice, source: VfioError) -> DeviceError {
    let address = device.address;
    let group = device.iommu_group.unwrap_or_default();
    let busy = || DeviceError::Busy(address, device.files());
    let denied = |file: String| DeviceError::Permission(file);
    let own_file = || device.character_device.as_deref().unwrap_or(Path::new("/dev/vfio/devices"));
    match &source {
        VfioError::OpenGroup(error, _) | VfioError::OpenDeviceCdev(error)
            if error.raw_os_error() == Some(libc::EBUSY) =>
        {
            busy()
        }
        VfioError::OpenGroup(error, _) if error.kind() == io::ErrorKind::PermissionDenied => {
            denied(format!("/dev/vfio/{group}"))
        }
        VfioError::OpenDeviceCdev(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            denied(own_file().display().to_string())
        }
        VfioError::OpenContainer(error) => match error.kind() {
            io::ErrorKind::NotFound => DeviceError::NoContainer,
            io::ErrorKind::PermissionDenied => denied("/dev/vfio/vfio".to_owned()),
            _ => DeviceError::Vfio { address, source },
        },
        // Another process has the group or the device's file. The kernel reports the latter as
        // EINVAL.
        VfioError::VfioDeviceBindIommufd(error)
            if [libc::EBUSY, libc::EINVAL].contains(&error.errno()) =>
        {
            busy()
        }
        // All devices of a group must belong to one process.
        VfioError::VfioDeviceBindIommufd(error)
            if error.errno() == libc::EPERM && !device.group_with.is_empty() =>
        {
            let others: Vec<_> = device.group_with.iter().map(ToString::to_string).collect();
            DeviceError::Shared { address, group, others: others.join(", ") }
        }
        VfioError::VfioDeviceBindIommufd(error) if error.errno() == libc::EPERM => {
            DeviceError::Interrupts { address, module: "iommufd" }
        }
        VfioError::ContainerSetIOMMU(error) if error.errno() == libc::EPERM => {
            DeviceError::Interrupts { address, module: "vfio_iommu_type1" }
        }
        _ => DeviceError::Vfio { address, source },
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::errno::Error as SysError;

    use super::*;

    fn device(others: &[&str], own: bool) -> PciDevice {
        PciDevice {
            address: "0000:00:03.0".parse().unwrap(),
            vendor: 0x1234,
            device: 0x11e8,
            class: 0xff_0000,
            driver: Some("vfio-pci".to_owned()),
            iommu_group: Some(7),
            group_with: others.iter().map(|other| other.parse().unwrap()).collect(),
            character_device: own.then(|| "/dev/vfio/devices/vfio0".into()),
        }
    }

    #[test]
    fn iommufd_is_preferred_where_the_kernel_has_it() {
        let root = tempfile::tempdir().unwrap();
        let host = PciHost::at(root.path());
        let of = |own, wanted| Access::choose(&host, &device(&[], own), wanted);
        assert_eq!(of(true, None).unwrap(), Access::Group);
        let missing = of(true, Some(true)).unwrap_err().to_string();
        assert!(missing.contains("no /dev/iommu") && missing.contains("modprobe"), "{missing}");
        std::fs::create_dir(root.path().join("dev")).unwrap();
        std::fs::write(root.path().join("dev/iommu"), "").unwrap();
        assert_eq!(of(true, None).unwrap(), Access::Iommufd);
        assert_eq!(of(true, Some(true)).unwrap(), Access::Iommufd);
        assert_eq!(of(true, Some(false)).unwrap(), Access::Group);
        assert_eq!(of(false, None).unwrap(), Access::Group);
        let missing = of(false, Some(true)).unwrap_err().to_string();
        assert!(missing.contains("CONFIG_VFIO_DEVICE_CDEV"), "{missing}");
    }

    /// Errors that the lab's VMs cannot provoke. tests/tests/vfio/access.rs provokes the others.
    #[test]
    fn kernel_errors_become_messages_with_a_remedy() {
        let bind = |errno| VfioError::VfioDeviceBindIommufd(SysError::new(errno));
        let message =
            |others: &[&str], error| device_error(&device(others, true), error).to_string();
        let unsafe_interrupts = message(&[], bind(libc::EPERM));
        assert!(unsafe_interrupts.contains("allow_unsafe_interrupts of iommufd"));
        let older = VfioError::ContainerSetIOMMU(SysError::new(libc::EPERM));
        assert!(message(&[], older).contains("allow_unsafe_interrupts of vfio_iommu_type1"));
        let missing = VfioError::OpenContainer(io::ErrorKind::NotFound.into());
        assert!(message(&[], missing).contains("/dev/vfio/vfio does not exist"));
        let other = message(&[], bind(libc::ENOMEM));
        assert!(other.starts_with("VFIO failed for 0000:00:03.0: "), "{other}");
        assert!(other.ends_with("; see `dmesg`") && other.lines().count() == 1, "{other}");
    }
}
