//! VMs that are saved and restored with their vGPUs, under a stock QEMU.

use std::path::Path;
use std::time::{Duration, Instant};

use lab::picture::Picture;
use lab::qemu::{Vm, VmSpec, vgpu_device};
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
pub fn start_load(vm: &mut Vm, seconds: u32) {
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

/// Returns a VM with two vGPUs.
pub fn two(spec: &VmSpec, first: &Path, second: &Path) -> VmSpec {
    let mut devices = [vgpu_device("first", first), vgpu_device("second", second)];
    devices[0]["addr"] = json!("0x10");
    devices[1]["addr"] = json!("0x11");
    VmSpec { devices: devices.to_vec(), ..spec.clone() }
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_vm_with_two_vgpus_is_restored_with_each_in_its_place() {
    let mut bench = Bench::new();
    let spec = bench.spec("two");
    let mut vm = bench.boot(&two(&spec, &bench.vgpu(A), &bench.vgpu(B)));
    let found = "for d in /sys/bus/pci/devices/*; do [ $(cat $d/vendor) = 0x1234 ] && basename $d; done; true";
    let found = vm.guest.run(found, LIMIT).unwrap().success().unwrap().stdout;
    let [first, second] = found.lines().collect::<Vec<_>>()[..] else { panic!("{found}") };
    assert_eq!(first, "0000:00:10.0");
    job(&mut vm, &format!("--pci {second} mandelbrot"));
    check_picture(&bench, B);
    let load = format!("vgpu-guest --json --pci {first} bench --seconds 6 > /tmp/load 2>&1");
    vm.guest.run(&format!("({load} &)"), LIMIT).unwrap().success().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vm.saved");
    // The monitor of another VM is refused before anything stops.
    let other = bench.boot(&bench.spec("other").with_vgpu(&bench.vgpu(C)));
    let (wrong, name) = (other.keys(), file.to_string_lossy().into_owned());
    let wrong = ["vm", "save", A, "--monitor", &wrong.to_string_lossy(), "-o", &name];
    refused(
        &bench,
        &wrong,
        "The monitor's VM has 1 vfio-user devices, and the vGPU's VM has 2 vGPUs",
    );
    let wrong = vm.keys();
    let wrong = ["vm", "save", C, "--monitor", &wrong.to_string_lossy(), "-o", &name];
    refused(
        &bench,
        &wrong,
        "The monitor's VM has 2 vfio-user devices, and the vGPU's VM has 1 vGPUs",
    );
    drop(other);
    // One of its vGPUs stands for all of them.
    save(&bench, B, &vm, &file, &[]);
    eventually("QEMU has ended", || !vm.is_running());
    drop(vm);

    // Each name has the other place.
    bench.move_host();
    let spec = VmSpec { awaits_state: true, ..spec };
    let spec = two(&spec, &bench.vgpu(B), &bench.vgpu(A));
    let mut vm = Vm::start(bench.lab, &spec, &bench.host.folder().join("restored")).unwrap();
    eventually("the VM is attached", || {
        [A, B].iter().all(|vgpu| !bench.host.vgpu(vgpu).unwrap()["vm"].is_null())
    });
    restore(&bench, A, &vm, &file);
    vm.wait_running().unwrap();
    check_picture(&bench, A);
    finish_load(&mut vm);
    for device in [first, second] {
        job(&mut vm, &format!("--pci {device} vadd --n 10000"));
    }
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
    let of_another_type = bench.host.start_vgpu(B, "SOFT-256MC", None).unwrap();
    let none = ["vm", "restore", B, "--monitor", &monitor, "-i", &name];
    refused(&bench, &none, "has no VM; start QEMU first");
    let waiting = |name: &str, memory_mib: u32, socket: &Path| {
        let spec = VmSpec { awaits_state: true, memory_mib, ..bench.spec(name) };
        Vm::start(bench.lab, &spec.with_vgpu(socket), &bench.host.folder().join(name)).unwrap()
    };
    let other = waiting("other", 256, &of_another_type);
    let keys = text(&other.keys());
    let words = "has a vGPU of type SOFT-256MQ, and this VM of type SOFT-256MC; start the saved";
    refused(&bench, &["vm", "restore", B, "--monitor", &keys, "-i", &name], words);
    let words = "The monitor's VM does not have the vGPU, or all of the vGPUs";
    refused(&bench, &["vm", "save", A, "--monitor", &keys, "-o", &name], words);
    drop(other);
    let place = "and this VM has none there; start QEMU with the command line of the saved VM";
    let socket = bench.vgpu(C);
    let mut moved = VmSpec { awaits_state: true, ..bench.spec("moved") }.with_vgpu(&socket);
    moved.devices[0]["addr"] = json!("0x15");
    let other = Vm::start(bench.lab, &moved, &bench.host.folder().join("moved")).unwrap();
    refused(&bench, &["vm", "restore", C, "--monitor", &text(&other.keys()), "-i", &name], place);
    drop(other);
    let no_domain = "has a VM that is no domain; name its vGPU and its monitor";
    refused(&bench, &["vm", "restore", "--domain", "x", "-i", &name], no_domain);
    let other = waiting("smaller", 128, &socket);
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
