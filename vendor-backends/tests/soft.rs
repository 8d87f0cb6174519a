//! The software GPU through its sockets: conformance, isolation, shares, and who may die.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use mdev_core::gpu::{Client, ClientSpec, Gpu, Usage};
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;
use vendor_backends::conformance;
use vendor_backends::seqpacket::SeqPacketListener;
use vendor_backends::soft::server::{self, Config};
use vendor_backends::soft::{SoftClient, SoftGpu};

/// A soft-gpu, as its process would run it.
struct Process {
    _folder: tempfile::TempDir,
    path: PathBuf,
    thread: thread::JoinHandle<()>,
}

fn start(grace: Duration) -> Process {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let listener = SeqPacketListener::bind(&path).unwrap();
    let config = Config { name: "soft0".into(), vram_bytes: 256 * MIB, grace };
    let thread = thread::spawn(move || server::run(&config, &listener).unwrap());
    Process { _folder: folder, path, thread }
}

fn spec() -> ClientSpec {
    ClientSpec {
        vgpu: VgpuId::random(),
        vram_bytes: 64 * MIB,
        framebuffer_bytes: 16 * MIB,
        max_channels: 8,
        max_import_bytes: 64 * MIB,
    }
}

fn open(gpu: &mut SoftGpu, spec: &ClientSpec) -> SoftClient {
    SoftClient::open(gpu.admit(spec).unwrap().fd.unwrap()).unwrap()
}

fn usage(gpu: &mut SoftGpu, vgpu: VgpuId) -> Option<Usage> {
    gpu.usage().unwrap().vgpus.into_iter().find(|(id, _)| *id == vgpu).map(|(_, usage)| usage)
}

#[test]
fn conforms() {
    let process = start(Duration::from_secs(60));
    let mut gpu = SoftGpu::connect(&process.path).unwrap();
    conformance::run(&mut || Box::new(open(&mut gpu, &spec())));
}

#[test]
fn frees_what_a_dead_worker_had() {
    let process = start(Duration::from_secs(60));
    let mut gpu = SoftGpu::connect(&process.path).unwrap();
    let whole = ClientSpec { vram_bytes: 256 * MIB, ..spec() };
    for _ in 0..5 {
        // The same vGPU, and all of the video memory, right after its worker has gone.
        let client = open(&mut gpu, &whole);
        assert_eq!(client.spec(), &whole);
    }
}

#[test]
fn ends_after_a_grace_time_alone() {
    let process = start(Duration::from_millis(600));
    let mut gpu = SoftGpu::connect(&process.path).unwrap();
    let client = open(&mut gpu, &spec());
    drop(gpu);
    thread::sleep(Duration::from_millis(1500));
    let mut gpu = SoftGpu::connect(&process.path).expect("a vGPU keeps it alive for a new manager");
    assert_eq!(gpu.usage().unwrap().vgpus.len(), 1);
    drop(client);
    thread::sleep(Duration::from_millis(1500));
    assert!(gpu.usage().unwrap().vgpus.is_empty(), "a manager keeps it alive");
    drop(gpu);
    process.thread.join().unwrap();
}

#[test]
fn eviction_is_noticed_by_the_worker() {
    let process = start(Duration::from_secs(60));
    let mut gpu = SoftGpu::connect(&process.path).unwrap();
    let spec = spec();
    let mut client = open(&mut gpu, &spec);
    assert!(usage(&mut gpu, spec.vgpu).is_some());
    gpu.evict(spec.vgpu).unwrap();
    assert!(conformance::readable(&client.event(), Duration::from_secs(5)));
    assert!(client.take_pending().contains(mdev_core::gpu::Pending::DEVICE_LOST));
    assert!(matches!(client.usage(), Err(mdev_core::gpu::GpuError::Lost(_))));
    assert!(!conformance::readable(&client.event(), Duration::ZERO), "quiet after it was told");
    assert!(usage(&mut gpu, spec.vgpu).is_none());
}
