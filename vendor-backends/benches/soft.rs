//! Costs of the software GPU, each compared to a baseline from the same run. Run with `cargo bench
//! -p vendor-backends`.
#![allow(clippy::unwrap_used, reason = "a benchmark")]

use std::hint::black_box;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ipc::mem::SharedMemory;
use ipc::seqpacket::SeqPacketListener;
use mdev_core::abi::copy::{self, launch};
use mdev_core::abi::host;
use mdev_core::gpu::{ClientSpec, EngineKind, Gpu, Usage};
use mdev_core::ids::VgpuId;
use mdev_core::units::{GIB, MIB};
use nix::time::{ClockId, clock_gettime};
use vendor_backends::conformance::{Driver, Pushbuffer, Ring};
use vendor_backends::mediator::{MediatedClient, MediatedGpu, server};
use vendor_backends::soft::SoftGpu;

const COPY_BYTES: u64 = 256 * MIB;

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("admin.sock");
    let listener = SeqPacketListener::bind(&path).unwrap();
    let gpu = Arc::new(SoftGpu::new("soft0", 4 * GIB));
    thread::spawn(move || server::run(gpu, Duration::from_secs(60), &listener).unwrap());
    let mut gpu = MediatedGpu::connect(&path).unwrap();
    large_copy(&mut gpu);
    latency(&mut gpu);
    idle(&mut gpu);
    preemption(&mut gpu);
    shares(&mut gpu);
}

fn admit(gpu: &mut MediatedGpu) -> (VgpuId, Driver) {
    let spec = ClientSpec {
        vgpu: VgpuId::random(),
        vram_bytes: 64 * MIB,
        framebuffer_bytes: 0,
        max_channels: 8,
        max_import_bytes: 2 * GIB,
    };
    let client =
        MediatedClient::open(gpu.admit(&spec).unwrap().fd.unwrap().into_trusted()).unwrap();
    (spec.vgpu, Driver::new(Box::new(client)))
}

fn usage(gpu: &mut MediatedGpu, vgpu: VgpuId) -> Usage {
    gpu.usage().unwrap().vgpus.into_iter().find(|(id, _)| *id == vgpu).unwrap().1
}

/// Copies 256 MiB between two ranges of guest memory, through a channel and by memcpy on the same
/// kind of mapping.
fn large_copy(gpu: &mut MediatedGpu) {
    let (vgpu, mut driver) = admit(gpu);
    let (memory, id) = driver.import(2 * COPY_BYTES);
    let va = driver.va(4 * GIB);
    driver.map(va, 2 * COPY_BYTES, id);
    memory.mapping.write(0, &vec![7; COPY_BYTES as usize]).unwrap();
    let mut ring = driver.ring(EngineKind::Copy);
    let plain = SharedMemory::new(c"plain", 2 * COPY_BYTES).unwrap();
    plain.mapping.write(0, &vec![7; COPY_BYTES as usize]).unwrap();
    let mut interrupt = driver.set_vector(0);
    let (mut through, mut engine) = (Vec::new(), Vec::new());
    let (mut memcpy, mut memcpy_cpu) = (Vec::new(), Vec::new());
    for _ in 0..16 {
        let push = Pushbuffer::default()
            .copy(va, va + COPY_BYTES, COPY_BYTES as u32)
            .host(host::NON_STALL_INTERRUPT, 0);
        let (before, started) = (usage(gpu, vgpu).engine_ns, Instant::now());
        let done = driver.submit(&mut ring, push);
        interrupt.read_exact(&mut [0; 8]).unwrap();
        through.push(started.elapsed());
        driver.wait_spinning(done);
        engine.push(Duration::from_nanos(usage(gpu, vgpu).engine_ns - before));
        let (cpu, started) = (cpu_time(ClockId::CLOCK_THREAD_CPUTIME_ID), Instant::now());
        let whole = COPY_BYTES as usize;
        plain.mapping.copy(0, &plain.mapping, COPY_BYTES, whole, false).unwrap();
        memcpy.push(started.elapsed());
        memcpy_cpu.push(cpu_time(ClockId::CLOCK_THREAD_CPUTIME_ID).saturating_sub(cpu));
    }
    // The minimum of each: the machine may be busy, and the first round allocates the pages.
    let [through, engine, memcpy, memcpy_cpu] =
        [through, engine, memcpy, memcpy_cpu].map(|times| times.into_iter().min().unwrap());
    let rate = |time: Duration| COPY_BYTES as f64 / time.as_secs_f64() / 1e9;
    println!(
        "copy of 256 MiB: {:.2} GB/s, memcpy {:.2} GB/s: {:.1} %; in engine and CPU time {:.1} %",
        rate(through),
        rate(memcpy),
        100.0 * rate(through) / rate(memcpy),
        100.0 * rate(engine) / rate(memcpy_cpu)
    );
}

/// Measures the time from GP_PUT to the semaphore on a busy channel.
fn latency(gpu: &mut MediatedGpu) {
    let (vgpu, mut driver) = admit(gpu);
    let mut ring = driver.ring(EngineKind::Copy);
    let mut times = Vec::new();
    for _ in 0..20_000 {
        let started = Instant::now();
        let done = driver.submit(&mut ring, Pushbuffer::default());
        driver.wait_spinning(done);
        times.push(started.elapsed());
    }
    times.sort_unstable();
    let usage = usage(gpu, vgpu);
    println!(
        "doorbell to semaphore: p50 {:.2} us, p99 {:.2} us; {} doorbells polled, {} wake-ups",
        micros(times[times.len() / 2]),
        micros(times[times.len() * 99 / 100]),
        usage.polled_doorbells,
        usage.wakeups
    );
    // Baseline: two threads that exchange one word through shared memory.
    let shared = SharedMemory::new(c"words", 4096).unwrap().mapping;
    let echo = shared.clone();
    let rounds = 20_000;
    let thread = thread::spawn(move || {
        for round in 1..=rounds {
            while echo.load_u32(0) != Some(round) {
                std::hint::spin_loop();
            }
            echo.store_u32(64, round).unwrap();
        }
    });
    let mut times: Vec<Duration> = (1..=rounds)
        .map(|round| {
            let started = Instant::now();
            shared.store_u32(0, round).unwrap();
            while shared.load_u32(64) != Some(round) {
                std::hint::spin_loop();
            }
            started.elapsed()
        })
        .collect();
    thread.join().unwrap();
    println!("  (two threads that exchange one word: p50 {:.2} us)", micros(median(&mut times)));
}

/// Measures the CPU time of this process while vGPUs with channels are idle.
fn idle(gpu: &mut MediatedGpu) {
    let mut drivers: Vec<_> = (0..8).map(|_| admit(gpu).1).collect();
    let _rings: Vec<Ring> = drivers.iter_mut().map(|d| d.ring(EngineKind::Compute)).collect();
    thread::sleep(Duration::from_millis(100));
    let cpu = || cpu_time(ClockId::CLOCK_PROCESS_CPUTIME_ID);
    let (before, started) = (cpu(), Instant::now());
    thread::sleep(Duration::from_secs(3));
    let share = cpu().saturating_sub(before).as_secs_f64() / started.elapsed().as_secs_f64();
    println!("idle, 8 vGPUs with a channel each: {:.3} % of a core", share * 100.0);
}

/// Measures how long a vGPU waits for the engine beside an endless kernel, with the shortest
/// slices.
fn preemption(gpu: &mut MediatedGpu) {
    let (hog, mut endless) = admit(gpu);
    let (polite, mut driver) = admit(gpu);
    let slice = Duration::from_micros(100);
    gpu.set_timeslice(hog, slice).unwrap();
    gpu.set_timeslice(polite, slice).unwrap();
    let mut hog_ring = endless.ring(EngineKind::Compute);
    endless.spin_forever(&mut hog_ring);
    let mut ring = driver.ring(EngineKind::Copy);
    let mut times = Vec::new();
    for _ in 0..2_000 {
        let started = Instant::now();
        let done = driver.submit(&mut ring, Pushbuffer::default());
        driver.wait_spinning(done);
        times.push(started.elapsed());
        black_box(&times);
    }
    times.sort_unstable();
    println!(
        "submission beside an endless kernel, 100 us slices: p50 {:.0} us, p99 {:.0} us",
        micros(times[times.len() / 2]),
        micros(times[times.len() * 99 / 100])
    );
    // A control request interrupts the kernel between two chunks.
    let mut times: Vec<Duration> = (0..2_000)
        .map(|_| {
            let started = Instant::now();
            endless.client().query_channel(hog_ring.id()).unwrap();
            started.elapsed()
        })
        .collect();
    let mut idle_times: Vec<Duration> = (0..2_000)
        .map(|_| {
            let started = Instant::now();
            endless.client().usage().unwrap();
            started.elapsed()
        })
        .collect();
    println!(
        "request that stops an endless kernel: p50 {:.0} us; one that does not: {:.0} us",
        micros(median(&mut times)),
        micros(median(&mut idle_times))
    );
}

/// Measures the shares of two busy vGPUs with slices of 4 and 1 ms.
fn shares(gpu: &mut MediatedGpu) {
    let mut vgpus = Vec::new();
    for slice in [4, 1] {
        let (vgpu, mut driver) = admit(gpu);
        gpu.set_timeslice(vgpu, Duration::from_millis(slice)).unwrap();
        let mut ring = driver.ring(EngineKind::Copy);
        let data = driver.va(20 * MIB);
        let push = Pushbuffer::default()
            .addresses(data, data + 8 * MIB)
            .copy_method(copy::PITCH_IN, &[0, 0, 1 << 20, u32::MAX])
            .launch(launch::MULTI_LINE);
        driver.submit(&mut ring, push);
        vgpus.push((vgpu, driver));
    }
    thread::sleep(Duration::from_millis(100));
    let before: Vec<u64> = vgpus.iter().map(|(id, _)| usage(gpu, *id).engine_ns).collect();
    thread::sleep(Duration::from_secs(5));
    let after: Vec<u64> = vgpus.iter().map(|(id, _)| usage(gpu, *id).engine_ns).collect();
    let used: Vec<f64> = before.iter().zip(&after).map(|(b, a)| (a - b) as f64).collect();
    println!("shares at 4:1 over 5 s: {:.2} % (asked 80)", 100.0 * used[0] / (used[0] + used[1]));
}

fn cpu_time(clock: ClockId) -> Duration {
    clock_gettime(clock).unwrap().into()
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
