//! NVIDIA backend on a real GPU. Skips the tests, with a message, if there is none.
//!
//! Run the tests as a user without capabilities:
//! `cargo test -p vendor-backends --test nvidia_hw -- --nocapture --test-threads=1`
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod hangs;
mod hostile_guest;
mod switch_probe;

use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mdev_core::abi::mailbox::VA_START;
use mdev_core::gpu::{Client, ClientSpec, EngineKind, Gpu, GpuCapabilities, GuestRam, MapRequest};
use mdev_core::ids::{SpaceId, VgpuId};
use mdev_core::units::{GIB, MIB};
use nvidia_rm::KernelDriver;
use nvidia_rm::rm::Rm;
use nvidia_rm::rm_recorder::RmRecorder;
use nvidia_rm::version::Layout;
use vendor_backends::conformance::{self, Driver, Pushbuffer, lifecycle};
use vendor_backends::nvidia::device::{Device, cards};
use vendor_backends::nvidia::observers::ctxsw_log::CtxswLog;
use vendor_backends::nvidia::{NvidiaClient, NvidiaGpu, Options};

fn gpu() -> Option<NvidiaGpu> {
    gpu_with(Options::default())
}

fn gpu_with(options: Options) -> Option<NvidiaGpu> {
    let rm = Arc::new(KernelDriver);
    let Ok(all) = NvidiaGpu::list(&*rm) else {
        // Not captured by the test harness, which hides the output of passing tests.
        let _ = writeln!(std::io::stderr(), "skipped: this machine has no NVIDIA GPU");
        return None;
    };
    Some(NvidiaGpu::open(rm, &all[0], options).unwrap())
}

fn spec(vram_bytes: u64) -> ClientSpec {
    ClientSpec {
        vgpu: VgpuId::random(),
        vram_bytes,
        framebuffer_bytes: 0,
        max_channels: 16,
        max_import_bytes: 16 * GIB,
    }
}

fn client(gpu: &mut NvidiaGpu, vram_bytes: u64) -> Box<dyn Client> {
    let admission = gpu.admit(&spec(vram_bytes)).unwrap();
    Box::new(
        NvidiaClient::open(Arc::new(KernelDriver), admission.fd.unwrap().into_trusted()).unwrap(),
    )
}

#[test]
fn a_copy_on_each_engine_completes() {
    let Some(mut gpu) = gpu() else { return };
    println!("{:?}", gpu.describe());
    let started = Instant::now();
    let client = client(&mut gpu, 2 * GIB);
    println!("client with 2 GiB opened in {:?}", started.elapsed());
    let mut driver = Driver::new(client);
    for engine in [EngineKind::Copy, EngineKind::Compute] {
        let started = Instant::now();
        let mut ring = driver.ring(engine);
        println!("{engine:?} channel made and bound in {:?}", started.elapsed());
        driver.write(12 * MIB, &[7; 4096]);
        let (from, to) = (driver.va(12 * MIB), driver.va(13 * MIB));
        driver.finish(&mut ring, Pushbuffer::default().copy(from, to, 4096));
        assert_eq!(driver.read(13 * MIB, 4096), [7; 4096]);
        println!("{:?}", driver.client().query_channel(ring.id()));
        let mut second = driver.ring(engine);
        driver.finish(&mut second, Pushbuffer::default().copy(from, to, 4096));
        let started = Instant::now();
        driver.destroy(second);
        println!("second channel of its group destroyed in {:?}", started.elapsed());
        driver.finish(&mut ring, Pushbuffer::default().copy(from, to, 4096));
        let started = Instant::now();
        driver.destroy(ring);
        println!("last channel destroyed in {:?}", started.elapsed());
    }
    println!("usage {:?}", driver.client().usage());
    println!("manager's view {:?}", gpu.usage());
    let started = Instant::now();
    drop(driver);
    println!("client closed in {:?}", started.elapsed());
}

#[test]
fn engine_time_is_measured() {
    if gpu().is_none() {
        return;
    }
    let rm: Arc<dyn Rm> = Arc::new(KernelDriver);
    let layout = Layout::of(&rm.version().unwrap()).unwrap();
    let card = cards(&*rm).unwrap()[0].clone();
    let device = Device::open(rm, layout, &card).unwrap();
    for engine in 9..20 {
        let mut pair = nvidia_rm::abi::Pair { first: engine, second: 0 };
        println!(
            "engine {engine}: {:?} {pair:x?}",
            device.subdevice.control(0x2080_2a02, &mut pair)
        );
    }
    let usermode = device.usermode().unwrap();
    let whole = device.rm_client.aperture(
        &device.device,
        &usermode,
        device.rm_client.gpu_node(),
        0x1_0000,
        0,
    );
    let mapped = whole.map(|fd| ipc::mem::Mapping::new(fd.as_fd(), 0, 0x1_0000, true).map(drop));
    println!("64 KiB of the usermode region: {mapped:?}");
    let fd = device
        .rm_client
        .aperture(&device.device, &usermode, device.rm_client.gpu_node(), 4096, 0)
        .unwrap();
    let clock = ipc::mem::Mapping::new(fd.as_fd(), 0, 4096, true).unwrap();
    let mut log = match CtxswLog::open(&device, clock) {
        Ok(log) => log,
        Err(error) => panic!("no context switch log: {error}"),
    };
    println!("pid {} clock {:?}", std::process::id(), log.now_ns());
    let mut gpu = gpu().unwrap();
    let mut driver = Driver::new(client(&mut gpu, GIB));
    let mut ring = driver.ring(EngineKind::Compute);
    for round in 0..3 {
        let started = Instant::now();
        // 320 MiB through the graphics copy engine: some milliseconds of engine time.
        let (from, to) = (driver.va(12 * MIB), driver.va(24 * MIB));
        let mut push = Pushbuffer::default();
        for _ in 0..40 {
            push = push.copy(from, to, 8 << 20);
        }
        driver.finish(&mut ring, push);
        let took = started.elapsed();
        let read = Instant::now();
        let switches = log.read().unwrap();
        println!(
            "round {round}: work took {took:?}; read in {:?}: {} switches, now {:?}",
            read.elapsed(),
            switches.len(),
            log.now_ns()
        );
        for switch in switches.iter().take(8) {
            println!("    {switch:?}");
        }
        println!("    engine time {:?}", log.engine_time);
        std::thread::sleep(Duration::from_millis(50));
        let late = log.read().unwrap();
        println!(
            "    50 ms later: {} more, engine time {:?} {:?}",
            late.len(),
            log.engine_time,
            late.first()
        );
    }
    println!("client's own: {:?}", driver.client().usage());
}

#[test]
fn messages_of_the_manager_are_executed() {
    let Some(mut gpu) = gpu() else { return };
    let spec = spec(GIB);
    let admission = gpu.admit(&spec).unwrap();
    let client =
        NvidiaClient::open(Arc::new(KernelDriver), admission.fd.unwrap().into_trusted()).unwrap();
    let mut driver = Driver::new(Box::new(client));
    let mut ring = driver.ring(EngineKind::Copy);
    gpu.set_timeslice(spec.vgpu, Duration::from_millis(2)).unwrap();
    gpu.set_gate(spec.vgpu, false).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let done = driver.submit(&mut ring, Pushbuffer::default());
    println!("runs with the gate closed: {}", driver.wait_for(done, Duration::from_millis(100)));
    let mut late = driver.bare_ring(EngineKind::Copy);
    let done_late = driver.submit(&mut late, Pushbuffer::default());
    println!(
        "a channel made while closed runs: {}",
        driver.wait_for(done_late, Duration::from_millis(100))
    );
    gpu.set_gate(spec.vgpu, true).unwrap();
    println!(
        "after opening: {} {}",
        driver.wait_for(done, Duration::from_millis(100)),
        driver.wait_for(done_late, Duration::from_millis(100))
    );
    let started = Instant::now();
    println!("usage asked in {:?}: {:?}", started.elapsed(), gpu.usage());
    gpu.reset_group(spec.vgpu).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    println!("usage: {:?}", gpu.usage());
    println!("after a reset: {:?}", driver.client().query_channel(ring.id()));
    let mut again = driver.ring(EngineKind::Copy);
    driver.finish(&mut again, Pushbuffer::default());
    gpu.evict(spec.vgpu).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    println!("after eviction: {:?} {:?}", driver.client().take_pending(), gpu.usage());
}

#[test]
fn guest_memory_is_pinned_and_unpinned() {
    let Some(mut gpu) = gpu() else { return };
    let mut client = client(&mut gpu, GIB);
    let ram = ipc::mem::SharedMemory::new(c"ram", GIB).unwrap();
    let started = Instant::now();
    let guest = GuestRam { fd: ram.fd.as_fd(), offset: 0, len: GIB, writable: true };
    let memory = client.import(guest).unwrap();
    let imported = started.elapsed();
    let backing = mdev_core::gpu::Backing::Guest { memory, offset: 0 };
    let va = mdev_core::ids::GpuVa(VA_START);
    client.map(&MapRequest::new(va, GIB, backing)).unwrap();
    let mapped = started.elapsed();
    // Unmaps and maps a part.
    let hole = mdev_core::ids::GpuVa(VA_START + 16 * MIB);
    println!("part unmapped: {:?}", client.unmap(SpaceId::DEFAULT, hole, MIB));
    println!("part mapped: {:?}", client.map(&MapRequest::new(hole, MIB, backing)));
    println!("all unmapped: {:?}", client.unmap(SpaceId::DEFAULT, va, GIB));
    let started = Instant::now();
    client.release(memory).unwrap();
    println!(
        "1 GiB not populated: import {imported:?}, map {:?}, release {:?}",
        mapped.saturating_sub(imported),
        started.elapsed()
    );
}

/// Records the driver calls of a lifecycle. Writes the golden file of the test `nvidia` to the path
/// in `TESSERA_RECORD`, if it is set.
#[test]
fn driver_calls_are_recorded() {
    // The options of the test that compares the recording.
    let options = Options { direct_doorbell: true, direct_vram: true, ..Options::default() };
    let Some(mut gpu) = gpu_with(options) else { return };
    let recorder = RmRecorder::new(Arc::new(KernelDriver));
    let spec = ClientSpec { max_channels: 4, max_import_bytes: 64 * MIB, ..spec(64 * MIB) };
    let admission = gpu.admit(&spec).unwrap();
    let mut client =
        NvidiaClient::open(recorder.clone(), admission.fd.unwrap().into_trusted()).unwrap();
    lifecycle::run(&mut client).unwrap();
    drop(client);
    if let Ok(path) = std::env::var("TESSERA_RECORD") {
        std::fs::write(path, recorder.lines().join("\n") + "\n").unwrap();
    }
}

/// Prints the engine time of two vGPUs that copy on the compute engine.
#[test]
fn two_vgpus_are_charged_their_engine_time() {
    let Some(mut gpu) = gpu() else { return };
    let mut drivers: Vec<_> = (0..2).map(|_| Driver::new(client(&mut gpu, GIB))).collect();
    let mut rings: Vec<_> =
        drivers.iter_mut().map(|driver| driver.ring(EngineKind::Compute)).collect();
    let used = |gpu: &mut NvidiaGpu| -> Vec<_> {
        let report = gpu.usage().unwrap();
        report.vgpus.iter().map(|(_, u)| (u.engine_ns, u.preemptions, u.runnable)).collect()
    };
    println!("before: {:?}", used(&mut gpu));
    let started = Instant::now();
    let mut done = Vec::new();
    for (driver, ring) in drivers.iter_mut().zip(&mut rings) {
        let (from, to) = (driver.va(12 * MIB), driver.va(24 * MIB));
        for _ in 0..40 {
            let mut push = Pushbuffer::default();
            for _ in 0..40 {
                push = push.copy(from, to, 8 << 20);
            }
            done.push(driver.submit(ring, push));
        }
    }
    for (index, driver) in drivers.iter().enumerate() {
        let last = done[index * 40 + 39];
        while !driver.wait_for(last, Duration::from_millis(50)) {
            println!("{:?}: {:?}", started.elapsed(), used(&mut gpu));
            assert!(started.elapsed() < Duration::from_secs(5));
        }
    }
    println!("after {:?}: {:?}", started.elapsed(), used(&mut gpu));
}

/// Prints how a channel continues while other channels of its group are created and destroyed.
#[test]
fn channels_of_a_group_are_created_and_destroyed() {
    let Some(mut gpu) = gpu() else { return };
    for engine in [EngineKind::Copy, EngineKind::Compute] {
        let mut driver = Driver::new(client(&mut gpu, GIB));
        let mut ring = driver.ring(engine);
        let (from, to) = (driver.va(12 * MIB), driver.va(24 * MIB));
        for round in 0..8 {
            let mut last = None;
            for _ in 0..7 {
                let mut push = Pushbuffer::default();
                for _ in 0..40 {
                    push = push.copy(from, to, 8 << 20);
                }
                last = Some(driver.submit(&mut ring, push));
            }
            let mut other = driver.ring(engine);
            driver.finish(&mut other, Pushbuffer::default());
            let started = Instant::now();
            driver.destroy(other);
            let destroyed = started.elapsed();
            let done = driver.wait_for(last.unwrap(), Duration::from_secs(3));
            println!(
                "{engine:?} {round}: {done} after {:?}; destroyed the other in {destroyed:?}; {:?}",
                started.elapsed(),
                driver.client().query_channel(ring.id())
            );
        }
    }
}

#[test]
fn hardware_reports_invalid_methods() {
    use mdev_core::abi::copy;
    use mdev_core::abi::host::{self, GpEntry, sem};
    let Some(mut gpu) = gpu() else { return };
    let mut driver = Driver::new(client(&mut gpu, 64 * MIB));
    let data = driver.va(12 * MIB);
    let pushes = [
        ("undefined operation", Pushbuffer::default().word(!(7 << 29))),
        ("zero", Pushbuffer::default().word(0)),
        ("host method 0xf0", Pushbuffer::default().host(0x00f0, 0)),
        ("host method 0xf8", Pushbuffer::default().host(0x00f8, 0)),
        ("copy method 0xffc", Pushbuffer::default().copy_method(0x0ffc, &[0])),
        ("unbound subchannel", Pushbuffer::default().method(6, 0x0300, &[0])),
        ("unknown class", Pushbuffer::default().host(host::SET_OBJECT, 0x1234)),
        (
            "misaligned timestamp",
            Pushbuffer::default().semaphore(data + 4, 0, sem::RELEASE | sem::RELEASE_TIMESTAMP),
        ),
        ("privileged membar", Pushbuffer::default().copy_method(host::MEM_OP_D, &[9 << 27])),
        (
            "long copy, pitch 0",
            Pushbuffer::default()
                .addresses(data, data + MIB)
                .copy_method(copy::PITCH_IN, &[0, 0, 1 << 20, 1 << 20])
                .launch(copy::launch::MULTI_LINE),
        ),
    ];
    for (name, push) in pushes {
        let mut ring = driver.ring(EngineKind::Copy);
        let done = driver.submit(&mut ring, push);
        let started = Instant::now();
        let mut status = driver.client().query_channel(ring.id()).unwrap();
        while status.error == 0 && started.elapsed() < Duration::from_millis(300) {
            status = driver.client().query_channel(ring.id()).unwrap();
        }
        let completed = driver.wait_for(done, Duration::ZERO);
        let elapsed = started.elapsed();
        println!("{name}: {status:x?} after {elapsed:?}, completed {completed}");
        let started = Instant::now();
        driver.destroy(ring);
        println!("    destroyed in {:?}", started.elapsed());
    }
    let mut ring = driver.ring(EngineKind::Copy);
    driver.set_put(&mut ring, 64);
    std::thread::sleep(Duration::from_millis(300));
    println!("GP_PUT past the ring: {:x?}", driver.client().query_channel(ring.id()));
    let mut ring = driver.ring(EngineKind::Copy);
    driver.submit_entry(&mut ring, GpEntry::Segment { va: VA_START + (1 << 36), dwords: 9 });
    std::thread::sleep(Duration::from_millis(300));
    println!("unmapped pushbuffer: {:x?}", driver.client().query_channel(ring.id()));
}

#[test]
fn the_conformance_suite_passes() {
    let Some(mut gpu) = gpu() else { return };
    let started = Instant::now();
    let results = conformance::survey(&mut || client(&mut gpu, 64 * MIB));
    for (name, result) in &results {
        println!("{name}: {result:?}");
    }
    println!("conformance took {:?}", started.elapsed());
    assert!(results.iter().all(|(_, result)| result.is_ok()));
}

/// Measured with driver 580: a mapping of BAR 4 shows the memory of later clients after its own
/// memory has been freed. So VMMs get no such mapping unless the operator trusts them.
#[test]
fn vmms_do_not_map_video_memory() {
    let Some(mut gpu) = gpu() else { return };
    let client = client(&mut gpu, GIB);
    assert!(client.apertures().vram.is_none());
    assert!(!client.gpu().capabilities.contains(GpuCapabilities::VRAM_APERTURE));
}

#[test]
fn the_next_vm_of_a_vgpu_gets_cleared_video_memory() {
    const LEN: usize = 1 << 20;
    let Some(mut gpu) = gpu() else { return };
    let mut driver = Driver::new(client(&mut gpu, GIB));
    driver.write(12 * MIB, &vec![0x5e; LEN]);
    let ram = driver.va(12 * MIB);
    let vram = driver.map_vram(512 * MIB, LEN as u64);
    let mut ring = driver.ring(EngineKind::Copy);
    driver.finish(&mut ring, Pushbuffer::default().copy(ram, vram, LEN as u32));
    driver.destroy(ring);
    let started = Instant::now();
    assert!(driver.client().renew().unwrap());
    println!("1 GiB of video memory renewed in {:?}", started.elapsed());
    driver.map_ram();
    let vram = driver.map_vram(512 * MIB, LEN as u64);
    let mut ring = driver.ring(EngineKind::Copy);
    driver.finish(&mut ring, Pushbuffer::default().copy(vram, ram, LEN as u32));
    assert!(driver.read(12 * MIB, LEN).iter().all(|byte| *byte == 0));
}
