//! VMs that move to another host while they work, under a stock QEMU.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use lab::demo::live::WORK;
use lab::host::Host;
use lab::picture::Picture;
use lab::qemu::{Vm, VmSpec};
use serde_json::{Value, json};

use crate::bench::{A, B, Bench, C, LIMIT, eventually, job, start_vgpu};

/// Moves in a row.
const MOVES: usize = 10;

/// VM that waits on a host for another one.
struct Waiting {
    vm: Vm,
    receive: Child,
    address: String,
}

/// Returns the names of a process of `vgpuctl vm receive` or `migrate` with a VM's monitor.
fn vgpuctl(host: &Host, task: &str, vgpu: &str, monitor: &Path, more: &[&str]) -> Command {
    let monitor = monitor.to_string_lossy().into_owned();
    let args = [&["vm", task, vgpu, "--monitor", &monitor][..], more].concat();
    host.command(&args).unwrap()
}

/// Starts QEMU and `vm receive` on a host.
fn wait_for_vm(bench: &Bench, host: &Host, spec: &VmSpec, vgpu: &str, number: usize) -> Waiting {
    if host.vgpu(vgpu).is_err() {
        start_vgpu(host, vgpu);
    }
    let socket = host.run_dir().join("vgpus").join(vgpu).join("vfio.sock");
    let spec = VmSpec { awaits_state: true, ..spec.clone().with_vgpu(&socket) };
    let folder = host.folder().join(format!("vm{number}"));
    let vm = Vm::start(bench.lab, &spec, &folder).unwrap();
    eventually("the VM is attached", || !host.vgpu(vgpu).unwrap()["vm"].is_null());
    let address = if number.is_multiple_of(2) {
        format!("unix:{}", folder.join("move").display())
    } else {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        free.local_addr().unwrap().to_string()
    };
    let mut receive = vgpuctl(host, "receive", vgpu, &vm.keys(), &["--listen", &address]);
    let receive = receive.stderr(Stdio::piped()).spawn().unwrap();
    Waiting { vm, receive, address }
}

/// Runs `vm migrate` until the other host listens.
fn migrate(host: &Host, vgpu: &str, monitor: &Path, address: &str) -> Output {
    let mut output = None;
    eventually("the other host listens", || {
        let more = ["--to", address, "--output", "json"];
        let done = vgpuctl(host, "migrate", vgpu, monitor, &more).output().unwrap();
        let early = String::from_utf8_lossy(&done.stderr).contains("Cannot reach");
        output = (!early).then_some(done);
        output.is_some()
    });
    output.unwrap()
}

fn check_picture(host: &Host, vgpu: &str) {
    let screen = host.folder().join("screen.png");
    host.screenshot(vgpu, &screen).unwrap();
    Picture::read(&screen).unwrap().check_mandelbrot().unwrap();
}

/// Returns the number of jobs that the guest has done, all of which must be right.
fn jobs(vm: &mut Vm) -> u32 {
    let bad = vm.guest.run("cat /tmp/bad 2> /dev/null", LIMIT).unwrap().stdout;
    assert!(bad.is_empty(), "{bad}");
    let done = vm.guest.run("wc -l < /tmp/done", LIMIT).unwrap().stdout;
    done.trim().parse().unwrap_or_default()
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_working_vm_moves_between_hosts() {
    let bench = Bench::new();
    let other = bench.another_host();
    let hosts = [(&bench.host, A), (&other, B)];
    let spec = bench.spec("moved");
    let mut vm = bench.boot(&spec.clone().with_vgpu(&start_vgpu(&bench.host, A)));
    job(&mut vm, "mandelbrot");
    vm.guest.run(WORK, LIMIT).unwrap().success().unwrap();
    let mut pauses = Vec::new();
    for number in 0..MOVES {
        // A different moment of the work each time.
        thread::sleep(Duration::from_millis(300 + number as u64 * 37));
        let ((from, old), (to, new)) = (hosts[number % 2], hosts[(number + 1) % 2]);
        let Waiting { vm: mut moved, receive, address } =
            wait_for_vm(&bench, to, &spec, new, number);
        let output = migrate(from, old, &vm.keys(), &address);
        let received = receive.wait_with_output().unwrap();
        let all = || format!("{output:?}\n{received:?}\n{}\n{}", from.log(), to.log());
        assert!(output.status.success() && received.status.success(), "{}", all());
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        pauses.push(said["pause_ms"].as_u64().unwrap());
        eventually("the old QEMU has ended", || !vm.is_running());
        moved.wait_running().unwrap();
        vm = moved;
        check_picture(to, new);
        let before = jobs(&mut vm);
        eventually("the guest works", || jobs(&mut vm) > before);
    }
    pauses.sort_unstable();
    println!("the VM was paused for {pauses:?} ms; {} jobs", jobs(&mut vm));
    vm.quit().unwrap();
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_move_that_fails_leaves_the_vm_where_it_is() {
    let bench = Bench::new();
    let other = bench.another_host();
    let spec = bench.spec("kept");
    let mut vm = bench.boot(&spec.clone().with_vgpu(&start_vgpu(&bench.host, A)));
    vm.guest.run(WORK, LIMIT).unwrap().success().unwrap();
    let stays = |vm: &mut Vm, output: &Output, words: &str| {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let one_line = said.trim_end().lines().count() == 1;
        assert!(!output.status.success() && one_line && said.contains(words), "{words}: {said}");
        let before = jobs(vm);
        eventually("the guest works", || jobs(vm) > before);
        assert_eq!(vm.qmp.execute("query-status", &json!({})).unwrap()["status"], "running");
    };
    let nowhere = ["--to", "unix:/nowhere/move"];
    let output = vgpuctl(&bench.host, "migrate", A, &vm.keys(), &nowhere).output().unwrap();
    stays(&mut vm, &output, "Cannot reach unix:/nowhere/move");
    let running = ["--listen", "unix:/nowhere/move"];
    let output = vgpuctl(&bench.host, "receive", A, &vm.keys(), &running).output().unwrap();
    stays(&mut vm, &output, "The VM runs already; start QEMU with -incoming defer");

    // Another machine, another type of vGPU, and another place of the vGPU.
    let smaller = VmSpec { memory_mib: 128, ..spec.clone() };
    let waiting = wait_for_vm(&bench, &other, &smaller, B, 0);
    let output = migrate(&bench.host, A, &vm.keys(), &waiting.address);
    let received = waiting.receive.wait_with_output().unwrap();
    assert!(!received.status.success());
    stays(&mut vm, &output, "The other host refused the VM: QEMU failed: ");
    drop(waiting.vm);
    eventually("the VM is gone", || other.vgpu(B).unwrap()["vm"].is_null());
    let socket = other.start_vgpu(C, "SOFT-256MC", None).unwrap();
    let awaits = VmSpec { awaits_state: true, ..spec.clone().with_vgpu(&socket) };
    let other_type = Vm::start(bench.lab, &awaits, &other.folder().join("type")).unwrap();
    eventually("the VM is attached", || !other.vgpu(C).unwrap()["vm"].is_null());
    let address = format!("unix:{}", other.folder().join("type/move").display());
    let mut receive = vgpuctl(&other, "receive", C, &other_type.keys(), &["--listen", &address]);
    let receive = receive.stderr(Stdio::piped()).spawn().unwrap();
    let output = migrate(&bench.host, A, &vm.keys(), &address);
    let words = "has a vGPU of type SOFT-256MQ, and this VM of type SOFT-256MC";
    stays(&mut vm, &output, words);
    assert!(!receive.wait_with_output().unwrap().status.success());
    drop(other_type);

    let waiting = wait_for_vm(&bench, &other, &spec, B, 4);
    eventually("the other host listens", || {
        let more = ["--to", &waiting.address, "--timeout", "0"];
        let output = vgpuctl(&bench.host, "migrate", A, &vm.keys(), &more).output().unwrap();
        let early = String::from_utf8_lossy(&output.stderr).contains("Cannot reach");
        if !early {
            stays(&mut vm, &output, "The VM writes its memory faster than it is sent");
        }
        !early
    });
    assert!(!waiting.receive.wait_with_output().unwrap().status.success());
    drop(waiting.vm);
    eventually("the VM is gone", || other.vgpu(B).unwrap()["vm"].is_null());
    // The other host dies at different moments.
    for (number, delay) in [40, 160, 320].into_iter().enumerate() {
        let mut waiting = wait_for_vm(&bench, &other, &spec, B, number);
        thread::sleep(Duration::from_millis(300));
        let more = ["--to", &waiting.address, "--output", "json"];
        let mut migrate = vgpuctl(&bench.host, "migrate", A, &vm.keys(), &more);
        let migrate = migrate.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        thread::sleep(Duration::from_millis(delay));
        waiting.receive.kill().unwrap();
        drop(waiting.vm);
        let output = migrate.wait_with_output().unwrap();
        stays(&mut vm, &output, "");
        eventually("the VM is gone", || other.vgpu(B).unwrap()["vm"].is_null());
        let _ = waiting.receive.wait();
    }
    // Then it works.
    let Waiting { vm: mut moved, receive, address } = wait_for_vm(&bench, &other, &spec, B, 9);
    let output = migrate(&bench.host, A, &vm.keys(), &address);
    assert!(output.status.success(), "{output:?}\n{:?}", receive.wait_with_output());
    moved.wait_running().unwrap();
    let before = jobs(&mut moved);
    eventually("the guest works", || jobs(&mut moved) > before);
    moved.quit().unwrap();
}
