//! Checks of the Linux module for CUDA programs.

use host_inventory::{Finding, HostFiles};
use mdev_core::abi::queue;
use mdev_core::untrusted::{VALUE, read_whole};

use super::device::Vgpu;
use crate::direct::DRIVER as CUDA_DRIVER;

const CHECK: &str = "module";
/// Variable of UEFI that tells whether Secure Boot is on: four bytes of attributes and the value.
const SECURE_BOOT: &str =
    "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// Checks the module for a vGPU.
pub fn check(
    vm: &HostFiles,
    vgpu: &Vgpu,
    queue_version: &dyn Fn(&str) -> Option<u32>,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    if vm.has("sys/module/nvidia") {
        findings.push(Finding::problem(
            CHECK,
            "NVIDIA's own kernel driver is loaded, which has the same device numbers",
            "remove its packages (Debian: apt purge nvidia-kernel-dkms), keep libcuda, and reboot",
        ));
    }
    findings.push(if vm.has(&format!("sys/module/{CUDA_DRIVER}")) {
        loaded(vm, vgpu, queue_version)
    } else {
        not_loaded(vm)
    });
    findings
}

fn loaded(vm: &HostFiles, vgpu: &Vgpu, queue_version: &dyn Fn(&str) -> Option<u32>) -> Finding {
    let version = vm.read(&format!("sys/module/{CUDA_DRIVER}/version")).unwrap_or_default();
    let version = version.trim();
    let own = env!("CARGO_PKG_VERSION");
    if vgpu.driver.as_deref() == Some(CUDA_DRIVER) {
        if version == own {
            return Finding::ok(CHECK, format!("{CUDA_DRIVER} {version} is loaded"));
        }
        return Finding::warning(
            CHECK,
            format!("{CUDA_DRIVER} is version {version}, and vgpu-guest {own}"),
            "install tessera-guest and tessera-guest-dkms of one release, and reboot",
        );
    }
    let (major, ours) = (|version: u32| version >> 16, queue::VERSION >> 16);
    match queue_version(&vgpu.address) {
        Some(0) => Finding::problem(
            CHECK,
            "The module does not take the vGPU, which has no control queue for CUDA programs",
            "on the host: start the vGPU with a current vgpud and a type that docs/cuda.md names",
        ),
        Some(theirs) if major(theirs) != ours => Finding::problem(
            CHECK,
            format!(
                "The vGPU's control queue is version {}, and this release knows version {ours}",
                major(theirs)
            ),
            "install tessera-guest and tessera-guest-dkms of the host's release, and reboot",
        ),
        _ => Finding::problem(
            CHECK,
            format!("{CUDA_DRIVER} {version} is loaded and does not have the vGPU"),
            format!("echo {} > /sys/bus/pci/drivers_probe; dmesg has the reason", vgpu.address),
        ),
    }
}

/// Finds out why the module is not loaded.
fn not_loaded(vm: &HostFiles) -> Finding {
    let kernel = vm.read("proc/sys/kernel/osrelease").unwrap_or_default();
    let kernel = kernel.trim();
    let modules = format!("lib/modules/{kernel}");
    let built = vm.names(&format!("{modules}/updates/dkms"));
    let secure_boot =
        read_whole(&vm.path(SECURE_BOOT), VALUE).is_ok_and(|value| value.get(4) == Some(&1));
    if built.iter().any(|name| name.starts_with(&format!("{CUDA_DRIVER}.ko"))) {
        return if secure_boot {
            Finding::problem(
                CHECK,
                format!("{CUDA_DRIVER} is not loaded, and Secure Boot refuses unknown signatures"),
                "mokutil --import /var/lib/dkms/mok.pub, reboot and enroll the key; or turn Secure \
                 Boot off",
            )
        } else {
            Finding::problem(
                CHECK,
                format!("{CUDA_DRIVER} is not loaded"),
                format!("modprobe {CUDA_DRIVER}; dmesg has the reason if that fails"),
            )
        };
    }
    let source = vm.names("usr/src").into_iter().find(|name| name.starts_with("tessera-guest-"));
    if source.is_none() {
        Finding::problem(
            CHECK,
            format!("There is no {CUDA_DRIVER} for this kernel ({kernel})"),
            "install the package tessera-guest-dkms, which the host's `cargo lab deb` builds",
        )
    } else if vm.path(&format!("{modules}/build")).exists() {
        Finding::problem(
            CHECK,
            format!("{CUDA_DRIVER} is not built for this kernel ({kernel})"),
            format!(
                "dkms autoinstall -k {kernel}; errors: /var/lib/dkms/tessera-guest/*/build/make.log"
            ),
        )
    } else {
        Finding::problem(
            CHECK,
            format!(
                "{CUDA_DRIVER} is not built: the headers of this kernel ({kernel}) are missing"
            ),
            format!("apt install linux-headers-{kernel}, or linux-headers-amd64 and a reboot"),
        )
    }
}
