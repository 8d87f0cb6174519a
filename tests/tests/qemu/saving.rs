//! VMs that are saved and restored with their vGPUs, under a stock QEMU.

use std::path::Path;
use std::time::{Duration, Instant};

use lab::picture::Picture;
use lab::qemu::{Vm, VmSpec};
use serde_json::{Value, json};

use crate::bench::{A, B, Bench, C, LIMIT, driver, eventually, job};

/// Runs `vgpuctl` and returns its error output, or panics if it fails.
fn vgpuctl(bench: &Bench, args: &[&str]) {
    let output = bench.host.command(args).unwrap().output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}\n{}", bench.host.log());
}

/// Runs `vgpuctl`, which must refuse with these words in one line.
fn refused(bench: &Bench, args: &[&str], words: &str) {
    let output = bench.host.command(args).unwrap().output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let one_line = said.trim_end().lines().count() == 1;
    assert!(!output.status.success() && one_line && said.contains(words), "{args:?}: {said}");
}

/// Saves a VM, and returns the time that it took.
pub fn save(bench: &Bench, vgpu: &str, vm: &Vm, file: &Path, more: &[&str]) -> Duration {
    let start = Instant::now();
    let (monitor, file) = (vm.keys(), file.to_string_lossy().into_owned());
    let args = ["vm", "save", vgpu, "--monitor", &monitor.to_string_lossy(), "-o", &file];
    vgpuctl(bench, &[&args, more].concat());
    start.elapsed()
}

/// Restores a VM that waits for its state, and returns the time that it took.
pub fn restore(bench: &Bench, vgpu: &str, vm: &Vm, file: &Path) -> Duration {
    let start = Instant::now();
    let (monitor, file) = (vm.keys(), file.to_string_lossy().into_owned());
    vgpuctl(bench, &["vm", "restore", vgpu, "--monitor", &monitor.to_string_lossy(), "-i", &file]);
    start.elapsed()
}

/// Starts a load in the guest, each unit of which is checked.
fn start_load(vm: &mut Vm, seconds: u32) {
    let load = format!("(vgpu-guest --json bench --seconds {seconds} > /tmp/load 2>&1 &)");
    vm.guest.run(&load, LIMIT).unwrap().success().unwrap();
    std::thread::sleep(Duration::from_secs(2));
}

/// Waits for the end of the load, whose results must all be right.
fn finish_load(vm: &mut Vm) -> Value {
    let mut said = String::new();
    eventually("the load ends", || {
        said = vm.guest.run("cat /tmp/load", LIMIT).unwrap().stdout;
        !said.trim().is_empty()
    });
    let measured: Value = serde_json::from_str(said.trim()).unwrap_or_else(|_| panic!("{said}"));
    assert!(measured["verified"].as_u64().unwrap() > 0, "{said}");
    measured
}

/// Ends the host with all its processes, and restores a VM from a file on another host. Returns the
/// VM, and the time that the restore took.
pub fn move_to_another_host(
    bench: &mut Bench,
    spec: &VmSpec,
    vgpu: &str,
    file: &Path,
) -> (Vm, Duration) {
    bench.move_host();
    let socket = bench.vgpu(vgpu);
    let spec = VmSpec { awaits_state: true, ..spec.clone().with_vgpu(&socket) };
    let mut vm = Vm::start(bench.lab, &spec, &bench.host.folder().join("restored")).unwrap();
    eventually("the VM is attached", || !bench.host.vgpu(vgpu).unwrap()["vm"].is_null());
    let restored = restore(bench, vgpu, &vm, file);
    vm.wait_running().unwrap();
    (vm, restored)
}

/// Checks that the screen shows the picture that the guest has drawn.
pub fn check_picture(bench: &Bench, vgpu: &str) {
    let screen = bench.host.folder().join("screen.png");
    bench.host.screenshot(vgpu, &screen).unwrap();
    Picture::read(&screen).unwrap().check_mandelbrot().unwrap();
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_saved_vm_continues_its_work_on_another_host() {
    let mut bench = Bench::new();
    let socket = bench.vgpu(A);
    let spec = bench.spec("saved");
    let mut vm = bench.boot(&spec.clone().with_vgpu(&socket));
    job(&mut vm, "mandelbrot");
    start_load(&mut vm, 6);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vm.saved");
    let saved = save(&bench, A, &vm, &file, &[]);
    eventually("QEMU has ended", || !vm.is_running());
    drop(vm);

    let (mut vm, restored) = move_to_another_host(&mut bench, &spec, B, &file);
    println!("saved in {} ms, restored in {} ms", saved.as_millis(), restored.as_millis());
    check_picture(&bench, B);
    finish_load(&mut vm);
    assert_eq!(driver(&mut vm), "bochs-drm");
    for line in ["vadd --n 10000", "sgemm --n 64", "mandelbrot"] {
        job(&mut vm, line);
    }
    assert_eq!(bench.warnings(B), Vec::<String>::new());
    vm.quit().unwrap();
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_vm_goes_on_after_a_snapshot_and_after_refusals() {
    let bench = Bench::new();
    let socket = bench.vgpu(A);
    let mut vm = bench.boot(&bench.spec("snapshot").with_vgpu(&socket));
    start_load(&mut vm, 8);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vm.saved");
    save(&bench, A, &vm, &file, &["--keep-running"]);
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let (monitor, name) = (text(&vm.keys()), text(&file));
    let restore = ["vm", "restore", A, "--monitor", &monitor, "-i", &name];
    refused(&bench, &restore, "The VM runs already; start QEMU with -incoming defer");
    refused(&bench, &["restore", A, "-i", &name], "is a saved VM; `vgpuctl vm restore`");
    // Files of vGPUs and of VMs are told apart, and so are types and sizes.
    let only = text(&folder.path().join("only.vgpu"));
    vgpuctl(&bench, &["save", A, "-o", &only]);
    let without = ["vm", "restore", A, "--monitor", &monitor, "-i", &only];
    refused(&bench, &without, "has a vGPU, and no VM");
    bench.host.start_vgpu(B, "SOFT-256MC", None).unwrap();
    let of_another_type = ["vm", "restore", B, "--monitor", &monitor, "-i", &name];
    refused(&bench, &of_another_type, "The saved vGPU has type SOFT-256MQ, and vGPU");
    let socket = bench.vgpu(C);
    let smaller = VmSpec { awaits_state: true, memory_mib: 128, ..bench.spec("smaller") };
    let folder_of_vm = bench.host.folder().join("smaller");
    let other = Vm::start(bench.lab, &smaller.with_vgpu(&socket), &folder_of_vm).unwrap();
    let keys = text(&other.keys());
    refused(&bench, &["vm", "restore", C, "--monitor", &keys, "-i", &name], "QEMU failed: ");
    drop(other);
    // A damaged file is refused before anything is restored.
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    refused(&bench, &restore, "a checksum is wrong");
    std::fs::write(&file, &bytes[..middle]).unwrap();
    refused(&bench, &restore, "it was cut off");
    // What cannot be written is not saved, and the VM goes on.
    let nowhere = ["vm", "save", A, "--monitor", &monitor, "-o", "/nowhere/file"];
    refused(&bench, &nowhere, "Cannot write /nowhere/file");
    let none = ["vm", "save", A, "--monitor", "/nowhere/qmp", "-o", &name];
    refused(&bench, &none, "Cannot connect to /nowhere/qmp");
    finish_load(&mut vm);
    assert_eq!(vm.qmp.execute("query-status", &json!({})).unwrap()["status"], "running");
    vm.quit().unwrap();
    eventually("the VM is gone", || bench.host.vgpu(A).unwrap()["vm"].is_null());
    refused(&bench, &["save", A, "-o", &name], "has no VM");
}
