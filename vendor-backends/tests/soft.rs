//! The software GPU through its sockets: conformance, isolation, shares, and the death of
//! processes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ipc::seqpacket::{self, SeqPacket, SeqPacketListener};
use mdev_core::abi::notifier;
use mdev_core::gpu::{Client, ClientSpec, EngineKind, Gpu, GpuError, GuestRam, Pending, Usage};
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;
use vendor_backends::conformance::{self, Driver, Pushbuffer, client_spec as spec};
use vendor_backends::mediator::{MediatedClient, MediatedGpu, server};
use vendor_backends::soft::SoftGpu;

/// GPU process of a software GPU, as a thread.
struct GpuProcess {
    _folder: tempfile::TempDir,
    path: PathBuf,
    thread: thread::JoinHandle<()>,
}

fn start(grace: Duration) -> GpuProcess {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let listener = SeqPacketListener::bind(&path).unwrap();
    let gpu = Arc::new(SoftGpu::new("soft0", 256 * MIB));
    let thread = thread::spawn(move || server::run(gpu, grace, &listener).unwrap());
    GpuProcess { _folder: folder, path, thread }
}

fn open(gpu: &mut MediatedGpu, spec: &ClientSpec) -> MediatedClient {
    MediatedClient::open(gpu.admit(spec).unwrap().fd.unwrap().into_trusted()).unwrap()
}

fn usage(gpu: &mut MediatedGpu, vgpu: VgpuId) -> Option<Usage> {
    gpu.usage().unwrap().vgpus.into_iter().find(|(id, _)| *id == vgpu).map(|(_, usage)| usage)
}

#[test]
fn passes_conformance() {
    let process = start(Duration::from_secs(60));
    let mut gpu = MediatedGpu::connect(&process.path).unwrap();
    conformance::run(&mut || Box::new(open(&mut gpu, &spec())));
}

#[test]
fn frees_the_resources_of_a_dead_worker() {
    let process = start(Duration::from_secs(60));
    let mut gpu = MediatedGpu::connect(&process.path).unwrap();
    let whole = ClientSpec { vram_bytes: 256 * MIB, ..spec() };
    for _ in 0..5 {
        // Admit the same vGPU with all video memory immediately after its worker has gone.
        let client = open(&mut gpu, &whole);
        assert_eq!(client.spec(), &whole);
    }
}

#[test]
fn ends_after_the_grace_time_without_manager_and_vgpus() {
    let process = start(Duration::from_millis(600));
    let mut gpu = MediatedGpu::connect(&process.path).unwrap();
    let client = open(&mut gpu, &spec());
    drop(gpu);
    thread::sleep(Duration::from_millis(1500));
    let mut gpu = MediatedGpu::connect(&process.path)
        .expect("a vGPU keeps the process alive for a new manager");
    assert_eq!(gpu.usage().unwrap().vgpus.len(), 1);
    drop(client);
    thread::sleep(Duration::from_millis(1500));
    assert!(gpu.usage().unwrap().vgpus.is_empty(), "a manager keeps the process alive");
    drop(gpu);
    process.thread.join().unwrap();
}

#[test]
fn the_worker_notices_an_eviction() {
    let process = start(Duration::from_secs(60));
    let mut gpu = MediatedGpu::connect(&process.path).unwrap();
    let spec = spec();
    let mut client = open(&mut gpu, &spec);
    assert!(usage(&mut gpu, spec.vgpu).is_some());
    gpu.evict(spec.vgpu).unwrap();
    assert!(conformance::readable(&client.event(), Duration::from_secs(5)));
    assert!(client.take_pending().contains(Pending::DEVICE_LOST));
    assert!(matches!(client.usage(), Err(GpuError::Lost(_))));
    assert!(
        !conformance::readable(&client.event(), Duration::ZERO),
        "quiet after the loss was reported"
    );
    assert!(usage(&mut gpu, spec.vgpu).is_none());
}

#[test]
fn busy_vgpus_share_in_proportion_to_their_slices() {
    let process = start(Duration::from_secs(60));
    let mut gpu = MediatedGpu::connect(&process.path).unwrap();
    let mut vgpus = Vec::new();
    for slice in [8, 2] {
        let spec = spec();
        let mut driver = Driver::new(Box::new(open(&mut gpu, &spec)));
        gpu.set_timeslice(spec.vgpu, Duration::from_millis(slice)).unwrap();
        let mut ring = driver.ring(EngineKind::Compute);
        driver.spin_forever(&mut ring);
        vgpus.push((spec.vgpu, driver));
    }
    let read = |gpu: &mut MediatedGpu| -> Vec<u64> {
        vgpus.iter().map(|(id, _)| usage(gpu, *id).unwrap().engine_ns).collect()
    };
    thread::sleep(Duration::from_millis(50));
    let before = read(&mut gpu);
    thread::sleep(Duration::from_secs(2));
    let after = read(&mut gpu);
    let used: Vec<f64> = before.iter().zip(&after).map(|(b, a)| (a - b) as f64).collect();
    let share = used[0] / (used[0] + used[1]);
    assert!((share - 0.8).abs() < 0.02, "{share}");
    let first = usage(&mut gpu, vgpus[0].0).unwrap();
    assert!(first.runnable && first.preemptions > 0 && first.wait_ns > 0, "{first:?}");
    // The waits may have been read a little earlier. Work for an idle engine waits without a
    // preemption.
    let waits = first.waits.total();
    let likely = first.preemptions / 2..=first.preemptions + 10;
    assert!(likely.contains(&waits), "{waits} waits, {} preemptions", first.preemptions);
}

#[test]
fn a_closed_gate_stops_engine_time_and_loses_no_work() {
    let process = start(Duration::from_secs(60));
    let mut gpu = MediatedGpu::connect(&process.path).unwrap();
    let spec = spec();
    let mut driver = Driver::new(Box::new(open(&mut gpu, &spec)));
    let mut ring = driver.ring(EngineKind::Copy);
    gpu.set_gate(spec.vgpu, false).unwrap();
    let done = driver.submit(&mut ring, Pushbuffer::default());
    assert!(!driver.wait_for(done, Duration::from_millis(50)));
    let gated = usage(&mut gpu, spec.vgpu).unwrap();
    assert!(gated.runnable, "a gated vGPU with work is runnable");
    gpu.set_gate(spec.vgpu, true).unwrap();
    assert!(driver.wait(done));

    let mut ring = driver.ring(EngineKind::Compute);
    driver.spin_forever(&mut ring);
    thread::sleep(Duration::from_millis(20));
    gpu.set_gate(spec.vgpu, false).unwrap();
    thread::sleep(Duration::from_millis(5));
    let before = usage(&mut gpu, spec.vgpu).unwrap().engine_ns;
    thread::sleep(Duration::from_millis(50));
    // A loaded host may count the last run late.
    let after = usage(&mut gpu, spec.vgpu).unwrap().engine_ns;
    assert!(after - before < 2_000_000, "{} ns while closed", after - before);
    gpu.reset_group(spec.vgpu).unwrap();
    assert_eq!(driver.expect_fault(&ring).error, notifier::RESET_CHANNEL);
}

#[test]
fn a_storm_of_faults_does_not_delay_the_neighbour() {
    let process = start(Duration::from_secs(60));
    let mut gpu = MediatedGpu::connect(&process.path).unwrap();
    let mut storm = Driver::new(Box::new(open(&mut gpu, &spec())));
    let mut good = Driver::new(Box::new(open(&mut gpu, &spec())));
    let mut ring = good.ring(EngineKind::Copy);
    let mut survivor = storm.ring(EngineKind::Copy);
    for round in 0..30 {
        let mut bad = storm.bare_ring(EngineKind::Copy);
        storm.submit(&mut bad, Pushbuffer::default().word(0x4000_0000));
        good.finish(&mut ring, Pushbuffer::default());
        if round < 6 {
            storm.expect_fault(&bad);
        }
        storm.destroy(bad);
    }
    storm.finish(&mut survivor, Pushbuffer::default());
    let mut late = storm.bare_ring(EngineKind::Copy);
    storm.finish(&mut late, Pushbuffer::default());
}

#[test]
fn truncating_imported_memory_faults_the_channel() {
    let process = start(Duration::from_secs(60));
    let mut gpu = MediatedGpu::connect(&process.path).unwrap();
    let mut good = Driver::new(Box::new(open(&mut gpu, &spec())));
    let mut driver = Driver::new(Box::new(open(&mut gpu, &spec())));
    let file = File::from(memfd_create(c"ram", MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(4 * MIB).unwrap();
    let ram = GuestRam { fd: file.as_fd(), offset: 0, len: 4 * MIB, writable: true };
    let memory = driver.client().import(ram).unwrap();
    let va = driver.va(1 << 30);
    driver.map(va, 4 * MIB, memory);
    file.set_len(0).unwrap();
    let mut ring = driver.ring(EngineKind::Copy);
    driver.submit(&mut ring, Pushbuffer::default().copy(driver.va(20 * MIB), va, 1 << 20));
    assert_eq!(driver.expect_fault(&ring).error, notifier::MMU_FAULT);
    let mut ring = good.ring(EngineKind::Copy);
    good.finish(&mut ring, Pushbuffer::default());
}

#[test]
fn only_memory_files_are_imported() {
    let process = start(Duration::from_secs(60));
    let mut gpu = MediatedGpu::connect(&process.path).unwrap();
    let mut client = open(&mut gpu, &spec());
    let mut import = |file: &File, offset, len| {
        client.import(GuestRam { fd: file.as_fd(), offset, len, writable: true })
    };
    let file = File::from(memfd_create(c"ram", MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(MIB).unwrap();
    assert!(matches!(import(&file, 0, 2 * MIB), Err(GpuError::OutOfRange(_))), "past its end");
    assert!(matches!(import(&file, 1, MIB), Err(GpuError::Invalid(_))));
    assert!(matches!(import(&file, u64::MAX - 4095, MIB), Err(GpuError::OutOfRange(_))));
    let large = File::from(memfd_create(c"ram", MFdFlags::MFD_CLOEXEC).unwrap());
    large.set_len(65 * MIB).unwrap();
    assert!(matches!(import(&large, 0, 65 * MIB), Err(GpuError::Limit(_))));
    let zero = File::options().read(true).write(true).open("/dev/zero").unwrap();
    assert!(import(&zero, 0, MIB).is_err());
    assert!(import(&file, 0, MIB).is_ok(), "the connection still works");
}

#[test]
fn garbage_on_a_workers_connection_is_refused_without_effect_on_others() {
    let process = start(Duration::from_secs(60));
    let mut gpu = MediatedGpu::connect(&process.path).unwrap();
    let mut good = Driver::new(Box::new(open(&mut gpu, &spec())));
    let socket = SeqPacket::from(gpu.admit(&spec()).unwrap().fd.unwrap().into_trusted());
    let mut buffer = vec![0; seqpacket::MAX_PACKET];
    let mut state = 1u32;
    for len in (1..200).cycle().take(3000) {
        let bytes: Vec<u8> = (0..len)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 28) as u8 * if state & 1 == 0 { 1 } else { 17 }
            })
            .collect();
        socket.send(&bytes, &[socket.as_fd()]).unwrap();
        socket.recv(&mut buffer).unwrap().expect("a reply to every packet");
    }
    // A worker that does not read replies loses only its own connection.
    while socket.try_send(&[0, 1], &[]).is_ok() {}
    let mut ring = good.ring(EngineKind::Copy);
    good.finish(&mut ring, Pushbuffer::default());
    assert_eq!(gpu.describe().parent, "soft0");
    gpu.usage().unwrap();
}

#[test]
fn guests_share_no_pages() {
    let process = start(Duration::from_secs(60));
    let mut gpu = MediatedGpu::connect(&process.path).unwrap();
    let clients = [open(&mut gpu, &spec()), open(&mut gpu, &spec())];
    let inode = |client: &MediatedClient| {
        let apertures = client.apertures();
        [&apertures.vram, &apertures.doorbell]
            .map(|aperture| fstat(&aperture.as_ref().unwrap().fd).unwrap().st_ino)
    };
    let [first, second] = clients.each_ref().map(inode);
    assert!(first.iter().all(|inode| !second.contains(inode)));
}

#[test]
fn admission_has_limits() {
    let process = start(Duration::from_secs(60));
    let mut gpu = MediatedGpu::connect(&process.path).unwrap();
    let spec = spec();
    let _admission = gpu.admit(&spec).unwrap();
    assert!(matches!(gpu.admit(&spec), Err(GpuError::Invalid(_))), "the same vGPU twice");
    let large = ClientSpec { vram_bytes: 193 * MIB, ..self::spec() };
    assert!(matches!(gpu.admit(&large), Err(GpuError::Limit(_))));
    let unaligned = ClientSpec { vram_bytes: 4096, ..self::spec() };
    assert!(matches!(gpu.admit(&unaligned), Err(GpuError::Invalid(_))));
    assert!(matches!(gpu.evict(VgpuId::random()), Err(GpuError::NotFound(_))));
    assert!(gpu.set_timeslice(spec.vgpu, Duration::ZERO).is_err());
    let remaining = ClientSpec { vram_bytes: 192 * MIB, ..self::spec() };
    assert!(gpu.admit(&remaining).is_ok());
}
