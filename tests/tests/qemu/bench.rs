//! A manager for VMs, and what tests ask of the VMs.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use lab::Lab;
use lab::build::Programs;
use lab::host::Host;
use lab::progress::Progress;
use lab::qemu::{Vm, VmSpec};
use nix::unistd::Pid;
use serde_json::Value;

pub const A: &str = "0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00a";
pub const B: &str = "0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00b";
pub const C: &str = "0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00c";
pub const TYPE: &str = "SOFT-256MQ";
pub const LIMIT: Duration = Duration::from_secs(60);

/// A manager for VMs. Tests exclude each other, because VMs without KVM need the CPUs.
pub struct Bench {
    pub lab: &'static Lab,
    pub host: Host,
    pub programs: &'static Programs,
    _lock: MutexGuard<'static, ()>,
}

impl Bench {
    pub fn new() -> Self {
        static LOCK: Mutex<()> = Mutex::new(());
        static LAB: OnceLock<(Lab, Programs)> = OnceLock::new();
        let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let (lab, programs) = LAB.get_or_init(|| Lab::open_with_host(&Progress::new()).unwrap());
        let host = start(programs);
        Self { lab, host, programs, _lock: lock }
    }

    /// Ends the manager and all its processes, and starts another in another run directory.
    pub fn move_host(&mut self) {
        self.host = start(self.programs);
    }

    /// Starts another manager, as on another host.
    pub fn another_host(&self) -> Host {
        start(self.programs)
    }

    pub fn vgpu(&self, uuid: &str) -> PathBuf {
        start_vgpu(&self.host, uuid)
    }

    pub fn spec(&self, name: &str) -> VmSpec {
        VmSpec { kvm: self.lab.kvm, ..VmSpec::new(name) }
    }

    pub fn boot(&self, spec: &VmSpec) -> Vm {
        Vm::boot(self.lab, spec, &self.host.folder().join(&spec.name)).unwrap()
    }

    pub fn warnings(&self, uuid: &str) -> Vec<String> {
        serde_json::from_value(self.host.vgpu(uuid).unwrap()["warnings"].clone()).unwrap()
    }

    pub fn worker(&self, uuid: &str) -> Pid {
        let pid = self.host.vgpu(uuid).unwrap()["pid"].as_i64().unwrap();
        Pid::from_raw(i32::try_from(pid).unwrap())
    }
}

/// Starts a vGPU of the common type, and returns its socket.
pub fn start_vgpu(host: &Host, uuid: &str) -> PathBuf {
    host.start_vgpu(uuid, TYPE, None).unwrap()
}

fn start(programs: &Programs) -> Host {
    Host::start(programs, &["soft:soft0,vram=1G"]).unwrap()
}

/// Waits until a condition holds.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < deadline, "Not within {} s: {what}", LIMIT.as_secs());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs a job that checks its own result.
pub fn job(vm: &mut Vm, job: &str) -> Value {
    vm.guest.run_json(&format!("vgpu-guest --json {job}"), LIMIT).unwrap()
}

/// Returns the kernel driver that is bound to the vGPU.
pub fn driver(vm: &mut Vm) -> String {
    let command = "for d in /sys/bus/pci/devices/*; do [ $(cat $d/vendor) = 0x1234 ] && \
                   basename $(readlink $d/driver); done; true";
    vm.guest.run(command, LIMIT).unwrap().success().unwrap().stdout.trim().to_owned()
}
