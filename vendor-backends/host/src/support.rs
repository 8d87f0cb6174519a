//! What a host has to have for each kind of GPU, and what its devices can be used for.
//!
//! Each backend whose GPUs need something of the host registers itself by one line in [`SUPPORT`].
//! `vgpuctl doctor`, `vgpuctl parents`, AppArmor's rules and the systemd unit work from that list.

use std::fmt;

use crate::{Finding, HostFiles, PciDevice, nvidia, vfio};

/// All kinds of GPUs that need something of a host.
pub static SUPPORT: Registry = Registry::new(&[&nvidia::NvidiaSupport, &vfio::VfioSupport]);

/// A host's side of one kind of GPU.
pub trait Support: fmt::Debug + Sync {
    /// Returns the device nodes that processes open or hand to QEMU.
    fn device_nodes(&self) -> &'static [DeviceNode] {
        &[]
    }

    /// Checks the prerequisites on a host, for `vgpuctl doctor`.
    fn check_host(&self, host: &HostFiles) -> Vec<Finding> {
        let _ = host;
        Vec::new()
    }

    /// Returns what to do with a PCI device to share it, if the backend can.
    fn recommend(&self, device: &PciDevice) -> Option<Recommendation> {
        let _ = device;
        None
    }
}

/// A device node, as the rules that confine processes name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    /// Value of `DeviceAllow=` in vgpud's unit (systemd.resource-control).
    pub device_allow: &'static str,
    /// AppArmor rule for QEMU, if QEMU maps the node.
    pub apparmor: Option<&'static str>,
}

/// What to do with a PCI device to share it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recommendation {
    /// The device can be a parent now, with this `--parent` argument.
    Share {
        /// The argument.
        parent: String,
    },
    /// The device can be a parent, with this `--parent` argument, once vfio-pci drives it.
    BindFirst {
        /// The argument.
        parent: String,
    },
    /// The device can be a parent once a prerequisite is met.
    Prepare {
        /// The prerequisite, in one line.
        step: String,
    },
}

/// A list of kinds of GPUs.
#[derive(Clone, Copy, Debug)]
pub struct Registry(&'static [&'static dyn Support]);

impl Registry {
    /// Makes a list.
    pub const fn new(kinds: &'static [&'static dyn Support]) -> Self {
        Self(kinds)
    }

    fn iter(&self) -> impl Iterator<Item = &'static dyn Support> {
        self.0.iter().copied()
    }

    /// Returns the device nodes of all kinds.
    pub fn device_nodes(&self) -> impl Iterator<Item = DeviceNode> {
        self.iter().flat_map(|backend| backend.device_nodes().iter().copied())
    }

    /// Checks the prerequisites of all kinds.
    pub fn check_host(&self, host: &HostFiles) -> Vec<Finding> {
        self.iter().flat_map(|backend| backend.check_host(host)).collect()
    }

    /// Returns the first recommendation for a PCI device.
    pub fn recommend(&self, device: &PciDevice) -> Option<Recommendation> {
        self.iter().find_map(|backend| backend.recommend(device))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Level;

    #[derive(Debug)]
    struct Dummy;

    impl Support for Dummy {
        fn device_nodes(&self) -> &'static [DeviceNode] {
            &[DeviceNode { device_allow: "/dev/dummy rw", apparmor: Some("/dev/dummy rw,") }]
        }

        fn check_host(&self, host: &HostFiles) -> Vec<Finding> {
            let problem = || Finding::problem("dummy", "/dev/dummy is not there", "modprobe dummy");
            if host.has("dev/dummy") { Vec::new() } else { vec![problem()] }
        }

        fn recommend(&self, device: &PciDevice) -> Option<Recommendation> {
            let parent = format!("dummy:{}", device.address);
            (device.vendor == 0xdddd).then_some(Recommendation::Share { parent })
        }
    }

    #[test]
    fn checks_rules_and_recommendations_come_from_all_kinds() {
        const WITH_DUMMY: Registry = Registry::new(&[&nvidia::NvidiaSupport, &Dummy]);
        let root = tempfile::tempdir().unwrap();
        let host = HostFiles::new(root.path().to_owned());
        let findings = WITH_DUMMY.check_host(&host);
        assert!(findings.iter().any(|one| one.check == "dummy" && one.level == Level::Problem));
        fs::create_dir(root.path().join("dev")).unwrap();
        fs::write(root.path().join("dev/dummy"), "").unwrap();
        assert!(WITH_DUMMY.check_host(&host).iter().all(|one| one.check != "dummy"));
        let nodes: Vec<_> = WITH_DUMMY.device_nodes().map(|node| node.device_allow).collect();
        assert_eq!(nodes, ["char-nvidia* rw", "/dev/dummy rw"]);
        let device = |vendor| PciDevice {
            address: "0000:3b:00.0".parse().unwrap(),
            vendor,
            device: 1,
            class: 0x12_0000,
            driver: None,
            iommu_group: None,
            group_with: Vec::new(),
            character_device: None,
        };
        let parent = "dummy:0000:3b:00.0".to_owned();
        assert_eq!(WITH_DUMMY.recommend(&device(0xdddd)), Some(Recommendation::Share { parent }));
        assert_eq!(WITH_DUMMY.recommend(&device(0x1af4)), None);
    }
}
