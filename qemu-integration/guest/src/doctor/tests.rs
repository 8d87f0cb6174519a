//! Tests of the checks on VMs with at most one defect.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use host_inventory::Level;
use mdev_core::abi::queue;
use tempfile::TempDir;

use super::*;

const KERNEL: &str = "6.12.1-amd64";
const DEVICES: &str = "sys/bus/pci/devices";
const ADDRESS: &str = "0000:00:10.0";
const OTHER: &str = "0000:00:01.0";
const DRIVER: &str = "550.163.01";

/// Fake VM without defects. Tests change files of the VM.
struct Fake {
    root: TempDir,
    queue_version: Option<u32>,
}

impl Fake {
    /// A VM with a vGPU for CUDA.
    fn cuda() -> Self {
        let fake = Self::with_function("0x1af4", "0x10f0", "0x120000", "tessera_guest");
        fake.write("sys/module/tessera_guest/version", concat!(env!("CARGO_PKG_VERSION"), "\n"));
        for node in ["dev/nvidiactl", "dev/nvidia0", "dev/nvidia-uvm"] {
            fake.write(node, "");
            fake.mode(node, 0o666);
        }
        let version =
            format!("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  R\n");
        fake.write("proc/driver/nvidia/version", &version);
        fake.library("libcuda", DRIVER);
        fake.library("libnvidia-ml", DRIVER);
        fake
    }

    /// A VM with a vGPU that has a display.
    fn display() -> Self {
        Self::with_function("0x1234", "0x1111", "0x038000", "bochs-drm")
    }

    fn with_function(vendor: &str, device: &str, class: &str, driver: &str) -> Self {
        let fake = Self { root: tempfile::tempdir().unwrap(), queue_version: Some(queue::VERSION) };
        let file = |name: &str| format!("{DEVICES}/{ADDRESS}/{name}");
        for (name, text) in [("vendor", vendor), ("device", device), ("class", class)] {
            fake.write(&file(name), &format!("{text}\n"));
        }
        let sizes = [0xff_ffff_u64, 0xffff, 0xfff, 0x3fff, 0, 0];
        let lines = sizes.map(|last| format!("{:#018x} {last:#018x} {:#018x}\n", 0, 0));
        fake.write(&file("resource"), &lines.concat());
        fake.write("proc/sys/kernel/osrelease", &format!("{KERNEL}\n"));
        fake.write("sys/kernel/security/lockdown", "[none] integrity confidentiality\n");
        fake.bind(driver);
        fake
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn mode(&self, path: &str, mode: u32) {
        let permissions = fs::Permissions::from_mode(mode);
        fs::set_permissions(self.root.path().join(path), permissions).unwrap();
    }

    fn remove(&self, path: &str) {
        let path = self.root.path().join(path);
        if path.symlink_metadata().unwrap().is_dir() {
            fs::remove_dir_all(path).unwrap();
        } else {
            fs::remove_file(path).unwrap();
        }
    }

    fn bind(&self, driver: &str) {
        let link = self.root.path().join(DEVICES).join(ADDRESS).join("driver");
        let _ = fs::remove_file(&link);
        symlink(format!("../../bus/pci/drivers/{driver}"), link).unwrap();
    }

    fn unbind(&self) {
        self.remove(&format!("{DEVICES}/{ADDRESS}/driver"));
    }

    /// Installs a library as packages do: a file with the version in its name, and a link.
    fn library(&self, name: &str, version: &str) {
        let folder = "usr/lib/x86_64-linux-gnu";
        self.write(&format!("{folder}/{name}.so.{version}"), "");
        let link = self.root.path().join(folder).join(format!("{name}.so.1"));
        let _ = fs::remove_file(&link);
        symlink(format!("{name}.so.{version}"), link).unwrap();
    }

    fn findings(&self) -> Vec<Finding> {
        let vm = HostFiles::new(self.root.path().to_owned());
        examine(&vm, &|address| {
            assert_eq!(address, ADDRESS);
            self.queue_version
        })
    }

    /// Checks that all findings but those of `level` with all of these words are fine.
    fn finds(&self, level: Level, parts: &[[&str; 2]]) {
        let findings = self.findings();
        let bad: Vec<_> = findings.iter().filter(|finding| finding.level != Level::Ok).collect();
        assert_eq!(bad.len(), parts.len(), "{findings:?}");
        for [what, fix] in parts {
            let found = bad.iter().any(|finding| {
                finding.level == level
                    && finding.what.contains(what)
                    && finding.fix.as_ref().unwrap().contains(fix)
            });
            assert!(found, "{what}, {fix}: {findings:?}");
        }
    }

    fn problem(&self, what: &str, fix: &str) {
        self.finds(Level::Problem, &[[what, fix]]);
    }

    fn warns(&self, what: &str, fix: &str) {
        self.finds(Level::Warning, &[[what, fix]]);
    }

    /// Checks for a vGPU without a driver, which is one problem, and the reason, which is another.
    fn unbound(&self, what: &str, fix: &str) {
        let none = ["No driver has the vGPU 0000:00:10.0: CUDA", "see the next findings"];
        self.finds(Level::Problem, &[none, [what, fix]]);
    }
}

#[test]
fn vms_without_defects_have_no_problem() {
    Fake::cuda().finds(Level::Ok, &[]);
    Fake::display().finds(Level::Ok, &[]);
    let text = finding::text(&Fake::cuda().findings());
    assert!(text.contains("ok       cuda     Every user may use /dev/nvidia*\n"), "{text}");
}

#[test]
fn a_missing_function_is_a_problem() {
    let fake = Fake::cuda();
    fake.remove(&format!("{DEVICES}/{ADDRESS}"));
    fake.problem("This VM has no vGPU", "vgpuctl libvirt attach");
}

#[test]
fn drivers_are_checked() {
    let fake = Fake::display();
    fake.unbind();
    fake.warns("No driver has the vGPU 0000:00:10.0: its screen", "modprobe bochs");
    fake.bind("vfio-pci");
    fake.problem(
        "has the driver vfio-pci instead of bochs-drm",
        "echo 0000:00:10.0 > /sys/bus/pci/drivers/vfio-pci/unbind",
    );
    let fake = Fake::cuda();
    fake.bind("vfio-pci");
    let wrong = ["has the driver vfio-pci instead of tessera_guest", "drivers_probe"];
    let module = ["is loaded and does not have the vGPU", "dmesg has the reason"];
    fake.finds(Level::Problem, &[wrong, module]);
}

#[test]
fn other_displays_iommus_and_lockdown_are_found() {
    let fake = Fake::display();
    fake.write(&format!("{DEVICES}/{OTHER}/class"), "0x030000\n");
    fake.warns("The adapter 0000:00:01.0 is a display too", "-vga none");
    fake.write(&format!("{DEVICES}/{OTHER}/boot_vga"), "1\n");
    fake.warns("The adapter 0000:00:01.0 is the boot display", "<model type='none'/>");
    let fake = Fake::display();
    fake.write(&format!("{DEVICES}/{ADDRESS}/iommu_group/type"), "DMA-FQ\n");
    fake.problem("The VM's IOMMU is on (DMA-FQ)", "intel_iommu=off");
    let fake = Fake::display();
    fake.write("sys/kernel/security/lockdown", "none [integrity] confidentiality\n");
    fake.warns("vgpu-guest cannot map the vGPU's registers", "turn Secure Boot off");
    // A headless vGPU shares the VM with any display.
    let fake = Fake::cuda();
    fake.write(&format!("{DEVICES}/{OTHER}/class"), "0x030000\n");
    fake.finds(Level::Ok, &[]);
}

#[test]
fn the_reason_why_the_module_is_missing_is_found() {
    let fake = Fake::cuda();
    fake.unbind();
    fake.remove("proc/driver/nvidia");
    fake.unbound("is loaded and does not have the vGPU", "drivers_probe");
    fake.remove("sys/module/tessera_guest");
    fake.unbound("There is no tessera_guest for this kernel (6.12.1-amd64)", "tessera-guest-dkms");
    fake.write("usr/src/tessera-guest-0.1.0/main.c", "");
    fake.unbound("the headers of this kernel", "apt install linux-headers-6.12.1-amd64");
    fake.write(&format!("lib/modules/{KERNEL}/build/Makefile"), "");
    fake.unbound("is not built for this kernel", "dkms autoinstall -k 6.12.1-amd64");
    fake.write(&format!("lib/modules/{KERNEL}/updates/dkms/tessera_guest.ko.xz"), "");
    fake.unbound("tessera_guest is not loaded", "modprobe tessera_guest");
    let secure = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";
    fake.write(secure, "\x06\0\0\0\x01");
    fake.unbound("Secure Boot refuses", "mokutil --import");
}

#[test]
fn versions_of_module_and_device_are_compared() {
    let mut fake = Fake::cuda();
    fake.write("sys/module/tessera_guest/version", "0.0.9\n");
    fake.warns("tessera_guest is version 0.0.9, and vgpu-guest", "of one release");
    fake.unbind();
    fake.queue_version = Some(0);
    fake.unbound("has no control queue", "docs/cuda.md");
    fake.queue_version = Some(9 << 16);
    fake.unbound("control queue is version 9, and this release knows version", "host's release");
    let fake = Fake::cuda();
    fake.write("sys/module/nvidia/version", "580\n");
    fake.problem("NVIDIA's own kernel driver is loaded", "apt purge nvidia-kernel-dkms");
}

#[test]
fn nodes_and_the_front_end_are_checked() {
    let fake = Fake::cuda();
    fake.mode("dev/nvidia0", 0o660);
    fake.warns("Not every user may use /dev/nvidia0", "udevadm trigger");
    fake.remove("dev/nvidia-uvm");
    fake.problem("There is no /dev/nvidia-uvm", "devtmpfs");
    let fake = Fake::cuda();
    fake.write("proc/driver/nvidia/version", "nothing\n");
    fake.problem("the vGPU's front end does not answer", "vgpuctl list");
}

#[test]
fn libraries_need_the_version_of_the_hosts_driver() {
    let fake = Fake::cuda();
    fake.library("libcuda", "580.95.05");
    fake.problem(
        "libcuda.so.1 is version 580.95.05, and the host's driver 550.163.01",
        "install libcuda of version 550.163.01",
    );
    let fake = Fake::cuda();
    fake.library("libnvidia-ml", "550.163");
    fake.problem("libnvidia-ml.so.1 is version 550.163, and", "of version 550.163.01");
    fake.remove("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1");
    fake.warns("There is no libnvidia-ml.so.1", "docs/guest.md");
    fake.library("libnvidia-ml", DRIVER);
    fake.remove("usr/lib/x86_64-linux-gnu/libcuda.so.1");
    fake.problem("There is no libcuda.so.1", "install libcuda of version 550.163.01");
    // A library without a version in its name has the version in its content.
    fake.write("usr/lib/x86_64-linux-gnu/libcuda.so.1", "\x7fELF 550.163.01\0 550.163.010");
    fake.finds(Level::Ok, &[]);
    fake.write("usr/lib/x86_64-linux-gnu/libcuda.so.1", "\x7fELF 550.163.010\0");
    fake.problem("libcuda.so.1 is of another version", "of version 550.163.01");
}
