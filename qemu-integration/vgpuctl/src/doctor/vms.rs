//! Do the VMs that run let the GPU reach their memory?

use super::Finding;
use super::host::{Host, Process};

const CHECK: &str = "vm";

/// Backends of memory that QEMU shares unless told not to.
const SHARED: [&str; 2] = ["memory-backend-memfd", "memory-backend-shm"];

/// CPU models with AMD's vendor string.
const AMD: [&str; 7] = ["EPYC", "Opteron", "Phenom", "athlon", "Dhyana", "qemu64", "phenom"];

/// Every VM that has a vGPU.
pub fn check(host: &Host) -> Vec<Finding> {
    let processes = host.processes();
    let vms = processes.iter().filter(|process| {
        let name = process.args.first().and_then(|name| name.rsplit('/').next());
        name.is_some_and(|name| name.starts_with("qemu-"))
            && process.args.iter().any(|arg| arg.contains("vfio-user-pci"))
    });
    vms.flat_map(|vm| one(host, vm)).collect()
}

fn one(host: &Host, vm: &Process) -> Vec<Finding> {
    let name = name(vm);
    let mut findings = vec![if shares_memory(&vm.args) {
        Finding::ok(CHECK, format!("{name} shares its memory"))
    } else {
        Finding::problem(
            CHECK,
            format!(
                "{name} does not share its memory: its vGPU cannot reach it, and work on it faults"
            ),
            "add <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking> to the domain, or share=on (vgpuctl qemu-args -u UUID -- COMMAND), and restart the VM",
        )
    }];
    if hot_plug_without_room(host, &vm.args) {
        findings.push(Finding::warning(
            CHECK,
            format!("{name} has an AMD CPU model and SeaBIOS: a vGPU that is plugged in while it runs finds no room for its memory"),
            "give the VM its vGPU from the start, on pcie.0, or use UEFI or an Intel CPU model",
        ));
    }
    findings
}

/// As people know it: `-name guest=NAME`, and the process.
fn name(vm: &Process) -> String {
    let value = values(&vm.args, "-name").next().map(|value| {
        let first = value.split(',').next().unwrap_or(value);
        first.strip_prefix("guest=").unwrap_or(first).escape_default().to_string()
    });
    match value {
        Some(name) => format!("VM {name} (process {})", vm.pid),
        None => format!("The VM in process {}", vm.pid),
    }
}

/// What follows an option, each time that it is given.
fn values<'a>(args: &'a [String], option: &'a str) -> impl Iterator<Item = &'a str> {
    args.windows(2).filter(move |pair| pair[0] == option).map(|pair| pair[1].as_str())
}

/// A property of an argument in QEMU's own form (`kind,name=value`) or in JSON.
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

/// Whether all memory that the guest has is in shared backends. There are none for a plain `-m`.
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

/// SeaBIOS puts 64-bit windows of empty ports where the machine has no memory, if the CPU calls itself AMD's.
fn hot_plug_without_room(host: &Host, args: &[String]) -> bool {
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
