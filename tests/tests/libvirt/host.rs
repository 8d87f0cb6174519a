//! A libvirt host: a Debian machine with libvirt, vgpud and domains.

#![allow(clippy::unwrap_used)]

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use lab::Lab;
use lab::build::Programs;
use lab::guest::{Guest, Output};
use lab::machine::Machine;
use lab::progress::Progress;
use lab::qemu::KERNEL_OPTIONS;
use nix::unistd::Pid;
use serde_json::Value;

/// Debian's user for QEMU.
pub const QEMU_USER: u64 = 64055;
/// Folder of the domains' serial ports, accessible to every user.
pub const FOLDER: &str = "/srv/vms";
pub const LIMIT: Duration = Duration::from_secs(120);
pub const BOOT_LIMIT: Duration = Duration::from_secs(90);
/// Type of the vGPUs. The parent has room for two.
pub const TYPE: &str = "SOFT-256MQ";

pub const UNIT: &str = "/etc/systemd/system/vgpud.service";
pub const SERVICE: &str = "\
[Unit]
Description=vGPU manager
[Service]
ExecStart=/usr/bin/vgpud run
KillMode=process
[Install]
WantedBy=multi-user.target
";
/// Drop-in with a small GPU.
pub const PARENT: &str = "\
[Service]
ExecStart=
ExecStart=/usr/bin/vgpud run --parent soft:soft0,vram=512M
";

/// A libvirt host. Hosts exclude each other, because VMs without KVM need the CPUs.
pub struct Host {
    pub machine: Machine,
    _lock: MutexGuard<'static, ()>,
}

impl Host {
    /// Starts a host without our software; `None` if this machine cannot run one.
    pub fn bare() -> Option<(Self, &'static Lab, &'static Programs)> {
        static LOCK: Mutex<()> = Mutex::new(());
        static LAB: OnceLock<(Lab, Programs)> = OnceLock::new();
        if let Some(reason) = Machine::impossible() {
            system_tests::skipped(&format!("a Debian machine with libvirt: {reason}"));
            return None;
        }
        let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let (lab, programs) = LAB.get_or_init(|| Lab::open_with_host(&Progress::new()).unwrap());
        let machine = Machine::start(&Progress::new()).unwrap();
        machine.sh(&format!("mkdir -m 1777 {FOLDER}")).unwrap();
        let images = "/var/lib/libvirt/images";
        machine.install(&lab.root.kernel.image, &format!("{images}/vmlinuz")).unwrap();
        machine.install(&lab.initramfs, &format!("{images}/initramfs.cpio")).unwrap();
        Some((Self { machine, _lock: lock }, lab, programs))
    }

    /// Starts a host with vgpud running and the hook installed.
    pub fn new() -> Option<Self> {
        let (host, _, programs) = Self::bare()?;
        host.machine.write(&format!("{UNIT}.d/parent.conf"), PARENT).unwrap();
        host.install(programs);
        host.sh("vgpuctl libvirt install-hook && systemctl restart libvirtd");
        Some(host)
    }

    /// Installs vgpud and vgpuctl, and starts vgpud.
    pub fn install(&self, programs: &Programs) {
        for name in ["vgpud", "vgpuctl"] {
            let program = programs.find(name).unwrap();
            self.machine.install(program, &format!("/usr/bin/{name}")).unwrap();
        }
        self.machine.write(UNIT, SERVICE).unwrap();
        self.sh("systemctl enable --quiet --now vgpud");
        self.eventually("vgpud answers", || self.run("vgpuctl types").status == 0);
    }

    pub fn sh(&self, script: &str) -> String {
        self.machine.sh(script).unwrap()
    }

    pub fn run(&self, script: &str) -> Output {
        self.machine.run(script).unwrap()
    }

    /// Runs a command that must fail with a status and with one line that contains `words`.
    pub fn refused(&self, script: &str, status: i32, words: &str) {
        let output = self.run(script);
        let one_line = output.stderr.trim_end().lines().count() == 1;
        assert!(
            output.status == status && one_line && output.stderr.contains(words),
            "{script}: {output:?}, expected {status} with {words:?}"
        );
    }

    pub fn eventually(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !holds() {
            let log = || self.sh("journalctl -n 30 --no-pager");
            assert!(
                Instant::now() < deadline,
                "Not within {} s: {what}\n{}",
                LIMIT.as_secs(),
                log()
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Defines a domain with the lab's kernel, a serial port for its console and one for commands.
    pub fn define(&self, name: &str, more: &str) {
        self.machine.write(&format!("/root/{name}.xml"), &domain(name, more)).unwrap();
        self.sh(&format!("virsh define /root/{name}.xml"));
    }

    pub fn xml(&self, name: &str) -> String {
        self.sh(&format!("virsh dumpxml --inactive --security-info {name}"))
    }

    /// Starts a domain and returns its guest's command line after the boot.
    pub fn boot(&self, name: &str) -> Guest {
        self.sh(&format!("virsh start {name}"));
        let mut guest = self.guest(name);
        self.wait_boot(name, &mut guest);
        guest
    }

    pub fn guest(&self, name: &str) -> Guest {
        Guest::connect(&self.machine.path(&format!("{FOLDER}/{name}.agent"))).unwrap()
    }

    pub fn wait_boot(&self, name: &str, guest: &mut Guest) {
        if let Err(error) = guest.wait_boot(BOOT_LIMIT) {
            let log = self.machine.read(&format!("/var/log/libvirt/qemu/{name}.log"));
            panic!("{error:#}\n{}\n{log}", self.console(name));
        }
    }

    /// Returns the guest's console.
    pub fn console(&self, name: &str) -> String {
        self.machine.read(&format!("{FOLDER}/{name}.console"))
    }

    pub fn vgpus(&self) -> Vec<Value> {
        serde_json::from_str(&self.sh("vgpuctl list --output json")).unwrap()
    }

    pub fn qemu(&self, name: &str) -> Pid {
        let pid = self.machine.read(&format!("/run/libvirt/qemu/{name}.pid"));
        Pid::from_raw(pid.trim().parse().unwrap())
    }

    pub fn state(&self, name: &str) -> String {
        self.sh(&format!("virsh domstate {name}")).trim().to_owned()
    }
}

/// Returns the XML of a small domain with further elements.
pub fn domain(name: &str, more: &str) -> String {
    let serial = |port: u8, kind: &str, source: &str| {
        format!("<serial type='{kind}'><source {source}/><target port='{port}'/></serial>")
    };
    let folder = FOLDER;
    format!(
        "<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>256</memory>
  {more}
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>/var/lib/libvirt/images/vmlinuz</kernel>
    <initrd>/var/lib/libvirt/images/initramfs.cpio</initrd>
    <cmdline>{KERNEL_OPTIONS} lab.name={name}</cmdline>
  </os>
  <features><acpi/></features>
  <devices>
    <controller type='usb' model='none'/>
    {}
    {}
    <graphics type='vnc' autoport='yes' passwd='secret'/>
    <video><model type='none'/></video>
    <memballoon model='none'/>
  </devices>
</domain>
",
        serial(0, "file", &format!("path='{folder}/{name}.console'")),
        serial(1, "unix", &format!("mode='bind' path='{folder}/{name}.agent'")),
    )
}

/// Checks that the guest's driver is bound to its vGPU and that jobs have correct results.
pub fn uses_its_vgpu(host: &Host, name: &str, guest: &mut Guest) {
    let command = "for d in /sys/bus/pci/devices/*; do [ $(cat $d/vendor) = 0x1234 ] && \
                   basename $(readlink $d/driver); done; true";
    let driver = guest.run(command, LIMIT).unwrap().success().unwrap().stdout;
    assert_eq!(driver.trim(), "bochs-drm", "{}", host.console(name));
    assert!(host.console(name).contains("fb0: bochs-drmdrmfb"), "{}", host.console(name));
    guest.run_json("vgpu-guest --json vadd --n 10000", LIMIT).unwrap();
}
