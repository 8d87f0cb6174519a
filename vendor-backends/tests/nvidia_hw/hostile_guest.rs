//! What a hostile guest gains on a real GPU: swapped pages, and channels behind a closed gate.

use std::sync::Arc;
use std::time::Duration;

use mdev_core::abi::host::{GpEntry, sem};
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::userd;
use mdev_core::gpu::{Backing, ChannelSpec, EngineKind, Gpu};
use mdev_core::ids::{GpuVa, SpaceId};
use mdev_core::units::{GIB, MIB};
use nix::fcntl::{FallocateFlags, fallocate};
use nvidia_rm::KernelDriver;
use vendor_backends::conformance::{Driver, Pushbuffer};
use vendor_backends::nvidia::NvidiaClient;

use super::{client, gpu, spec};

/// A channel that is created behind a closed gate runs when the gate opens, and not before.
#[test]
fn a_channel_behind_a_closed_gate_does_not_run() {
    let Some(mut gpu) = gpu() else { return };
    let spec = spec(GIB);
    let admission = gpu.admit(&spec).unwrap();
    let client =
        NvidiaClient::open(Arc::new(KernelDriver), admission.fd.unwrap().into_trusted()).unwrap();
    let mut driver = Driver::new(Box::new(client));
    let mut first = driver.ring(EngineKind::Compute);
    for engine in [EngineKind::Compute, EngineKind::Copy] {
        gpu.set_gate(spec.vgpu, false).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let mut late = driver.bare_ring(engine);
        let done = driver.submit(&mut late, Pushbuffer::default());
        let gated = driver.submit(&mut first, Pushbuffer::default());
        assert!(!driver.wait_for(done, Duration::from_millis(200)), "{engine:?}: the new one");
        assert!(!driver.wait_for(gated, Duration::from_millis(1)), "{engine:?}: the old one");
        gpu.set_gate(spec.vgpu, true).unwrap();
        assert!(driver.wait_for(done, Duration::from_secs(1)), "{engine:?}: the new one");
        assert!(driver.wait_for(gated, Duration::from_secs(1)), "{engine:?}: the old one");
    }
}

/// A ring whose USERD page the VMM has replaced: the GPU keeps the page that it has pinned, and the
/// worker reads the new one. Prints what runs, and what is charged.
#[test]
fn a_swapped_userd_does_not_hide_work() {
    let Some(mut gpu) = gpu() else { return };
    let mut driver = Driver::new(client(&mut gpu, GIB));
    let (ram, memory) = driver.import(MIB);
    let va = VA_START + (1 << 36);
    driver.map(va, MIB, memory);
    let spec = ChannelSpec {
        engine: EngineKind::Compute,
        gpfifo: GpuVa(va),
        gpfifo_entries: 16,
        userd: Backing::Guest { memory, offset: 4096 },
        vector: 0,
        space: SpaceId::DEFAULT,
        group: None,
        placement: mdev_core::gpu::Placement::default(),
        preamble: None,
    };
    let channel = driver.client().create_channel(&spec).unwrap();
    let semaphore = |number: u64| 0x3000 + number * 16;
    for number in 0..4 {
        let push = Pushbuffer::default().semaphore(va + semaphore(number), 1, sem::RELEASE);
        let bytes: Vec<u8> = push.words().iter().flat_map(|word| word.to_le_bytes()).collect();
        ram.mapping.write(0x4000 + number * 256, &bytes).unwrap();
        let dwords = push.words().len() as u32;
        let entry = GpEntry::Segment { va: va + 0x4000 + number * 256, dwords };
        ram.mapping.store_u64(number * 8, entry.encode()).unwrap();
    }
    let ran = |number: u64| {
        std::thread::sleep(Duration::from_millis(100));
        ram.mapping.load_u32(semaphore(number)) == Some(1)
    };
    let put = |driver: &mut Driver, value: u32| {
        ram.mapping.store_u32(4096 + userd::GP_PUT, value).unwrap();
        driver.client().wake(channel.token).unwrap();
    };
    put(&mut driver, 1);
    assert!(ran(0), "the ring works");
    let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&ram.fd, hole, 4096, 4096).unwrap();
    put(&mut driver, 2);
    println!("the worker sees a new GP_PUT and the GPU the old one; runs: {}", ran(1));
    // Entries that look fetched are not rung for again.
    ram.mapping.store_u32(4096 + userd::GP_GET, 2).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    // The guest's own GPU work writes GP_PUT into the page that the GPU has pinned.
    let mut ring = driver.ring(EngineKind::Copy);
    let hidden = va + 4096 + userd::GP_PUT;
    driver.finish(&mut ring, Pushbuffer::default().semaphore(hidden, 3, sem::RELEASE));
    let without_a_ring = ran(2);
    println!("the GPU sees a new GP_PUT and no ring; runs: {without_a_ring}");
    put(&mut driver, 4);
    println!("after a ring for another GP_PUT; runs: {} {}", ran(1), ran(2));
    println!("GP_GET for the worker: {:?}", ram.mapping.load_u32(4096 + userd::GP_GET));
    println!("{:?}", driver.client().query_channel(channel.id));
    println!("charged: {:?}", gpu.usage());
    assert!(!without_a_ring, "work runs without a ring of the worker");
}
