//! QEMU that is replaced under a running VM with a vGPU.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lab::qemu::{Vm, VmSpec};
use lab::successor::Successor;
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::bench::{A, B, Bench, LIMIT, eventually, job};
use crate::saving::{check_picture, start_load, two};

/// Upgrades in a row.
const UPGRADES: usize = 5;

/// Returns the arguments of `vgpuctl` that give the VM with this monitor a QEMU in a folder, with
/// more arguments for QEMU.
fn command(
    bench: &Bench,
    monitor: &Path,
    spec: &VmSpec,
    folder: &Path,
    more: &[&str],
) -> Vec<OsString> {
    let mut args = Successor::args(bench.lab, A, monitor, spec, folder).unwrap();
    args.extend(more.iter().map(OsString::from));
    args
}

/// Runs `vm upgrade` and returns its output.
fn run(bench: &Bench, args: &[OsString]) -> std::process::Output {
    bench.host.command(&[]).unwrap().args(args).output().unwrap()
}

fn pid_of(bench: &Bench, vgpu: &str) -> Pid {
    let pid = bench.host.vgpu(vgpu).unwrap()["vm"]["pid"].as_i64().unwrap();
    Pid::from_raw(i32::try_from(pid).unwrap())
}

/// Upgrades a VM into QEMU in a new folder. Returns the new one, and the pause in milliseconds.
fn upgrade(bench: &Bench, monitor: &Path, spec: &VmSpec, folder: &Path) -> (Successor, u64) {
    Successor::take_over((&bench.host, bench.lab), A, monitor, spec, folder).unwrap()
}

/// Boots a VM that can get a new QEMU, with a picture and a load of some seconds.
fn replaceable_vm(bench: &Bench, name: &str, seconds: u32) -> (VmSpec, Vm) {
    let spec = VmSpec { replaceable: true, ..bench.spec(name) };
    let spec = spec.with_vgpu(&bench.vgpu(A));
    let mut vm = bench.boot(&spec);
    job(&mut vm, "mandelbrot");
    start_load(&mut vm, seconds);
    (spec, vm)
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_running_vm_gets_a_new_qemu() {
    let bench = Bench::new();
    let (spec, mut vm) = replaceable_vm(&bench, "old", 6);
    let old = vm.pid();
    let begun = vm.guest.run("cat /proc/uptime", LIMIT).unwrap().stdout;
    let mut monitor = vm.keys();
    let mut pauses = Vec::new();
    let mut upgrade_again = |number: usize| {
        let folder = bench.host.folder().join(format!("new{number}"));
        let (new, pause) = upgrade(&bench, &monitor, &spec, &folder);
        monitor = folder.join("keys.sock");
        pauses.push(pause);
        new
    };
    let mut new = upgrade_again(0);
    assert!(new.pid() != old);
    eventually("the old QEMU has ended", || !vm.is_running());
    for number in 1..UPGRADES {
        std::thread::sleep(Duration::from_millis(300));
        let newer = upgrade_again(number);
        assert!(newer.pid() != new.pid());
        new = newer;
    }
    pauses.sort_unstable();
    println!("the VM was paused for {pauses:?} ms");
    // The bound of a release build on a quiet machine is 250 ms.
    assert!(pauses[UPGRADES / 2] < 1000, "{pauses:?} ms");
    check_picture(&bench, A);
    let now = new.guest.run("cat /proc/uptime", LIMIT).unwrap().stdout;
    let seconds = |text: &str| text.split(' ').next().unwrap().parse::<f64>().unwrap();
    assert!(seconds(&now) > seconds(&begun), "the guest was not started again: {begun}, {now}");
    let mut said = String::new();
    eventually("the load ends", || {
        said = new.guest.run("cat /tmp/load", LIMIT).unwrap().stdout;
        !said.trim().is_empty()
    });
    let measured: Value = serde_json::from_str(said.trim()).unwrap_or_else(|_| panic!("{said}"));
    assert!(measured["verified"].as_u64().unwrap() > 0, "{said}");
    for line in ["vadd --n 10000", "sgemm --n 64", "mandelbrot"] {
        new.guest.run_json(&format!("vgpu-guest --json {line}"), LIMIT).unwrap();
    }
    assert_eq!(bench.warnings(A), Vec::<String>::new());
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_vm_with_two_vgpus_gets_a_new_qemu() {
    let bench = Bench::new();
    let spec = VmSpec { replaceable: true, ..bench.spec("two") };
    let spec = two(&spec, &bench.vgpu(A), &bench.vgpu(B));
    let mut vm = bench.boot(&spec);
    let places = ["0000:00:10.0", "0000:00:11.0"];
    job(&mut vm, &format!("--pci {} mandelbrot", places[1]));
    check_picture(&bench, B);
    let load = format!("vgpu-guest --json --pci {} bench --seconds 6 > /tmp/load 2>&1", places[0]);
    vm.guest.run(&format!("({load} &)"), LIMIT).unwrap().success().unwrap();
    let folder = bench.host.folder().join("new");
    let (mut new, pause) = upgrade(&bench, &vm.keys(), &spec, &folder);
    println!("the VM was paused for {pause} ms");
    eventually("the old QEMU has ended", || !vm.is_running());
    assert_eq!(pid_of(&bench, B), new.pid());
    check_picture(&bench, B);
    let mut said = String::new();
    eventually("the load ends", || {
        said = new.guest.run("cat /tmp/load", LIMIT).unwrap().stdout;
        !said.trim().is_empty()
    });
    assert!(said.contains("\"verified\""), "{said}");
    for place in places {
        let job = format!("vgpu-guest --json --pci {place} vadd --n 10000");
        new.guest.run_json(&job, LIMIT).unwrap();
    }
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_failed_upgrade_leaves_the_vm_in_its_old_qemu() {
    let bench = Bench::new();
    let (spec, mut vm) = replaceable_vm(&bench, "kept", 8);
    let folder: PathBuf = bench.host.folder().join("new");
    let refused = |spec: &VmSpec, more: &[&str], words: &str| {
        let output = run(&bench, &command(&bench, &vm.keys(), spec, &folder, more));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let last = said.trim_end().lines().last().unwrap_or_default();
        assert!(!output.status.success() && last.contains(words), "{words}: {said}");
        assert_eq!(pid_of(&bench, A), vm.pid());
    };
    // The new QEMU does not start, before the VM stops.
    refused(&spec, &["-no-such-option"], "The new QEMU has ended (");
    // A machine of another size, and one without the vGPU: both after the VM has stopped.
    let other = VmSpec { memory_mib: 128, ..spec.clone() };
    refused(&other, &[], "The new QEMU has ended (");
    let without = VmSpec { devices: Vec::new(), ..spec.clone() };
    refused(&without, &[], "does not have the vGPU, or all of the vGPUs");
    check_picture(&bench, A);
    let mut said = String::new();
    eventually("the load ends", || {
        said = vm.guest.run("cat /tmp/load", LIMIT).unwrap().stdout;
        !said.trim().is_empty()
    });
    assert!(said.contains("\"verified\""), "{said}");
    job(&mut vm, "vadd --n 10000");
    assert_eq!(vm.qmp.execute("query-status", &json!({})).unwrap()["status"], "running");
    let mode = vm.qmp.execute("query-migrate-parameters", &json!({})).unwrap()["mode"].clone();
    assert_eq!(mode, "normal", "QEMU aborts at a plain save in the other mode");
    // Then it works.
    let (mut new, _) = upgrade(&bench, &vm.keys(), &spec, &folder);
    new.guest.run_json("vgpu-guest --json vadd --n 10000", LIMIT).unwrap();
    drop(new);
    drop(vm);
    // A QEMU that does not share its memory is refused at once.
    let spec = bench.spec("private").with_vgpu(&bench.vgpu(B));
    let vm = bench.boot(&spec);
    let mut args = command(&bench, &vm.keys(), &spec, &folder, &[]);
    args[2] = B.into();
    let output = run(&bench, &args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("without `-machine aux-ram-share=on`"), "{said}");
    let same = ["vm", "upgrade", B, "--monitor", "/x", "--new-monitor", "/x", "--", "true"];
    let output = run(&bench, &same.map(OsString::from));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("The new QEMU needs another monitor"), "{said}");
}
