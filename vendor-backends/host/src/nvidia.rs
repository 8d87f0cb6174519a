//! NVIDIA GPUs: the driver and its device nodes.

use nvidia_rm::version::Layout;

use crate::support::{DeviceNode, Recommendation, Support};
use crate::{Finding, HostFiles, PciDevice};

/// Identifier of the findings.
const CHECK: &str = "nvidia";

/// PCI vendor of NVIDIA.
const VENDOR: u16 = 0x10de;

/// NVIDIA GPUs beside their own driver.
#[derive(Clone, Copy, Debug)]
pub struct NvidiaSupport;

impl Support for NvidiaSupport {
    fn device_nodes(&self) -> &'static [DeviceNode] {
        // QEMU maps doorbells from the descriptor that it is handed. libvirt's /dev has no such
        // node.
        &[DeviceNode { device_allow: "char-nvidia* rw", apparmor: Some("/dev/nvidia[0-9]* rw,") }]
    }

    fn check_host(&self, host: &HostFiles) -> Vec<Finding> {
        check(host)
    }

    fn recommend(&self, device: &PciDevice) -> Option<Recommendation> {
        if device.vendor != VENDOR {
            return None;
        }
        Some(match device.driver.as_deref() {
            Some("nvidia") => {
                Recommendation::Share { parent: format!("nvidia:{}", device.address) }
            }
            driver => Recommendation::Prepare {
                step: format!(
                    "Tessera shares it beside NVIDIA's own driver, which has to be loaded (now: {})",
                    driver.unwrap_or("none")
                ),
            },
        })
    }
}

/// Returns the addresses of NVIDIA's display and 3D controllers.
fn adapters(host: &HostFiles) -> Vec<String> {
    let is = |name: &str, file: &str, begin: &str| {
        let text = host.read(&format!("sys/bus/pci/devices/{name}/{file}"));
        text.is_some_and(|text| text.starts_with(begin))
    };
    let mut names = host.names("sys/bus/pci/devices");
    names.retain(|name| is(name, "vendor", "0x10de") && is(name, "class", "0x03"));
    names
}

/// Checks NVIDIA's driver, if the host has one of NVIDIA's GPUs.
fn check(host: &HostFiles) -> Vec<Finding> {
    let adapters = adapters(host);
    let Some(version) = host.read("sys/module/nvidia/version") else {
        let missing = |name: &String| {
            let what = format!("The NVIDIA GPU {name} is not driven by NVIDIA's driver");
            let fix = "install NVIDIA's driver (580 was tried), or share the software GPU: --parent soft:soft0";
            Finding::warning(CHECK, what, fix)
        };
        return adapters.iter().map(missing).collect();
    };
    let version = version.trim();
    let mut findings = vec![match Layout::of(version) {
        Ok(_) => Finding::ok(CHECK, format!("NVIDIA's driver {version} is known")),
        Err(unsupported) => {
            let message = unsupported.to_string();
            let (what, fix) = message.split_once(": ").unwrap_or((&message, "install another"));
            Finding::problem(CHECK, what, fix)
        }
    }];
    let mut nodes = vec!["dev/nvidiactl".to_owned()];
    nodes.extend((0..adapters.len()).map(|index| format!("dev/nvidia{index}")));
    for node in nodes {
        if !host.has(&node) {
            let what = format!("/{node} is not there: vgpud cannot reach the GPU");
            findings.push(Finding::problem(
                CHECK,
                what,
                "nvidia-modprobe -c 0 -u, or nvidia-smi, as root",
            ));
        } else if !host.is_open_to_all(&node) {
            let what =
                format!("/{node} is not accessible to every user, and workers run as another user");
            let fix = "put `options nvidia NVreg_DeviceFileMode=0666` into /etc/modprobe.d/nvidia.conf, or run vgpud with --worker-user USER:GROUP of a group that may use it";
            findings.push(Finding::warning(CHECK, what, fix));
        }
    }
    findings
}
