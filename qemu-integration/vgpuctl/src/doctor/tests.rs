//! Tests of the checks on hosts with at most one defect.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use tempfile::TempDir;
use vgpud_api::{ErrorCode, ErrorDetail, Version};
use vgpud_host::test_util::write_executable;

use host_inventory::{Finding, HostFiles, Level, finding};

use super::examine;
use vgpud_client::ClientError;

const DEVICES: &str = "name \"vfio-user-pci\", bus PCI";
const SHARED: &str = "/usr/bin/qemu-system-x86_64\0-name\0guest=web,debug-threads=on\0-object\0\
    {\"qom-type\":\"memory-backend-memfd\",\"id\":\"pc.ram\",\"share\":true}\0-cpu\0Skylake-Client\0\
    -device\0pcie-root-port,id=r\0-device\0{\"driver\":\"vfio-user-pci\"}\0";

/// Fake host without defects. Tests change files of the host.
struct Fake {
    root: TempDir,
    uid: u32,
    gids: Vec<u32>,
    answer: Result<Version, ClientError>,
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

    /// Installs a QEMU script that prints a version and devices.
    fn qemu(&self, version: &str, devices: &str) {
        let path = "usr/bin/qemu-system-x86_64";
        let script = format!(
            "#!/bin/sh\ncase $1 in\n--version) echo 'QEMU emulator version {version} (Debian)';;\n\
             *) echo '{devices}';;\nesac\n"
        );
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        write_executable(&path, &script).unwrap();
    }

    fn findings(self) -> Vec<Finding> {
        let mut host = HostFiles::new(PathBuf::from(self.root.path()));
        (host.uid, host.gids) = (self.uid, self.gids.into_iter().collect());
        examine(&host, self.answer)
    }
}

/// Returns warnings and problems after a change of the host.
fn defects(change: impl FnOnce(&mut Fake)) -> Vec<Finding> {
    let mut fake = Fake::new();
    change(&mut fake);
    let mut findings = fake.findings();
    findings.retain(|finding| finding.level != Level::Ok);
    findings
}

#[track_caller]
fn expect(change: impl FnOnce(&mut Fake), level: Level, check: &str, what: &str, fix: &str) {
    let findings = defects(change);
    let [finding] = findings.as_slice() else { panic!("expected one finding: {findings:?}") };
    assert_eq!((finding.level, finding.check), (level, check), "{finding:?}");
    assert!(finding.what.contains(what), "{finding:?}");
    assert!(finding.fix.as_ref().is_some_and(|text| text.contains(fix)), "{finding:?}");
    let shown = finding::text(&findings);
    assert_eq!(shown.lines().count(), 2, "one line for the finding and one for the fix: {shown}");
}

#[test]
fn a_host_without_defects_has_no_findings_to_fix() {
    assert_eq!(defects(|_| {}), []);
    let findings = Fake::new().findings();
    let checks: Vec<_> = findings.iter().map(|finding| finding.check).collect();
    for check in ["qemu", "kvm", "nvidia", "vm", "vgpud", "libvirt"] {
        assert!(checks.contains(&check), "{check} in {checks:?}");
    }
    assert!(findings.iter().all(|finding| finding.fix.is_none()));
}

#[test]
fn qemu_is_installed_recent_and_has_the_device() {
    let problem = Level::Problem;
    expect(|h| h.remove("usr/bin/qemu-system-x86_64"), problem, "qemu", "no QEMU", "10.1 or newer");
    expect(
        |h| h.qemu("10.0.9", DEVICES),
        problem,
        "qemu",
        "is older than 10.1 and",
        "'deb http://deb.debian.org/debian trixie-backports main'",
    );
    expect(
        |h| h.qemu("11.1.3", "name \"e1000\""),
        problem,
        "qemu",
        "without vfio-user-pci",
        "help",
    );
    expect(|h| h.qemu("none", DEVICES), problem, "qemu", "does not run", "install QEMU");
}

#[test]
fn kvm_is_available_and_usable() {
    expect(|h| h.remove("dev/kvm"), Level::Warning, "kvm", "emulated", "modprobe");
    let outsider = |h: &mut Fake| {
        (h.uid, h.gids) = (4_000_000, vec![990, 991]);
        h.mode("dev/kvm", 0o660);
    };
    expect(outsider, Level::Warning, "kvm", "may not use /dev/kvm", "usermod -aG kvm");
}

#[test]
fn nvidia_driver_is_installed_known_and_usable_by_workers() {
    let none = |h: &mut Fake| h.remove("sys/module/nvidia/version");
    expect(none, Level::Warning, "nvidia", "is not driven by NVIDIA's", "install NVIDIA's driver");
    let old = |h: &mut Fake| h.write("sys/module/nvidia/version", "470.1\n");
    expect(old, Level::Problem, "nvidia", "470.1", "newer Tessera");
    let no_node = |h: &mut Fake| h.remove("dev/nvidia0");
    expect(
        no_node,
        Level::Problem,
        "nvidia",
        "/dev/nvidia0 is not there: vgpud",
        "nvidia-modprobe",
    );
    let closed = |h: &mut Fake| h.mode("dev/nvidiactl", 0o660);
    expect(
        closed,
        Level::Warning,
        "nvidia",
        "not accessible to every user",
        "NVreg_DeviceFileMode=0666",
    );
}

#[test]
fn a_lack_of_free_huge_pages_is_reported() {
    let full = |h: &mut Fake| {
        let text = "HugePages_Total:     512\nHugePages_Free:        0\nHugepagesize:  2048 kB\n";
        h.write("proc/meminfo", text);
    };
    expect(
        full,
        Level::Warning,
        "pages",
        "None of 512 huge pages of 2 MiB",
        "vm.nr_hugepages=1024",
    );
}

/// Returns the user of this process, whose processes those of the fake host are.
fn user() -> String {
    nix::unistd::User::from_uid(nix::unistd::geteuid())
        .unwrap()
        .map_or_else(|| nix::unistd::geteuid().to_string(), |user| user.name)
}

#[test]
fn private_memory_of_vms_is_reported() {
    for backend in [
        "memory-backend-memfd,id=m,share=off",
        "memory-backend-file,id=m,mem-path=/x",
        "memory-backend-ram,id=m,size=1G",
        "{\"qom-type\":\"memory-backend-file\",\"share\":false}",
        "rng-random,id=r",
    ] {
        let line = format!("qemu-system-x86_64\0-object\0{backend}\0-device\0vfio-user-pci\0");
        let change = |h: &mut Fake| h.write("proc/60/cmdline", &line);
        expect(
            change,
            Level::Problem,
            "vm",
            &format!("in process 60 of user {} does not share", user()),
            "share=on",
        );
    }
    // QEMU shares memfd memory by default. VMs without a vGPU are ignored.
    let shared_by_default =
        "qemu-system-x86_64\0-object\0memory-backend-memfd,id=m\0-device\0vfio-user-pci\0";
    assert_eq!(defects(|h| h.write("proc/60/cmdline", shared_by_default)), []);
    assert_eq!(defects(|h| h.write("proc/60/cmdline", "qemu-system-x86_64\0-m\x001G\0")), []);
}

#[test]
fn a_process_s_name_forges_no_finding() {
    let forged = "db7\" (process 8 of user root) is gone; fix: sh";
    let fake = Fake::new();
    fake.write("proc/60/cmdline", &SHARED.replace("web", forged));
    let said: String = fake.findings().into_iter().map(|finding| finding.what + "\n").collect();
    let shown = format!("VM \"{}\" (process 60 of user ", forged.replace('"', "\\\""));
    assert!(said.contains(&shown), "{said}");
}

#[test]
fn a_user_s_processes_are_checked_up_to_a_limit() {
    let before = Fake::new().findings().len();
    let fake = Fake::new();
    for pid in 60..560 {
        fake.write(&format!("proc/{pid}/cmdline"), SHARED);
    }
    let findings = fake.findings();
    assert!(findings.len() < before + 200, "{}", findings.len());
    let what = format!("user {} has 500 VMs with vGPUs, of which 64 were checked", user());
    let told = findings.iter().find(|finding| finding.what == what).unwrap();
    assert_eq!(told.fix, Some(format!("see whether they are VMs: ps -f -u {}", user())));
}

#[test]
fn what_plain_saves_do_to_a_vm_is_said() {
    let said = |line: &str| {
        let fake = Fake::new();
        fake.write("proc/60/cmdline", line);
        fake.findings().into_iter().map(|finding| finding.what + "\n").collect::<String>()
    };
    let expected = format!(
        "VM \"web\" (process 60 of user {}) is saved with its vGPU by `vgpuctl vm save`, and moved",
        user()
    );
    assert!(said(SHARED).contains(&expected));
    let guard = "-blockdev\0{\"driver\":\"vdi\",\"node-name\":\"use-vgpuctl-vm-save\"}\0-cpu";
    let guarded = said(&SHARED.replace("-cpu", guard));
    assert!(guarded.contains("it refuses virsh save"), "{guarded}");
}

#[test]
fn vms_without_room_for_hot_plug_are_reported() {
    let amd = SHARED.replace("Skylake-Client", "EPYC-Milan");
    let change = |h: &mut Fake| h.write("proc/60/cmdline", &amd);
    let what = format!("VM \"web\" (process 60 of user {}) has an AMD CPU", user());
    expect(change, Level::Warning, "vm", &what, "from the start");
    let host = SHARED.replace("Skylake-Client", "host");
    let change = |h: &mut Fake| {
        h.write("proc/60/cmdline", &host);
        h.write("proc/cpuinfo", "vendor_id\t: AuthenticAMD\n");
    };
    expect(change, Level::Warning, "vm", "AMD CPU", "UEFI");
    let uefi = amd.replace("-cpu", "-drive\0if=pflash,file=OVMF_CODE.fd\0-cpu");
    assert_eq!(defects(|h| h.write("proc/60/cmdline", &uefi)), []);
}

#[test]
fn an_unusable_daemon_is_reported_with_the_reason() {
    let socket = PathBuf::from("/run/vgpud/control.sock");
    let gone = ClientError::Unreachable { socket: socket.clone(), reason: "No such file".into() };
    expect(|h| h.answer = Err(gone), Level::Problem, "vgpud", "No such file", "systemctl enable");
    let denied = ClientError::PermissionDenied { socket: socket.clone(), user: 1000 };
    expect(
        |h| h.answer = Err(denied),
        Level::Problem,
        "vgpud",
        "may not use",
        "-aG vgpu,vgpu-admin USER,",
    );
    let odd = ClientError::Refused(ErrorDetail::new(ErrorCode::Internal, "odd"));
    expect(
        |h| h.answer = Err(odd),
        Level::Problem,
        "vgpud",
        "A request to vgpud failed: odd",
        "see its log: journalctl -u",
    );
    let older = |h: &mut Fake| {
        if let Ok(version) = &mut h.answer {
            version.version = "0.0.1".into();
        }
    };
    expect(older, Level::Warning, "vgpud", "0.0.1", "systemctl restart vgpud");
    let few = "Max open files            1024      4096      files\n";
    let change = |h: &mut Fake| h.write("proc/50/limits", few);
    expect(
        change,
        Level::Warning,
        "vgpud",
        "vgpud's limit of open files is 4096, which is too low for guests with much memory",
        "LimitNOFILE",
    );
}

#[test]
fn the_last_error_of_the_log_is_quoted() {
    let log = |h: &mut Fake, lines: &str| {
        let journal = h.root.path().join("usr/bin/journalctl");
        let script = format!(
            "#!/bin/sh\ncase \"$*\" in *--unit=vgpud*--output=cat*) cat << EOF\n{lines}EOF\nesac\n"
        );
        write_executable(&journal, &script).unwrap();
        let socket = PathBuf::from("/run/vgpud/control.sock");
        let reason = "timeout after 3 s".to_owned();
        h.answer = Err(ClientError::InvalidResponse { socket, reason });
    };
    let mistake = "vgpud: --owner: There is no user qemu-kvm\n\
                   vgpud: --parent: There is no backend \u{1b}sofd\n\
                   [2026-11-23T09:00:00Z WARN  vgpud::run] It is late\n\
                   2 vGPUs run\n";
    let quoted = "timeout after 3 s; see its log. The last error in its log: \
                  vgpud: --parent: There is no backend \\u{1b}sofd";
    expect(|h| log(h, mistake), Level::Problem, "vgpud", quoted, "/etc/default/vgpud");
    let logged = "vgpud: old\n[2026-11-23T09:00:00Z ERROR vgpud::run] Cannot listen\n";
    expect(
        |h| log(h, logged),
        Level::Problem,
        "vgpud",
        "vgpud::run] Cannot listen",
        "mend the cause",
    );
    let none = "[2026-11-23T09:00:00Z INFO  vgpud::run] no ERROR here\n";
    expect(|h| log(h, none), Level::Problem, "vgpud", "see its log", "journalctl -u vgpud");
}

#[test]
fn groups_exist_and_the_user_is_a_member() {
    let none = |h: &mut Fake| h.write("etc/group", "vgpu-admin:x:991:\n");
    expect(none, Level::Warning, "groups", "no group vgpu:", "groupadd --system vgpu");
    let outsider = |h: &mut Fake| {
        (h.uid, h.gids) = (4_000_000, vec![5]);
        h.mode("dev/kvm", 0o666);
    };
    expect(outsider, Level::Problem, "groups", "not in group vgpu", "usermod -aG vgpu");
}

#[test]
fn a_missing_hook_and_stale_folders_are_reported() {
    let hook = |h: &mut Fake| h.remove("etc/libvirt/hooks/qemu.d/tessera");
    expect(
        hook,
        Level::Warning,
        "libvirt",
        "without Tessera's hook",
        "vgpuctl libvirt install-hook",
    );
    let left = |h: &mut Fake| {
        h.write("run/vgpud/vgpus/a/run.json", "{\"process\":{\"pid\":999}}");
        h.write("run/vgpud/parents/soft0/run.json", "{\"process\":{\"pid\":50}}");
        h.answer = Err(ClientError::Encode("gone".into()));
    };
    let findings = defects(left);
    let stale: Vec<_> = findings.iter().filter(|finding| finding.check == "stale").collect();
    assert_eq!(stale.len(), 1, "{findings:?}");
    assert!(
        stale[0].what.contains("/run/vgpud/vgpus/a belongs to a process that has exited"),
        "{stale:?}"
    );
}

/// Adds a device bound to vfio-pci, in IOMMU group 7.
fn with_vfio(h: &mut Fake, locked: &str) {
    for (name, number) in [("vendor", "0x1234"), ("device", "0x11e8"), ("class", "0x00ff00")] {
        h.write(&format!("sys/bus/pci/devices/0000:01:00.0/{name}"), number);
    }
    let device = h.root.path().join("sys/bus/pci/devices/0000:01:00.0");
    let links =
        [("iommu_group", "../../../kernel/iommu_groups/7"), ("driver", "../../drivers/vfio-pci")];
    for (name, target) in links {
        std::os::unix::fs::symlink(target, device.join(name)).unwrap();
    }
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
fn vfio_devices_are_accessible_and_may_lock_memory() {
    assert_eq!(defects(|h| with_vfio(h, "unlimited")), []);
    let few = |h: &mut Fake| with_vfio(h, "8388608");
    expect(few, Level::Warning, "vfio", "may lock 8 MiB", "LimitMEMLOCK=infinity");
    let no_node = |h: &mut Fake| {
        with_vfio(h, "unlimited");
        h.remove("dev/vfio/7");
    };
    expect(no_node, Level::Problem, "vfio", "/dev/vfio/7 is not there", "modprobe vfio-pci");
    // With iommufd, vgpud uses the device's own file.
    let own = |h: &mut Fake| {
        with_vfio(h, "unlimited");
        h.write("sys/bus/pci/devices/0000:01:00.0/vfio-dev/vfio3/dev", "");
        h.write("dev/iommu", "");
    };
    expect(
        own,
        Level::Problem,
        "vfio",
        "/dev/vfio/devices/vfio3 is not there",
        "modprobe vfio-pci",
    );
    let accessible = |h: &mut Fake| {
        own(h);
        h.write("dev/vfio/devices/vfio3", "");
    };
    assert_eq!(defects(accessible), []);
    let no_group = |h: &mut Fake| {
        with_vfio(h, "unlimited");
        h.remove("sys/bus/pci/devices/0000:01:00.0/iommu_group");
    };
    expect(no_group, Level::Problem, "vfio", "in no IOMMU group", "intel_iommu=on");
    // Without such a device, vgpud locks no memory.
    let limits = "Max open files 1 1048576 files\nMax locked memory 8388608 8388608 bytes\n";
    assert_eq!(defects(|h| h.write("proc/50/limits", limits)), []);
}

#[test]
fn a_missing_apparmor_rule_is_reported() {
    let confined = |h: &mut Fake, rules: &str| {
        h.write("sys/module/apparmor/parameters/enabled", "Y\n");
        h.write("etc/apparmor.d/abstractions/libvirt-qemu", "");
        h.write("etc/apparmor.d/local/abstractions/libvirt-qemu", rules);
    };
    let commented = "# /run/vgpud/vgpus/*/vfio.sock rw,\n";
    let without = |h: &mut Fake| confined(h, commented);
    expect(without, Level::Problem, "libvirt", "AppArmor denies", "vgpuctl libvirt install-hook");
    let rule = "/run/vgpud/vgpus/*/vfio.sock rw,\n";
    assert_eq!(defects(|h| confined(h, rule)), []);
    let off = |h: &mut Fake| {
        confined(h, "");
        h.write("sys/module/apparmor/parameters/enabled", "N\n");
    };
    assert_eq!(defects(off), []);
}

#[test]
fn problems_are_counted() {
    let found = crate::failure::Failure::Found { output: Vec::new(), problems: 2 };
    assert_eq!(found.to_string(), "2 of the findings above are problems: see their fixes");
    assert_eq!(found.exit_status(), 1);
}
