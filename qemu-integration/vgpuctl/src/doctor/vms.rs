//! Checks of running VMs with vGPUs: shared memory, plain saves, room for hot-plugged devices.

use std::collections::BTreeMap;

use host_inventory::files::Process;
use host_inventory::{Finding, HostFiles};
use integrate::domain::save_guard;
use mdev_core::untrusted::escaped;
use nix::unistd::{Uid, User};

const CHECK: &str = "vm";

/// Longest name of a VM, in characters.
const MAX_NAME: usize = 64;

/// Number of VMs of a user that are checked. Any user can start processes that look like VMs.
const MAX_VMS: usize = 64;

/// Memory backends that QEMU shares by default.
const SHARED: [&str; 2] = ["memory-backend-memfd", "memory-backend-shm"];

/// CPU models with AMD's vendor string.
const AMD: [&str; 7] = ["EPYC", "Opteron", "Phenom", "athlon", "Dhyana", "qemu64", "phenom"];

/// Checks every VM with a vGPU.
pub fn check(host: &HostFiles) -> Vec<Finding> {
    let vms = host.processes().filter(|process| {
        let name = process.args.first().and_then(|name| name.rsplit('/').next());
        name.is_some_and(|name| name.starts_with("qemu-"))
            && process.args.iter().any(|arg| arg.contains("vfio-user-pci"))
    });
    let (mut findings, mut counts) = (Vec::new(), BTreeMap::new());
    for vm in vms {
        let count = counts.entry(vm.uid).or_insert(0);
        *count += 1;
        if *count <= MAX_VMS {
            findings.extend(check_one(host, &vm));
        }
    }
    findings.extend(counts.into_iter().filter(|(_, count)| *count > MAX_VMS).map(
        |(uid, count)| {
            let user = user(uid);
            Finding::warning(
                CHECK,
                format!("user {user} has {count} VMs with vGPUs, of which {MAX_VMS} were checked"),
                format!("see whether they are VMs: ps -f -u {user}"),
            )
        },
    ));
    findings
}

fn check_one(host: &HostFiles, vm: &Process) -> Vec<Finding> {
    let name = name(vm);
    let mut findings = vec![if shares_memory(&vm.args) {
        Finding::ok(CHECK, format!("{name} shares its memory"))
    } else {
        Finding::problem(
            CHECK,
            format!("{name} does not share its memory: accesses of its vGPU to guest memory fault"),
            "add <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking> to the domain, or share=on to QEMU's command line (vgpuctl qemu-args -u UUID -- COMMAND); then restart the VM",
        )
    }];
    findings.push(Finding::ok(CHECK, format!("{name} {}", plain_saves(&vm.args))));
    if hot_plug_without_room(host, &vm.args) {
        findings.push(Finding::warning(
            CHECK,
            format!("{name} has an AMD CPU model and SeaBIOS: there is no address space for the BARs of a hot-plugged vGPU"),
            "attach the vGPU to pcie.0 from the start, or use UEFI or an Intel CPU model",
        ));
    }
    findings
}

/// Says what QEMU's own ways to save a VM do.
fn plain_saves(args: &[String]) -> &'static str {
    if values(args, "-blockdev").any(|device| device.contains(save_guard::NODE)) {
        "is saved with its vGPU by `vgpuctl vm save`; it refuses virsh save, managedsave and migrate"
    } else {
        "is saved with its vGPU by `vgpuctl vm save`, and moved by `vgpuctl vm migrate` only: migrate \
         and savevm of QEMU, and virsh save, leave the vGPU out, report no error, and the guest then \
         finds a device that was reset"
    }
}

/// Returns the VM's name from `-name guest=NAME`, with process and user: any user of the host can
/// start a process with any name.
fn name(vm: &Process) -> String {
    let value = values(&vm.args, "-name").next().map(|value| {
        let first = value.split(',').next().unwrap_or(value);
        escaped(first.strip_prefix("guest=").unwrap_or(first), MAX_NAME)
    });
    match value {
        Some(name) => format!("VM \"{name}\" (process {} of user {})", vm.pid, user(vm.uid)),
        None => format!("The VM in process {} of user {}", vm.pid, user(vm.uid)),
    }
}

/// Returns the name of a user, or its number.
fn user(uid: u32) -> String {
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    user.map_or_else(|| uid.to_string(), |user| user.name)
}

/// Returns the values of all occurrences of an option.
fn values<'a>(args: &'a [String], option: &'a str) -> impl Iterator<Item = &'a str> {
    args.windows(2).filter(move |pair| pair[0] == option).map(|pair| pair[1].as_str())
}

/// Returns a property of an argument in the form `kind,name=value` or in JSON.
fn property(arg: &str, name: &str) -> Option<String> {
    if arg.starts_with('{') {
        let json: serde_json::Value = serde_json::from_str(arg).ok()?;
        return match json.get(name)? {
            serde_json::Value::String(text) => Some(text.clone()),
            serde_json::Value::Bool(true) => Some("on".to_owned()),
            serde_json::Value::Bool(false) => Some("off".to_owned()),
            other => Some(other.to_string()),
        };
    }
    let named = arg.split(',').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
    named.map(str::to_owned)
}

/// Returns whether all guest memory is in shared backends. A plain `-m` has no backend.
fn shares_memory(args: &[String]) -> bool {
    let mut found = false;
    for object in values(args, "-object") {
        let kind = property(object, "qom-type");
        let kind = kind.as_deref().unwrap_or_else(|| object.split(',').next().unwrap_or(object));
        if !kind.starts_with("memory-backend-") {
            continue;
        }
        found = true;
        let share = property(object, "share");
        let shared = match share.as_deref() {
            Some(value) => matches!(value, "on" | "yes" | "true"),
            None => SHARED.contains(&kind),
        };
        if !shared {
            return false;
        }
    }
    found
}

/// Returns whether SeaBIOS assigns unusable 64-bit windows to empty PCIe ports, as on AMD CPUs.
fn hot_plug_without_room(host: &HostFiles, args: &[String]) -> bool {
    let ports = values(args, "-device").any(|device| device.contains("pcie-root-port"));
    let uefi = args
        .iter()
        .any(|arg| arg.contains("if=pflash") || arg.contains("OVMF") || arg.contains("pflash0"));
    let Some(model) = values(args, "-cpu").last() else { return ports && !uefi };
    let model = model.split(',').next().unwrap_or(model);
    let amd = match model {
        "host" | "max" => {
            let cpu = host.read("proc/cpuinfo").unwrap_or_default();
            cpu.contains("AuthenticAMD") || cpu.contains("HygonGenuine")
        }
        _ => AMD.iter().any(|name| model.starts_with(name)),
    };
    ports && !uefi && amd
}
