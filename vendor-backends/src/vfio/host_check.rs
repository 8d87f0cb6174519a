//! Host checks: devices bound to vfio-pci, and the memory that their processes may lock.

use std::fs;

use host_inventory::files::number_after;
use host_inventory::{Finding, HostFiles};

/// Identifier of the findings.
const CHECK: &str = "vfio";

/// Checks each device that is bound to vfio-pci. The kernel locks the guest memory that a device can
/// reach and counts it against the limit of the GPU process.
pub(super) fn check(host: &HostFiles) -> Vec<Finding> {
    let mut names = host.names("sys/bus/pci/drivers/vfio-pci");
    names.retain(|name| name.contains(':') && name.contains('.'));
    let mut findings = Vec::new();
    for name in &names {
        let group = fs::read_link(host.path(&format!("sys/bus/pci/devices/{name}/iommu_group")));
        let group = group.ok().and_then(|link| link.file_name()?.to_str().map(str::to_owned));
        let node = group.map(|group| format!("dev/vfio/{group}"));
        // Prefers iommufd where the kernel has it, as the GPU process does.
        let shown = format!("sys/bus/pci/devices/{name}/vfio-dev");
        let own =
            host.names(&shown).into_iter().find(|own| host.has(&format!("{shown}/{own}/dev")));
        let own = own.filter(|_| host.has("dev/iommu"));
        let (node, interface) = match own {
            Some(own) => (node.map(|_| format!("dev/vfio/devices/{own}")), "by iommufd"),
            None => (node, "by its IOMMU group"),
        };
        findings.push(match node {
            Some(node) if host.has(&node) => {
                Finding::ok(CHECK, format!("{name} is bound to vfio-pci: /{node}, opened {interface}"))
            }
            Some(node) => Finding::problem(
                CHECK,
                format!("{name} is bound to vfio-pci, and /{node} is not there"),
                "modprobe vfio-pci, as root",
            ),
            None => Finding::problem(
                CHECK,
                format!("{name} is bound to vfio-pci and is in no IOMMU group"),
                "switch the IOMMU on, in the firmware and on the kernel's command line (intel_iommu=on)",
            ),
        });
    }
    if !names.is_empty() {
        findings.extend(locked_memory(host));
    }
    findings
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
