//! Real VMs: Debian's kernel under a stock QEMU, with vGPUs of a software GPU.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use lab::cleanup::Process;
use lab::picture::Picture;
use lab::qemu::{Memory, Vm, VmSpec, vgpu_device};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::bench::{A, B, Bench, LIMIT, TYPE, driver, eventually, job};

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn the_guests_driver_binds_and_every_job_is_right() {
    let bench = Bench::new();
    let socket = bench.vgpu(A);
    let mut vm = bench.boot(&bench.spec("jobs").with_vgpu(&socket));
    assert_eq!(driver(&mut vm), "bochs-drm", "{}", vm.console());
    let info = job(&mut vm, "info");
    assert_eq!((&info["uuid"], &info["type"]), (&json!(A), &json!(TYPE)));

    let screen = bench.host.folder().join("screen.png");
    bench.host.screenshot(A, &screen).unwrap();
    Picture::read(&screen).unwrap().check_text().unwrap();

    for line in ["vadd --n 10000", "saxpy --n 10000", "sgemm --n 64", "spin --seconds 0.2"] {
        job(&mut vm, line);
    }
    let copies = vm.guest.run("vgpu-guest --json copy --size 2", LIMIT).unwrap().success().unwrap();
    assert_eq!(copies.stdout.lines().count(), 3, "copy, fill and rectangle: {}", copies.stdout);

    let access = job(&mut vm, "access --count 20");
    let times = ["read_us", "write_us"].map(|key| access[key].as_f64().unwrap());
    assert!(times.iter().all(|time| *time > 0.0), "{access}");
    job(&mut vm, "mandelbrot");
    bench.host.screenshot(A, &screen).unwrap();
    Picture::read(&screen).unwrap().check_mandelbrot().unwrap();

    assert_eq!(bench.warnings(A), Vec::<String>::new());
    assert_eq!(bench.host.vgpu(A).unwrap()["vm"]["pid"], json!(vm.pid().as_raw()));
    vm.quit().unwrap();
    eventually("the VM is no longer listed", || bench.host.vgpu(A).unwrap()["vm"].is_null());
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_vgpu_without_a_display_does_every_job() {
    let bench = Bench::new();
    let socket = bench.host.start_vgpu(A, "SOFT-256MC", None).unwrap();
    let mut vm = bench.boot(&bench.spec("headless").with_vgpu(&socket));
    assert_eq!(job(&mut vm, "info")["type"], "SOFT-256MC");
    for line in ["vadd --n 10000", "sgemm --n 64", "mandelbrot --width 320 --height 200"] {
        job(&mut vm, line);
    }
    vm.guest.run("vgpu-guest --json copy --size 2", LIMIT).unwrap().success().unwrap();
    vm.quit().unwrap();
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_vm_works_after_a_reset_and_a_reboot() {
    let bench = Bench::new();
    let socket = bench.vgpu(A);
    let mut vm = bench.boot(&bench.spec("reset").with_vgpu(&socket));
    // Reset during work.
    vm.guest.start("vgpu-guest spin --seconds 30", LIMIT).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    vm.qmp.execute("system_reset", &json!({})).unwrap();
    vm.wait_boot().unwrap();
    assert_eq!(driver(&mut vm), "bochs-drm");
    job(&mut vm, "vadd --n 10000");

    vm.guest.start("reboot -f", LIMIT).unwrap();
    vm.wait_boot().unwrap();
    assert_eq!(driver(&mut vm), "bochs-drm");
    job(&mut vm, "sgemm --n 32");
    vm.quit().unwrap();
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_vgpu_is_hotplugged_repeatedly() {
    let bench = Bench::new();
    let socket = bench.vgpu(A);
    let mut vm = bench.boot(&bench.spec("plug"));
    for round in 0..3 {
        let id = format!("vgpu{round}");
        vm.plug(vgpu_device(&id, &socket), round % 2).unwrap();
        eventually("bochs-drm binds", || driver(&mut vm) == "bochs-drm");
        assert!(!vm.console().contains("failed to assign"), "{}", vm.console());
        job(&mut vm, "vadd --n 10000");
        vm.unplug(&id).unwrap();
        eventually("the device is gone", || driver(&mut vm).is_empty());
        eventually("the vGPU is free", || bench.host.vgpu(A).unwrap()["vm"].is_null());
    }
    assert!(vm.is_running(), "{}", vm.errors());
    vm.quit().unwrap();
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_killed_vm_restarts_on_the_same_vgpu() {
    let bench = Bench::new();
    let socket = bench.vgpu(A);
    let spec = bench.spec("killed").with_vgpu(&socket);
    let mut vm = bench.boot(&spec);
    vm.guest.start("vgpu-guest spin --seconds 30", LIMIT).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    vm.kill();
    let mut vm = bench.boot(&spec);
    assert_eq!(driver(&mut vm), "bochs-drm");
    job(&mut vm, "vadd --n 10000");
    vm.quit().unwrap();
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn unshared_memory_is_detected_and_explained() {
    let bench = Bench::new();
    let socket = bench.vgpu(A);
    for (name, memory) in [("private", Memory::Private), ("plain", Memory::Plain)] {
        let spec = VmSpec { memory, ..bench.spec(name).with_vgpu(&socket) };
        let vm = bench.boot(&spec);
        let mut warnings = Vec::new();
        eventually("a warning", || {
            warnings = bench.warnings(A);
            !warnings.is_empty()
        });
        assert!(warnings.iter().any(|text| text.contains("share=on")), "{name}: {warnings:?}");
        vm.quit().unwrap();
        eventually("the vGPU is free", || bench.host.vgpu(A).unwrap()["vm"].is_null());
    }
}

/// Returns the process that started another one.
fn parent_of(pid: Pid) -> Pid {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap();
    Pid::from_raw(parent.trim().parse().unwrap())
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_dead_worker_is_not_noticed_and_a_lost_device_affects_only_its_own_vm() {
    let bench = Bench::new();
    let (first, second) = (bench.vgpu(A), bench.vgpu(B));
    let folder = |name| bench.host.folder().join(name);
    let spec = |name, socket| bench.spec(name).with_vgpu(socket);
    let mut a = Vm::start(bench.lab, &spec("a", &first), &folder("a")).unwrap();
    let mut b = Vm::start(bench.lab, &spec("b", &second), &folder("b")).unwrap();
    a.wait_boot().unwrap();
    b.wait_boot().unwrap();
    b.guest.start("vgpu-guest --json bench --seconds 4", LIMIT).unwrap();
    job(&mut a, "vadd --n 10000");

    // Another worker continues, and QEMU and the guest do not notice.
    for _ in 0..10 {
        let worker = bench.worker(A);
        kill(worker, Signal::SIGKILL).unwrap();
        job(&mut a, "vadd --n 10000");
        eventually("another worker", || bench.worker(A) != worker);
    }
    // Where no worker can continue, the VM loses its device in the midst of its accesses.
    a.guest.start("vgpu-guest bench --seconds 60", LIMIT).unwrap();
    let worker = bench.worker(A);
    kill_workers_of(parent_of(worker));
    let load = b.guest.finish(LIMIT).unwrap().success().unwrap();
    let load: Value = serde_json::from_str(&load.stdout).unwrap();
    assert!(load["verified"].as_u64().unwrap() > 0, "{load}");
    assert_ne!(a.guest.finish(LIMIT).unwrap().status, 0, "a lost device must report errors");
    runs_without_its_device(&mut a);
    a.kill();

    eventually("a new worker", || {
        let vgpu = bench.host.vgpu(A).unwrap();
        vgpu["state"] == "running" && vgpu["pid"] != json!(worker.as_raw())
    });
    let mut a = bench.boot(&spec("a", &first));
    job(&mut a, "vadd --n 10000");
    job(&mut b, "vadd --n 10000");

    // An anchor takes the connection to QEMU with it.
    kill(parent_of(bench.worker(B)), Signal::SIGKILL).unwrap();
    runs_without_its_device(&mut b);
    job(&mut a, "vadd --n 10000");
}

/// Kills the workers of an anchor as soon as they start, until it ends.
fn kill_workers_of(anchor: Pid) {
    let children = format!("/proc/{anchor}/task/{anchor}/children");
    let end = Instant::now() + LIMIT;
    while let Ok(workers) = std::fs::read_to_string(&children) {
        assert!(Instant::now() < end, "workers are started without end");
        for worker in workers.split_whitespace() {
            // It may have ended already.
            let _ = kill(Pid::from_raw(worker.parse().unwrap()), Signal::SIGKILL);
        }
    }
}

fn runs_without_its_device(vm: &mut Vm) {
    vm.guest.run("true", LIMIT).unwrap().success().unwrap();
    let failed = vm.guest.run("vgpu-guest vadd", LIMIT).unwrap();
    assert_ne!(failed.status, 0, "a lost device must report errors");
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn vms_run_without_a_manager_and_the_next_one_adopts_them() {
    let mut bench = Bench::new();
    let socket = bench.vgpu(A);
    let mut vm = bench.boot(&bench.spec("adopted").with_vgpu(&socket));
    let worker = bench.worker(A);
    bench.host.kill_daemon().unwrap();
    job(&mut vm, "vadd --n 10000");
    bench.host.start_daemon().unwrap();
    eventually("adoption", || bench.host.vgpu(A).is_ok_and(|vgpu| vgpu["state"] == "running"));
    assert_eq!(bench.worker(A), worker);
    assert_eq!(bench.host.vgpu(A).unwrap()["vm"]["pid"], json!(vm.pid().as_raw()));
    job(&mut vm, "vadd --n 10000");
    vm.quit().unwrap();
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn keys_typed_in_a_viewer_reach_the_vm() {
    let bench = Bench::new();
    let socket = bench.vgpu(A);
    let mut vm = bench.boot(&bench.spec("typed").with_vgpu(&socket));
    let reader = "(read line; echo \"$line\" > /tmp/typed) < /dev/tty1 > /dev/null 2>&1 & true";
    vm.guest.run(reader, LIMIT).unwrap();
    let says = bench.host.folder().join("view.json");
    let keys = vm.keys();
    let view = ["view", A, "--print", "--output", "json", "--monitor", &keys.to_string_lossy()];
    let mut command = bench.host.command(&view).unwrap();
    command.stdout(std::fs::File::create(&says).unwrap());
    let _view = Process::spawn(command, Signal::SIGTERM).unwrap();
    let mut said = Value::Null;
    eventually("a door", || {
        let text = std::fs::read(&says).unwrap_or_default();
        said = serde_json::from_slice(&text).unwrap_or_default();
        !said.is_null()
    });
    let mut stream = UnixStream::connect(said["socket"].as_str().unwrap()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    // Handshake of a viewer without a password; key events need no picture.
    stream.read_exact(&mut [0; 12]).unwrap();
    stream.write_all(b"RFB 003.008\n\x01").unwrap();
    stream.read_exact(&mut [0; 6]).unwrap();
    stream.write_all(&[1]).unwrap();
    stream.read_exact(&mut [0; 24]).unwrap();
    for key in "Hello vgpu\r".chars() {
        let keysym = if key == '\r' { 0xff0d } else { u32::from(key) };
        let strokes = [(1, keysym), (0, keysym)];
        let shift = key.is_ascii_uppercase().then_some(0xffe1_u32);
        let down = shift.into_iter().map(|shift| (1, shift));
        let up = shift.into_iter().map(|shift| (0, shift));
        for (down, keysym) in down.chain(strokes).chain(up) {
            let mut message = vec![4, down, 0, 0];
            message.extend(keysym.to_be_bytes());
            stream.write_all(&message).unwrap();
        }
        // QEMU's PS/2 keyboard queues 16 bytes and drops keys that a slow guest has not read.
        std::thread::sleep(Duration::from_millis(100));
    }
    let mut typed = String::new();
    eventually("the line is read", || {
        typed = vm.guest.run("cat /tmp/typed 2>/dev/null", LIMIT).unwrap().stdout;
        !typed.is_empty()
    });
    assert_eq!(typed.trim_end(), "Hello vgpu");
    vm.quit().unwrap();
}
