//! KVM, NVIDIA's driver, devices under vfio-pci, huge pages.

use std::fs;

use vendor_backends::nvidia::version::Layout;

use super::Finding;
use super::daemon::limit_of_vgpud;
use super::host::Host;

const NVIDIA: &str = "nvidia";
const KVM: &str = "kvm";
const PAGES: &str = "pages";
const VFIO: &str = "vfio";

/// All of them.
pub fn check(host: &Host) -> Vec<Finding> {
    let mut findings = vec![kvm(host)];
    findings.extend(nvidia(host));
    findings.extend(vfio(host));
    findings.extend(pages(host));
    findings
}

fn kvm(host: &Host) -> Finding {
    if !host.has("dev/kvm") {
        return Finding::warning(
            KVM,
            "/dev/kvm is not there: VMs are emulated, and slow",
            "switch virtualization on in the firmware (or nested virtualization in the host above), then modprobe kvm_intel or kvm_amd",
        );
    }
    if !host.may_use("dev/kvm") {
        let what = format!("User {} may not use /dev/kvm", host.uid);
        return Finding::warning(KVM, what, "usermod -aG kvm USER, then log in again");
    }
    Finding::ok(KVM, "/dev/kvm can be used")
}

/// PCI devices of NVIDIA's that are display or 3D controllers.
fn adapters(host: &Host) -> Vec<String> {
    let is = |name: &str, file: &str, begin: &str| {
        let text = host.read(&format!("sys/bus/pci/devices/{name}/{file}"));
        text.is_some_and(|text| text.starts_with(begin))
    };
    let mut names = host.names("sys/bus/pci/devices");
    names.retain(|name| is(name, "vendor", "0x10de") && is(name, "class", "0x03"));
    names
}

fn nvidia(host: &Host) -> Vec<Finding> {
    let adapters = adapters(host);
    let Some(version) = host.read("sys/module/nvidia/version") else {
        let missing = |name: &String| {
            let what = format!("The NVIDIA GPU {name} has no driver of NVIDIA's");
            let fix = "install NVIDIA's driver (580 was tried), or share the software GPU: --parent soft:soft0";
            Finding::warning(NVIDIA, what, fix)
        };
        return adapters.iter().map(missing).collect();
    };
    let version = version.trim();
    let mut findings = vec![match Layout::of(version) {
        Ok(_) => Finding::ok(NVIDIA, format!("NVIDIA's driver {version} is known")),
        Err(unknown) => Finding::problem(
            NVIDIA,
            unknown.to_string().replace(": use one of those, or a newer Tessera", ""),
            "install a driver of one of these series, or a newer Tessera",
        ),
    }];
    let mut nodes = vec!["dev/nvidiactl".to_owned()];
    nodes.extend((0..adapters.len()).map(|index| format!("dev/nvidia{index}")));
    for node in nodes {
        if !host.has(&node) {
            let what = format!("/{node} is not there: vgpud cannot reach the GPU");
            findings.push(Finding::problem(
                NVIDIA,
                what,
                "nvidia-modprobe -c 0 -u, or nvidia-smi, as root",
            ));
        } else if !everybody_may(host, &node) {
            let what =
                format!("/{node} is not for everybody, and workers run as a user of their own");
            let fix = "put `options nvidia NVreg_DeviceFileMode=0666` into /etc/modprobe.d/nvidia.conf, or run vgpud with --worker-user USER:GROUP of who may";
            findings.push(Finding::warning(NVIDIA, what, fix));
        }
    }
    findings
}

fn everybody_may(host: &Host, path: &str) -> bool {
    use std::os::unix::fs::MetadataExt;
    host.path(path).metadata().is_ok_and(|about| about.mode() & 6 == 6)
}

/// Devices that vfio-pci has. The kernel locks the memory of each guest that they reach, on its process' account.
fn vfio(host: &Host) -> Vec<Finding> {
    let mut names = host.names("sys/bus/pci/drivers/vfio-pci");
    names.retain(|name| name.contains(':') && name.contains('.'));
    let mut findings = Vec::new();
    for name in &names {
        let group = fs::read_link(host.path(&format!("sys/bus/pci/devices/{name}/iommu_group")));
        let group = group.ok().and_then(|link| link.file_name()?.to_str().map(str::to_owned));
        let node = group.map(|group| format!("dev/vfio/{group}"));
        // The newer way, where this kernel has it: the same choice as an owner's.
        let shown = format!("sys/bus/pci/devices/{name}/vfio-dev");
        let own =
            host.names(&shown).into_iter().find(|own| host.has(&format!("{shown}/{own}/dev")));
        let own = own.filter(|_| host.has("dev/iommu"));
        let (node, way) = match own {
            Some(own) => (node.map(|_| format!("dev/vfio/devices/{own}")), "by iommufd"),
            None => (node, "by its IOMMU group"),
        };
        findings.push(match node {
            Some(node) if host.has(&node) => {
                Finding::ok(VFIO, format!("{name} is vfio-pci's: /{node}, opened {way}"))
            }
            Some(node) => Finding::problem(
                VFIO,
                format!("{name} is vfio-pci's, and /{node} is not there"),
                "modprobe vfio-pci, as root",
            ),
            None => Finding::problem(
                VFIO,
                format!("{name} is vfio-pci's, and is in no IOMMU group"),
                "switch the IOMMU on, in the firmware and on the kernel's command line (intel_iommu=on)",
            ),
        });
    }
    if !names.is_empty() {
        findings.extend(locked_memory(host));
    }
    findings
}

/// Memory that the manager's processes may lock: NVIDIA's driver pins pages on nobody's account, VFIO does not.
fn locked_memory(host: &Host) -> Option<Finding> {
    let hard = limit_of_vgpud(host, "Max locked memory")?;
    let bytes = hard.parse::<u64>().ok();
    let whole = number(&host.read("proc/meminfo")?, "MemTotal:")?.saturating_mul(1024);
    let words = match bytes {
        Some(bytes) if bytes < whole => format!("{} MiB", bytes >> 20),
        _ => return Some(Finding::ok(VFIO, "vgpud's processes may lock all memory")),
    };
    Some(Finding::warning(
        VFIO,
        format!(
            "vgpud's processes may lock {words}, and a device under vfio-pci needs all memory of its guests locked"
        ),
        "put LimitMEMLOCK=infinity into the unit (systemctl edit vgpud), then restart it, and its vGPUs",
    ))
}

/// A number in a file of /proc, by the words before it.
fn number(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Huge pages that were set aside.
fn pages(host: &Host) -> Option<Finding> {
    let text = host.read("proc/meminfo")?;
    let (total, free) = (number(&text, "HugePages_Total:")?, number(&text, "HugePages_Free:")?);
    let size = number(&text, "Hugepagesize:").unwrap_or(2048) / 1024;
    match (total, free) {
        (0, _) => None,
        (_, 0) => Some(Finding::warning(
            PAGES,
            format!(
                "None of {total} huge pages of {size} MiB is free: a VM with hugetlb=on will not start"
            ),
            format!("sysctl vm.nr_hugepages={} (set aside more), or leave hugetlb out", total * 2),
        )),
        _ => {
            Some(Finding::ok(PAGES, format!("{free} of {total} huge pages of {size} MiB are free")))
        }
    }
}
