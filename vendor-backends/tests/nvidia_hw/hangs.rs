//! Kernels without an end, and long work that ends, on a real GPU. The guest that has them is in a
//! process of its own: the log of context switches tells processes apart.

use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mdev_core::abi::qmd::{Launch, Qmd};
use mdev_core::abi::{compute, host, notifier, userd};
use mdev_core::gpu::{EngineKind, Gpu};
use mdev_core::ids::VgpuId;
use mdev_core::units::{GIB, MIB};
use nvidia_rm::KernelDriver;
use vendor_backends::conformance::{Driver, Pushbuffer, Ring};
use vendor_backends::nvidia::{NvidiaClient, NvidiaGpu};

use super::{client, gpu, spec};

/// Place of the launch descriptor, the program and its constants in guest memory.
const QMD: u64 = 12 * MIB;
const PROGRAM: u64 = QMD + 0x1000;
const CONSTANTS: u64 = QMD + 0x2000;
/// Place of the USERD of a driver's first ring.
const USERD: u64 = 0x1000;

/// `BRA` to itself, for sm_90.
const ENDLESS: [u64; 2] = [0xffff_fffc_00fc_7947, 0x000f_c000_0383_ffff];
/// `EXIT`, for sm_90.
const END: [u64; 2] = [0x0000_0000_0000_794d, 0x000f_ea00_0380_0000];

/// Time that is longer than the hang limit.
const LONG: Duration = Duration::from_millis(180);

/// Variable that makes [`guest_in_a_process_of_its_own`] that guest.
const GUEST: &str = "TESSERA_TEST_GUEST";

/// Time after its last work after which a vGPU is certainly idle.
const IDLE: Duration = Duration::from_millis(200);

/// Time for which a test watches a guest whose work ends.
const WATCHED: Duration = Duration::from_millis(1500);

/// Returns methods that launch blocks that execute one instruction again and again.
fn kernel(driver: &Driver, instruction: [u64; 2], blocks: u32) -> Pushbuffer {
    let code: Vec<u8> = instruction.repeat(16).iter().flat_map(|word| word.to_le_bytes()).collect();
    driver.write(PROGRAM, &code);
    let descriptor = Qmd::from(Launch {
        grid: [blocks, 1, 1],
        block: [32, 1, 1],
        program: driver.va(PROGRAM),
        constants: driver.va(CONSTANTS),
        constant_bytes: 0x1000,
        registers: 32,
    });
    driver.write(QMD, &descriptor.to_bytes());
    let compute = host::SUBCHANNEL_COMPUTE;
    Pushbuffer::default()
        .method(compute, compute::SET_SHADER_SHARED_MEMORY_WINDOW_A, &[0x70, 0])
        .method(compute, compute::SET_SHADER_LOCAL_MEMORY_WINDOW_A, &[0x71, 0])
        .method(compute, compute::INVALIDATE_SKED_CACHES, &[0])
        .method(compute, compute::INVALIDATE_SHADER_CACHES, &[0x1011])
        .method(compute, compute::SEND_PCAS_A, &[(driver.va(QMD) >> 8) as u32])
        .method(compute, compute::SEND_SIGNALING_PCAS2_B, &[compute::PCAS_INVALIDATE_COPY_SCHEDULE])
}

/// A method of the class: those of the host do not need the engine.
fn no_op() -> Pushbuffer {
    Pushbuffer::default().method(host::SUBCHANNEL_COMPUTE, compute::NO_OPERATION, &[0])
}

/// Copies that take some milliseconds together.
fn copies(driver: &Driver) -> Pushbuffer {
    let (from, to) = (driver.va(12 * MIB), driver.va(24 * MIB));
    (0..40).fold(Pushbuffer::default(), |push, _| push.copy(from, to, 8 << 20))
}

/// Guest of the tests below, in a process of its own. Its standard input is the connection to the
/// manager.
#[test]
fn guest_in_a_process_of_its_own() {
    let Ok(kind) = std::env::var(GUEST) else { return };
    let connection = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let client = NvidiaClient::open(Arc::new(KernelDriver), connection).unwrap();
    let driver = Driver::new(Box::new(client));
    match kind.as_str() {
        "copies" | "one long kernel" | "kernels" => work_that_ends(driver, &kind),
        _ => endless_work(driver, &kind),
    }
}

/// Runs a kernel without an end until its channel is reset.
fn endless_work(mut driver: Driver, kind: &str) {
    let mut ring = driver.ring(EngineKind::Compute);
    // Destroyed while the kernel runs.
    let second = (kind == "destroys").then(|| driver.ring(EngineKind::Compute));
    if kind == "forges later" {
        std::thread::sleep(Duration::from_millis(600));
    }
    let push = kernel(&driver, ENDLESS, 1);
    driver.submit(&mut ring, push);
    let (started, mut get) = (Instant::now(), 0_u32);
    if let Some(second) = second {
        std::thread::sleep(Duration::from_millis(300));
        let destroying = Instant::now();
        driver.destroy(second);
        println!("one of two channels destroyed in {:?}", destroying.elapsed());
    }
    let error = loop {
        let error = driver.client().query_channel(ring.id()).unwrap().error;
        if error != 0 || started.elapsed() > Duration::from_secs(6) {
            break error;
        }
        if kind != "honest" {
            get = (get + 1) % 64;
            driver.write(USERD + userd::GP_GET, &get.to_le_bytes());
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    println!("{kind}: error {error} after {:?}, {:?}", started.elapsed(), driver.client().usage());
    assert_eq!(error, notifier::RESET_CHANNEL);
}

/// Submits work on the compute engine, and expects that all of it is completed.
fn work_that_ends(mut driver: Driver, kind: &str) {
    let mut ring = driver.ring(EngineKind::Compute);
    let mut run = |driver: &mut Driver, push: Pushbuffer, times: u32| {
        let started = Instant::now();
        let done = (0..times).map(|_| driver.submit(&mut ring, push.clone())).last().unwrap();
        let completed = driver.wait_for(done, Duration::from_secs(3));
        let status = driver.client().query_channel(ring.id()).unwrap();
        let usage = driver.client().usage().unwrap();
        println!("{kind}: {completed} after {:?}, {status:?}, {usage:?}", started.elapsed());
        assert!(completed && status.error == 0);
        started.elapsed()
    };
    // How long blocks take that end at once.
    let first = kernel(&driver, END, 1 << 20);
    run(&mut driver, first, 1);
    let again = kernel(&driver, END, 1 << 24);
    let taken = run(&mut driver, again, 1);
    let blocks = |time: Duration| {
        let blocks = (1 << 24) * time.as_nanos() / taken.as_nanos();
        u32::try_from(blocks).unwrap().min(i32::MAX as u32)
    };
    let (push, times) = match kind {
        "copies" => (copies(&driver), 50),
        "one long kernel" => (kernel(&driver, END, blocks(2 * LONG)), 1),
        _ => (kernel(&driver, END, blocks(LONG / 3)), 20),
    };
    std::thread::sleep(IDLE);
    let taken = run(&mut driver, push, times);
    assert!(taken > LONG, "{kind} took {taken:?} only");
}

/// Starts the guest, and waits until it has a channel.
fn start_guest(gpu: &mut NvidiaGpu, kind: &str) -> (Child, VgpuId) {
    let spec = spec(GIB);
    let connection = gpu.admit(&spec).unwrap().fd.unwrap().into_trusted();
    let guest = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "hangs::guest_in_a_process_of_its_own", "--nocapture"])
        .env(GUEST, kind)
        .stdin(Stdio::from(connection))
        .spawn()
        .unwrap();
    let started = Instant::now();
    let mut has_channels = || {
        let report = gpu.usage().unwrap();
        report.vgpus.iter().any(|(id, usage)| *id == spec.vgpu && usage.channels > 0)
    };
    while !has_channels() {
        assert!(started.elapsed() < Duration::from_secs(5));
        std::thread::sleep(Duration::from_millis(5));
    }
    (guest, spec.vgpu)
}

/// Lets the manager tell the vGPUs about each other for some time.
fn watch(gpu: &mut NvidiaGpu, time: Duration) {
    let started = Instant::now();
    while started.elapsed() < time {
        gpu.usage().unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Submits a method and waits until the engine has executed it. Returns the time that it took.
fn time_of_no_op(gpu: &mut NvidiaGpu, driver: &mut Driver, ring: &mut Ring) -> Duration {
    let started = Instant::now();
    let done = driver.submit(ring, no_op());
    while !driver.wait_for(done, Duration::from_millis(2)) {
        assert!(started.elapsed() < Duration::from_millis(2500));
        gpu.usage().unwrap();
    }
    started.elapsed()
}

/// A guest that shows fetches keeps the engine for longer, and not for ever. The entry of the vGPU
/// that waits may have been fetched as well.
#[test]
fn an_endless_kernel_is_reset_whatever_its_guest_shows() {
    for kind in ["honest", "forges", "destroys"] {
        let Some(mut gpu) = gpu() else { return };
        // First, since an endless kernel would keep the engine from it.
        let mut other = Driver::new(client(&mut gpu, GIB));
        let mut work = other.ring(EngineKind::Compute);
        watch(&mut gpu, IDLE);
        let (mut guest, _) = start_guest(&mut gpu, kind);
        watch(&mut gpu, Duration::from_millis(200));
        let waited = time_of_no_op(&mut gpu, &mut other, &mut work);
        println!("{kind}: the other waited for {waited:?}");
        assert!(guest.wait().unwrap().success(), "{kind}");
        assert_eq!(other.client().query_channel(work.id()).unwrap().error, 0);
        // The kernel was not reset before the other one waited.
        let expected = Duration::from_millis(100)..Duration::from_millis(600);
        assert!(expected.contains(&waited), "{kind}: {waited:?}");
    }
}

/// The kernel begins between two short submissions of another vGPU, which waits for each of them.
#[test]
fn an_endless_kernel_is_reset_beside_short_work() {
    let Some(mut gpu) = gpu() else { return };
    let mut other = Driver::new(client(&mut gpu, GIB));
    let mut work = other.ring(EngineKind::Compute);
    let (mut guest, _) = start_guest(&mut gpu, "forges later");
    let (started, mut longest, mut count) = (Instant::now(), Duration::ZERO, 0);
    while started.elapsed() < WATCHED {
        longest = longest.max(time_of_no_op(&mut gpu, &mut other, &mut work));
        count += 1;
        gpu.usage().unwrap();
    }
    println!("{count} submissions, the longest took {longest:?}");
    assert!(guest.wait().unwrap().success());
    assert!(longest < Duration::from_millis(600), "{longest:?}");
}

#[test]
fn long_work_that_ends_is_not_reset_while_others_are_idle_or_copy() {
    // A kernel beyond the limit is reset while others have work, and copies are work.
    let cases =
        [("copies", false), ("copies", true), ("one long kernel", false), ("kernels", true)];
    for (kind, other_copies) in cases {
        let Some(mut gpu) = gpu() else { return };
        let mut other = Driver::new(client(&mut gpu, GIB));
        let mut compute = other.ring(EngineKind::Compute);
        other.finish(&mut compute, no_op());
        let mut ring = other.ring(EngineKind::Copy);
        let (mut guest, vgpu) = start_guest(&mut gpu, kind);
        let (started, mut resets) = (Instant::now(), 0);
        while started.elapsed() < WATCHED && guest.try_wait().unwrap().is_none() {
            if other_copies {
                let push = copies(&other);
                other.finish(&mut ring, push);
            }
            let report = gpu.usage().unwrap();
            let usage = report.vgpus.iter().find(|(id, _)| *id == vgpu).map(|(_, usage)| *usage);
            resets = resets.max(usage.map_or(0, |usage| usage.hang_resets));
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(guest.wait().unwrap().success(), "{kind}, the other copies: {other_copies}");
        assert_eq!(resets, 0, "{kind}, the other copies: {other_copies}");
    }
}
