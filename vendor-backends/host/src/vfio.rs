//! PCI devices by VFIO: binding to vfio-pci, and the memory that their processes may lock.

use crate::family::Family;
use crate::files::number_after;
use crate::support::{DeviceNode, Recommendation, Support};
use crate::{Finding, HostFiles, PciDevice, PciHost};

/// Identifier of the findings.
const CHECK: &str = "vfio";

/// PCI devices under vfio-pci.
#[derive(Clone, Copy, Debug)]
pub struct VfioSupport;

impl Support for VfioSupport {
    fn device_nodes(&self) -> &'static [DeviceNode] {
        const fn node(device_allow: &'static str) -> DeviceNode {
            DeviceNode { device_allow, apparmor: None }
        }
        const NODES: [DeviceNode; 4] = [
            node("char-vfio rw"),
            node("/dev/vfio/vfio rw"),
            node("char-vfio-dev rw"),
            node("/dev/iommu rw"),
        ];
        &NODES
    }

    fn check_host(&self, host: &HostFiles) -> Vec<Finding> {
        check(host)
    }

    fn recommend(&self, device: &PciDevice) -> Option<Recommendation> {
        Family::of(device.vendor, device.device)?;
        let parent = format!("vfio:{}", device.address);
        Some(if device.is_bound() {
            Recommendation::Share { parent }
        } else {
            Recommendation::BindFirst { parent }
        })
    }
}

/// Checks each device that is bound to vfio-pci. The kernel locks the guest memory that a device
/// can reach and counts it against the limit of the GPU process.
fn check(host: &HostFiles) -> Vec<Finding> {
    let pci = PciHost::below(host.root());
    let mut bound = pci.devices().unwrap_or_default();
    bound.retain(PciDevice::is_bound);
    let has_iommufd = pci.has_iommufd();
    let mut findings: Vec<_> =
        bound.iter().map(|device| check_files(host, device, has_iommufd)).collect();
    if !bound.is_empty() {
        findings.extend(locked_memory(host));
    }
    findings
}

/// Checks the file by which a GPU process opens a device: its own where the kernel has iommufd, or
/// else that of its group.
fn check_files(host: &HostFiles, device: &PciDevice, has_iommufd: bool) -> Finding {
    let name = device.address;
    let Some(group) = device.iommu_group else {
        return Finding::problem(
            CHECK,
            format!("{name} is bound to vfio-pci and is in no IOMMU group"),
            "switch the IOMMU on, in the firmware and on the kernel's command line (intel_iommu=on)",
        );
    };
    let own = device.character_device.as_deref().filter(|_| has_iommufd);
    let (node, interface) = match own.and_then(|own| own.strip_prefix(host.root()).ok()) {
        Some(own) => (own.display().to_string(), "by iommufd"),
        None => (format!("dev/vfio/{group}"), "by its IOMMU group"),
    };
    if host.has(&node) {
        let what = format!("{name} is bound to vfio-pci: /{node}, opened {interface}");
        return Finding::ok(CHECK, what);
    }
    Finding::problem(
        CHECK,
        format!("{name} is bound to vfio-pci, and /{node} is not there"),
        "modprobe vfio-pci, as root",
    )
}

/// Checks RLIMIT_MEMLOCK of vgpud's processes. VFIO counts pinned pages against the limit; NVIDIA's
/// driver does not.
fn locked_memory(host: &HostFiles) -> Option<Finding> {
    let hard = host.limit_of_vgpud("Max locked memory")?;
    let bytes = hard.parse::<u64>().ok();
    let whole = number_after(&host.read("proc/meminfo")?, "MemTotal:")?.saturating_mul(1024);
    let limit = match bytes {
        Some(bytes) if bytes < whole => format!("{} MiB", bytes >> 20),
        _ => return Some(Finding::ok(CHECK, "vgpud's processes may lock all memory")),
    };
    Some(Finding::warning(
        CHECK,
        format!(
            "vgpud's processes may lock {limit}, and a device under vfio-pci needs all memory of its guests locked"
        ),
        "put LimitMEMLOCK=infinity into the unit (systemctl edit vgpud), then restart it, and its vGPUs",
    ))
}
