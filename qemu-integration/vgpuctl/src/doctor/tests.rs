//! Hosts that are right, and hosts that are wrong in one way each.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use tempfile::TempDir;
use vfio_user_server::api::model::{ErrorCode, ErrorDetail, Version};

use super::host::Host;
use super::{Finding, Level, examine, text};
use crate::failure::Failure;

const DEVICES: &str = "name \"vfio-user-pci\", bus PCI";
const SHARED: &str = "/usr/bin/qemu-system-x86_64\0-name\0guest=web,debug-threads=on\0-object\0\
    {\"qom-type\":\"memory-backend-memfd\",\"id\":\"pc.ram\",\"share\":true}\0-cpu\0Skylake-Client\0\
    -device\0pcie-root-port,id=r\0-device\0{\"driver\":\"vfio-user-pci\"}\0";

/// A host on which all is well; `change` it.
struct Fake {
    root: TempDir,
    uid: u32,
    gids: Vec<u32>,
    answer: Result<Version, Failure>,
}

impl Fake {
    fn new() -> Self {
        let fake = Self {
            root: tempfile::tempdir().unwrap(),
            uid: 0,
            gids: vec![0],
            answer: Ok(Version {
                version: env!("CARGO_PKG_VERSION").into(),
                api: "v1".into(),
                pid: 50,
                run_dir: "/run/vgpud".into(),
                config_dir: "/var/lib/vgpud".into(),
            }),
        };
        fake.qemu("11.1.3", DEVICES);
        fake.write("dev/kvm", "");
        fake.write("proc/cpuinfo", "vendor_id\t: GenuineIntel\n");
        fake.write("proc/meminfo", "HugePages_Total:       0\nHugePages_Free:        0\n");
        fake.write("proc/60/cmdline", SHARED);
        fake.write("proc/50/limits", "Max open files            1024      1048576      files\n");
        fake.write("run/vgpud/lock", "50\n");
        fake.write("etc/passwd", "root:x:0:0::/root:/bin/sh\n");
        fake.write("etc/group", "root:x:0:\nvgpu:x:990:\nvgpu-admin:x:991:\n");
        fake.write("etc/libvirt/qemu.conf", "");
        fake.write("etc/libvirt/hooks/qemu.d/tessera", "");
        fake.write("sys/bus/pci/devices/0000:3b:00.0/vendor", "0x10de\n");
        fake.write("sys/bus/pci/devices/0000:3b:00.0/class", "0x030200\n");
        fake.write("sys/module/nvidia/version", "580.95.05\n");
        for node in ["dev/nvidiactl", "dev/nvidia0"] {
            fake.write(node, "");
            fake.mode(node, 0o666);
        }
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
        fs::remove_file(self.root.path().join(path)).unwrap();
    }

    /// A QEMU that says what it is.
    fn qemu(&self, version: &str, devices: &str) {
        let path = "usr/bin/qemu-system-x86_64";
        let script = format!(
            "#!/bin/sh\ncase $1 in\n--version) echo 'QEMU emulator version {version} (Debian)';;\n\
             *) echo '{devices}';;\nesac\n"
        );
        // A program that is being written cannot be run; a new one has not been.
        let _ = fs::remove_file(self.root.path().join(path));
        self.write(path, &script);
        self.mode(path, 0o755);
    }

    fn findings(self) -> Vec<Finding> {
        let mut host = Host::new(PathBuf::from(self.root.path()));
        (host.uid, host.gids) = (self.uid, self.gids.into_iter().collect());
        examine(&host, self.answer)
    }
}

/// What is not well after a change.
fn wrong(change: impl FnOnce(&mut Fake)) -> Vec<Finding> {
    let mut fake = Fake::new();
    change(&mut fake);
    let mut findings = fake.findings();
    findings.retain(|finding| finding.level != Level::Ok);
    findings
}

#[track_caller]
fn one(change: impl FnOnce(&mut Fake), level: Level, check: &str, what: &str, fix: &str) {
    let findings = wrong(change);
    let [finding] = findings.as_slice() else { panic!("one finding: {findings:?}") };
    assert_eq!((finding.level, finding.check), (level, check), "{finding:?}");
    assert!(finding.what.contains(what), "{finding:?}");
    assert!(finding.fix.as_ref().is_some_and(|text| text.contains(fix)), "{finding:?}");
    let shown = text(&findings);
    assert_eq!(shown.lines().count(), 2, "a line, and a line for the fix: {shown}");
}

#[test]
fn a_host_on_which_all_is_well_has_nothing_to_mend() {
    assert_eq!(wrong(|_| {}), []);
    let findings = Fake::new().findings();
    let checks: Vec<_> = findings.iter().map(|finding| finding.check).collect();
    for check in ["qemu", "kvm", "nvidia", "vm", "vgpud", "libvirt"] {
        assert!(checks.contains(&check), "{check} in {checks:?}");
    }
    assert!(findings.iter().all(|finding| finding.fix.is_none()));
}

#[test]
fn qemu_is_there_new_enough_and_has_the_device() {
    let problem = Level::Problem;
    one(|h| h.remove("usr/bin/qemu-system-x86_64"), problem, "qemu", "no QEMU", "10.1 or newer");
    one(
        |h| h.qemu("10.0.9", DEVICES),
        problem,
        "qemu",
        "is older than 10.1 and",
        "trixie-backports",
    );
    one(|h| h.qemu("11.1.3", "name \"e1000\""), problem, "qemu", "without vfio-user-pci", "help");
    one(|h| h.qemu("none", DEVICES), problem, "qemu", "does not run", "install QEMU");
}

#[test]
fn kvm_is_there_and_usable() {
    one(|h| h.remove("dev/kvm"), Level::Warning, "kvm", "emulated", "modprobe");
    let outsider = |h: &mut Fake| {
        (h.uid, h.gids) = (4_000_000, vec![990, 991]);
        h.mode("dev/kvm", 0o660);
    };
    one(outsider, Level::Warning, "kvm", "may not use /dev/kvm", "usermod -aG kvm");
}

#[test]
fn nvidias_driver_is_there_known_and_open_to_workers() {
    let none = |h: &mut Fake| h.remove("sys/module/nvidia/version");
    one(none, Level::Warning, "nvidia", "has no driver of NVIDIA's", "install NVIDIA's driver");
    let old = |h: &mut Fake| h.write("sys/module/nvidia/version", "470.1\n");
    one(old, Level::Problem, "nvidia", "470.1", "newer Tessera");
    let no_node = |h: &mut Fake| h.remove("dev/nvidia0");
    one(no_node, Level::Problem, "nvidia", "/dev/nvidia0 is not there: vgpud", "nvidia-modprobe");
    let closed = |h: &mut Fake| h.mode("dev/nvidiactl", 0o660);
    one(closed, Level::Warning, "nvidia", "not for everybody", "NVreg_DeviceFileMode=0666");
}

#[test]
fn huge_pages_that_are_all_taken_are_told() {
    let full = |h: &mut Fake| {
        let text = "HugePages_Total:     512\nHugePages_Free:        0\nHugepagesize:  2048 kB\n";
        h.write("proc/meminfo", text);
    };
    one(full, Level::Warning, "pages", "None of 512 huge pages of 2 MiB", "vm.nr_hugepages=1024");
}

#[test]
fn memory_of_vms_that_is_not_shared_is_told() {
    for backend in [
        "memory-backend-memfd,id=m,share=off",
        "memory-backend-file,id=m,mem-path=/x",
        "memory-backend-ram,id=m,size=1G",
        "{\"qom-type\":\"memory-backend-file\",\"share\":false}",
        "rng-random,id=r",
    ] {
        let line = format!("qemu-system-x86_64\0-object\0{backend}\0-device\0vfio-user-pci\0");
        let change = |h: &mut Fake| h.write("proc/60/cmdline", &line);
        one(change, Level::Problem, "vm", "in process 60 does not share", "share=on");
    }
    // QEMU shares memory of this kind unless it is told not to; and VMs without a vGPU are nobody's business.
    let fine = "qemu-system-x86_64\0-object\0memory-backend-memfd,id=m\0-device\0vfio-user-pci\0";
    assert_eq!(wrong(|h| h.write("proc/60/cmdline", fine)), []);
    assert_eq!(wrong(|h| h.write("proc/60/cmdline", "qemu-system-x86_64\0-m\x001G\0")), []);
}

#[test]
fn vms_that_cannot_take_a_vgpu_later_are_told() {
    let amd = SHARED.replace("Skylake-Client", "EPYC-Milan");
    let change = |h: &mut Fake| h.write("proc/60/cmdline", &amd);
    one(change, Level::Warning, "vm", "VM web (process 60) has an AMD CPU", "from the start");
    let host = SHARED.replace("Skylake-Client", "host");
    let change = |h: &mut Fake| {
        h.write("proc/60/cmdline", &host);
        h.write("proc/cpuinfo", "vendor_id\t: AuthenticAMD\n");
    };
    one(change, Level::Warning, "vm", "AMD CPU", "UEFI");
    let uefi = amd.replace("-cpu", "-drive\0if=pflash,file=OVMF_CODE.fd\0-cpu");
    assert_eq!(wrong(|h| h.write("proc/60/cmdline", &uefi)), []);
}

#[test]
fn a_daemon_that_cannot_be_asked_is_told_with_the_reason() {
    let socket = PathBuf::from("/run/vgpud/control.sock");
    let gone = Failure::Unreachable { socket: socket.clone(), reason: "No such file".into() };
    one(|h| h.answer = Err(gone), Level::Problem, "vgpud", "No such file", "systemctl enable");
    let not_for_us = Failure::NotForUs { socket, user: 1000 };
    one(|h| h.answer = Err(not_for_us), Level::Problem, "vgpud", "may not use", "USER to look,");
    let odd = Failure::Refused(ErrorDetail::new(ErrorCode::Internal, "odd"));
    one(
        |h| h.answer = Err(odd),
        Level::Problem,
        "vgpud",
        "vgpud cannot be asked: odd",
        "see its log: journalctl -u",
    );
    let older = |h: &mut Fake| {
        if let Ok(version) = &mut h.answer {
            version.version = "0.0.1".into();
        }
    };
    one(older, Level::Warning, "vgpud", "0.0.1", "systemctl restart vgpud");
    let few = "Max open files            1024      4096      files\n";
    let change = |h: &mut Fake| h.write("proc/50/limits", few);
    one(
        change,
        Level::Warning,
        "vgpud",
        "vgpud's processes may have 4096 files open: too few for guests with much memory",
        "LimitNOFILE",
    );
}

#[test]
fn groups_are_there_and_the_user_is_in_them() {
    let none = |h: &mut Fake| h.write("etc/group", "vgpu-admin:x:991:\n");
    one(none, Level::Warning, "groups", "no group vgpu:", "groupadd --system vgpu");
    let outsider = |h: &mut Fake| {
        (h.uid, h.gids) = (4_000_000, vec![5]);
        h.mode("dev/kvm", 0o666);
    };
    one(outsider, Level::Problem, "groups", "not in group vgpu", "usermod -aG vgpu");
}

#[test]
fn libvirt_without_the_hook_and_folders_of_the_dead_are_told() {
    let hook = |h: &mut Fake| h.remove("etc/libvirt/hooks/qemu.d/tessera");
    one(hook, Level::Warning, "libvirt", "without our hook", "vgpuctl libvirt install-hook");
    let left = |h: &mut Fake| {
        h.write("run/vgpud/vgpus/a/run.json", "{\"process\":{\"pid\":999}}");
        h.write("run/vgpud/parents/soft0/run.json", "{\"process\":{\"pid\":50}}");
        h.answer = Err(Failure::Local("gone".into()));
    };
    let findings = wrong(left);
    let stale: Vec<_> = findings.iter().filter(|finding| finding.check == "stale").collect();
    assert_eq!(stale.len(), 1, "{findings:?}");
    assert!(stale[0].what.contains("/run/vgpud/vgpus/a is left"), "{stale:?}");
}

/// The host's GPU is a device under vfio-pci, in IOMMU group 7.
fn with_vfio(h: &mut Fake, locked: &str) {
    h.write("sys/bus/pci/drivers/vfio-pci/0000:01:00.0/x", "");
    h.write("sys/bus/pci/drivers/vfio-pci/new_id", "");
    let device = h.root.path().join("sys/bus/pci/devices/0000:01:00.0");
    fs::create_dir_all(&device).unwrap();
    std::os::unix::fs::symlink("../../../kernel/iommu_groups/7", device.join("iommu_group"))
        .unwrap();
    h.write("dev/vfio/7", "");
    h.write(
        "proc/meminfo",
        "MemTotal:       16000000 kB\nHugePages_Total:       0\nHugePages_Free:        0\n",
    );
    let limits = format!(
        "Max open files            1024      1048576      files\n\
         Max locked memory         {locked}    {locked}    bytes\n"
    );
    h.write("proc/50/limits", &limits);
}

#[test]
fn devices_under_vfio_pci_are_reachable_and_may_lock_memory() {
    assert_eq!(wrong(|h| with_vfio(h, "unlimited")), []);
    let few = |h: &mut Fake| with_vfio(h, "8388608");
    one(few, Level::Warning, "vfio", "may lock 8 MiB", "LimitMEMLOCK=infinity");
    let no_node = |h: &mut Fake| {
        with_vfio(h, "unlimited");
        h.remove("dev/vfio/7");
    };
    one(no_node, Level::Problem, "vfio", "/dev/vfio/7 is not there", "modprobe vfio-pci");
    // Where the kernel has iommufd, the device's own file is what counts.
    let own = |h: &mut Fake| {
        with_vfio(h, "unlimited");
        h.write("sys/bus/pci/devices/0000:01:00.0/vfio-dev/vfio3/dev", "");
        h.write("dev/iommu", "");
    };
    one(own, Level::Problem, "vfio", "/dev/vfio/devices/vfio3 is not there", "modprobe vfio-pci");
    let said = |h: &mut Fake| {
        own(h);
        h.write("dev/vfio/devices/vfio3", "");
    };
    assert_eq!(wrong(said), []);
    let no_group = |h: &mut Fake| {
        with_vfio(h, "unlimited");
        h.remove("sys/bus/pci/devices/0000:01:00.0/iommu_group");
    };
    one(no_group, Level::Problem, "vfio", "in no IOMMU group", "intel_iommu=on");
    // Without such a device nobody's memory is locked on vgpud's account.
    let limits = "Max open files 1 1048576 files\nMax locked memory 8388608 8388608 bytes\n";
    assert_eq!(wrong(|h| h.write("proc/50/limits", limits)), []);
}

#[test]
fn apparmor_without_the_rule_is_told() {
    let confined = |h: &mut Fake, rules: &str| {
        h.write("sys/module/apparmor/parameters/enabled", "Y\n");
        h.write("etc/apparmor.d/abstractions/libvirt-qemu", "");
        h.write("etc/apparmor.d/local/abstractions/libvirt-qemu", rules);
    };
    let commented = "# /run/vgpud/vgpus/*/vfio.sock rw,\n";
    let without = |h: &mut Fake| confined(h, commented);
    one(without, Level::Problem, "libvirt", "AppArmor keeps", "vgpuctl libvirt install-hook");
    let rule = "/run/vgpud/vgpus/*/vfio.sock rw,\n";
    assert_eq!(wrong(|h| confined(h, rule)), []);
    let off = |h: &mut Fake| {
        confined(h, "");
        h.write("sys/module/apparmor/parameters/enabled", "N\n");
    };
    assert_eq!(wrong(off), []);
}

#[test]
fn what_must_be_mended_is_counted() {
    let found = Failure::Found { output: Vec::new(), problems: 2 };
    assert_eq!(found.to_string(), "2 of the findings above must be mended: see their fixes");
    assert_eq!(found.exit_status(), 1);
}
