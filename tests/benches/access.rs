//! Cost of a trapped access to a vGPU, as its VM sees it.
//!
//! `cargo bench -p system-tests --bench access`. The client sleeps while it waits, like a virtual
//! CPU. The plain socket, with a process that sends each byte back, is the baseline. Then a program
//! in a VM of QEMU measures accesses. Then a process of the client makes CUDA contexts, and the
//! accesses meanwhile are measured. At last, workers are killed in the midst of accesses: the
//! longest access is the interruption. A `vgpud` beside the benchmark's own file, such as that of
//! another release, is measured instead.

// Clippy recognizes only functions marked as tests.
#![allow(clippy::unwrap_used)]

#[path = "../tests/cuda/queue_vm.rs"]
mod queue_vm;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use lab::Lab;
use lab::host::Host;
use lab::progress::Progress;
use lab::qemu::{Vm as QemuVm, VmSpec};
use mdev_core::abi::control::reg;
use nix::sys::signal::Signal;
use serde_json::json;
use system_tests::raw_client::{REGION_READ, REGION_WRITE, RawClient};
use system_tests::vcpu::Vcpu;
use system_tests::{Vgpud, bytes, kill_process};
use vendor_backends::nvidia::frontend::testing::program::Program;

use crate::queue_vm::Vm;

const TURNS: usize = 5;
const ACCESSES: usize = 10_000;
/// Contexts that a process of the VM makes.
const CONTEXTS: usize = 200;
/// Workers that are killed.
const KILLS: usize = 100;
/// Control registers.
const CONTROL: u32 = 3;
/// vGPU of the VM.
const VGPU: &str = "0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d0ac";
const LIMIT: Duration = Duration::from_secs(120);

fn main() {
    let vgpud = Vgpud::start().unwrap();
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true })).unwrap();
    let mut client = RawClient::attach(&vgpud.vfio_socket(&uuid));
    let mut echo = echo();
    let (mut reads, mut writes, mut plain) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..TURNS {
        measure(&mut plain, || {
            echo.write_all(&[0; 32]).unwrap();
            echo.read_exact(&mut [0; 32]).unwrap();
        });
        let read = bytes![reg::MAGIC, CONTROL, 4_u32];
        measure(&mut reads, || drop(client.ok(REGION_READ, &read)));
        let write = bytes![reg::WAKE, CONTROL, 4_u32, 0_u32];
        measure(&mut writes, || drop(client.ok(REGION_WRITE, &write)));
    }
    println!("{:<28} {:>9} {:>9} {:>12}", "", "p50 us", "p99 us", "/ socket p50");
    let baseline = percentile(&mut plain, 50);
    for (name, times) in [("socket", plain), ("register read", reads), ("register write", writes)] {
        let mut times = times;
        let [p50, p99] = [50, 99].map(|n| percentile(&mut times, n));
        println!("{name:<28} {p50:>9.2} {p99:>9.2} {:>12.2}", p50 / baseline);
    }
    in_vm(baseline);
    beside_contexts(&vgpud);
    interruptions(&vgpud, &uuid, &mut Vcpu::new(client));
}

/// Measures accesses of a program in a VM, by the VM's clock.
fn in_vm(baseline: f64) {
    let (lab, mut programs) = Lab::open_with_host(&Progress::new()).unwrap();
    let path = system_tests::vgpud().unwrap().to_owned();
    programs.programs.insert("vgpud".to_owned(), path);
    let host = Host::start(&programs, &["soft:soft0,vram=1G"]).unwrap();
    let socket = host.start_vgpu(VGPU, "SOFT-256MC", None).unwrap();
    let spec = VmSpec { kvm: lab.kvm, ..VmSpec::new("access") }.with_vgpu(&socket);
    let mut vm = QemuVm::boot(&lab, &spec, &host.folder().join("access")).unwrap();
    let times = vm.guest.run_json("vgpu-guest --json access", LIMIT).unwrap();
    for (name, key) in [("read in a VM", "read_us"), ("write in a VM", "write_us")] {
        let median = times[key].as_f64().unwrap();
        println!("{name:<28} {median:>9.2} {:>9} {:>12.2}", "", median / baseline);
    }
    vm.quit().unwrap();
}

/// Measures accesses while a process of the same VM makes contexts.
fn beside_contexts(vgpud: &Vgpud) {
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true })).unwrap();
    let (mut quiet, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..CONTEXTS {
        let mut driver = Vm::attach(vgpud, &uuid).unwrap().start().unwrap();
        (0..ACCESSES / CONTEXTS).for_each(|_| driver.bus.measure());
        quiet.extend(driver.bus.accesses.replace(Vec::new()).unwrap());
        let mut program = Program::start(&mut driver);
        program.channel(&mut driver);
        for file in [program.control, program.gpu, program.uvm] {
            driver.close(file).unwrap();
        }
        beside.extend(driver.bus.accesses.take().unwrap());
    }
    println!("\nAccesses while a process of the VM makes {CONTEXTS} contexts, us");
    for (name, mut times) in [("nothing", quiet), ("contexts", beside)] {
        let count = times.len();
        let late = times.iter().filter(|time| **time > Duration::from_millis(1)).count();
        let [p50, p99, most] = [50, 99, 100].map(|n| percentile(&mut times, n));
        print!("beside {name:<9} p50 {p50:.1}, p99 {p99:.1}, longest {most:.1}; ");
        println!("{late} of {count} over 1 ms");
    }
}

/// Kills workers while their VM reads a register, and prints how long the reads took.
fn interruptions(vgpud: &Vgpud, uuid: &str, vcpu: &mut Vcpu) {
    let read = bytes![reg::MAGIC, CONTROL, 4_u32];
    let mut longest = Vec::new();
    for number in 0..KILLS {
        let worker = vgpud.show(uuid).unwrap()["pid"].as_u64().unwrap();
        let killer = thread::spawn(move || {
            thread::sleep(Duration::from_micros(20_000 + number as u64 * 37 % 1000));
            kill_process(worker as u32, Signal::SIGKILL).unwrap();
        });
        let (since, mut most) = (Instant::now(), Duration::ZERO);
        while since.elapsed() < Duration::from_millis(150) {
            let begun = Instant::now();
            vcpu.access(REGION_READ, &read);
            most = most.max(begun.elapsed());
        }
        killer.join().unwrap();
        longest.push(most);
    }
    let [p50, p99, worst] = [50, 99, 100].map(|n| percentile(&mut longest, n) / 1000.0);
    println!("\nInterruption by the death of a worker, {KILLS} times, ms");
    println!("p50 {p50:.1}, p99 {p99:.1}, worst {worst:.1}");
}

/// Returns a socket whose peer sends everything back.
fn echo() -> UnixStream {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        let mut bytes = [0; 32];
        while theirs.read_exact(&mut bytes).is_ok() && theirs.write_all(&bytes).is_ok() {}
    });
    ours
}

fn measure(times: &mut Vec<Duration>, mut access: impl FnMut()) {
    for _ in 0..ACCESSES {
        let since = Instant::now();
        access();
        times.push(since.elapsed());
    }
}

/// Returns a percentile in microseconds.
fn percentile(times: &mut [Duration], percent: usize) -> f64 {
    times.sort_unstable();
    times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e6
}
