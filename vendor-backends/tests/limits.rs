//! Limits of a vGPU on the software GPU: budgets, quotas and hangs. A neighbour must not be
//! affected.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ipc::seqpacket::SeqPacketListener;
use mdev_core::abi::{host, notifier};
use mdev_core::gpu::{ClientSpec, EngineKind, Gpu, GpuError, Pending, Quotas, Usage};
use mdev_core::ids::VgpuId;
use mdev_core::sched::Budget;
use mdev_core::units::MIB;
use vendor_backends::conformance::{Driver, Pushbuffer};
use vendor_backends::mediator::{MediatedClient, MediatedGpu, server};
use vendor_backends::soft::SoftGpu;

struct Parent {
    gpu: MediatedGpu,
    _folder: tempfile::TempDir,
}

impl Parent {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path: PathBuf = folder.path().join("admin.sock");
        let listener = SeqPacketListener::bind(&path).unwrap();
        let grace = Duration::from_secs(1);
        let gpu = Arc::new(SoftGpu::new("soft0", 256 * MIB));
        thread::spawn(move || server::run(gpu, grace, &listener).unwrap());
        Self { gpu: MediatedGpu::connect(&path).unwrap(), _folder: folder }
    }

    fn guest(&mut self) -> (VgpuId, Driver) {
        let spec = ClientSpec {
            vgpu: VgpuId::random(),
            vram_bytes: 16 * MIB,
            framebuffer_bytes: 0,
            max_channels: 8,
            max_import_bytes: 256 * MIB,
        };
        let client =
            MediatedClient::open(self.gpu.admit(&spec).unwrap().fd.unwrap().into_trusted())
                .unwrap();
        (spec.vgpu, Driver::new(Box::new(client)))
    }

    fn usage(&mut self, vgpu: VgpuId) -> Usage {
        let report = self.gpu.usage().unwrap();
        report.vgpus.into_iter().find(|(id, _)| *id == vgpu).unwrap().1
    }

    /// Returns the engine time of each vGPU over a total of `time` of engine time. Wall time would
    /// depend on the load of the host.
    fn used(&mut self, vgpus: &[VgpuId], time: Duration) -> Vec<f64> {
        let read = |parent: &mut Self| -> Vec<u64> {
            let report = parent.gpu.usage().unwrap();
            let find = |id| report.vgpus.iter().find(|(other, _)| other == id).unwrap().1.engine_ns;
            vgpus.iter().map(find).collect()
        };
        let (before, started) = (read(self), Instant::now());
        loop {
            assert!(started.elapsed() < Duration::from_secs(60), "too little work");
            thread::sleep(Duration::from_millis(20));
            let used: Vec<u64> = read(self).iter().zip(&before).map(|(a, b)| a - b).collect();
            if used.iter().sum::<u64>() >= time.as_nanos() as u64 {
                return used.iter().map(|ns| *ns as f64).collect();
            }
        }
    }
}

#[test]
fn a_budget_holds_beside_a_neighbour_that_gets_the_rest() {
    let mut parent = Parent::start();
    let (capped, mut one) = parent.guest();
    let (free, mut two) = parent.guest();
    for driver in [&mut one, &mut two] {
        let mut ring = driver.ring(EngineKind::Compute);
        driver.spin_forever(&mut ring);
    }
    let budget = Budget::part(0.1, Duration::from_millis(10));
    parent.gpu.set_budget(capped, budget).unwrap();
    thread::sleep(Duration::from_millis(100));
    let used = parent.used(&[capped, free], Duration::from_secs(2));
    let part = used[0] / (used[0] + used[1]);
    assert!((part - 0.1).abs() < 0.02, "{part}");
    let usage = parent.usage(capped);
    assert!(usage.gate_closings > 10 && usage.gated_ns > 500_000_000, "{usage:?}");
    assert!(usage.gated_ns <= usage.wait_ns, "{usage:?}");

    // Without the budget, the shares are equal.
    parent.gpu.set_budget(capped, None).unwrap();
    thread::sleep(Duration::from_millis(100));
    let used = parent.used(&[capped, free], Duration::from_secs(1));
    let part = used[0] / (used[0] + used[1]);
    assert!((part - 0.5).abs() < 0.03, "{part}");

    let invalid = Some(Budget { time_ns: 5_000_000, period_ns: 5_000_000 });
    assert!(matches!(parent.gpu.set_budget(free, invalid), Err(GpuError::Invalid(_))));
}

#[test]
fn a_budget_holds_alone_and_work_completes() {
    let mut parent = Parent::start();
    let (capped, mut driver) = parent.guest();
    parent.gpu.set_budget(capped, Budget::part(0.25, Duration::from_millis(10))).unwrap();
    let mut ring = driver.ring(EngineKind::Compute);
    let mut copies = driver.ring(EngineKind::Copy);
    driver.spin_forever(&mut ring);
    driver.finish(&mut copies, Pushbuffer::default());
    let started = Instant::now();
    let used = parent.used(&[capped], Duration::from_millis(500))[0];
    let part = used / started.elapsed().as_nanos() as f64;
    // The share may be lower if the host had no core for the engine.
    assert!(part < 0.26, "{part}");
}

#[test]
fn submissions_beyond_the_quota_wait_and_complete() {
    let mut parent = Parent::start();
    let (vgpu, mut driver) = parent.guest();
    let mut ring = driver.ring(EngineKind::Copy);
    let rate = NonZeroU32::new(200);
    let quotas = Quotas { submissions_per_second: rate, ..Quotas::default() };
    parent.gpu.set_quotas(vgpu, &quotas).unwrap();
    let started = Instant::now();
    for _ in 0..4 {
        let mut last = None;
        for _ in 0..25 {
            last = Some(driver.submit(&mut ring, Pushbuffer::default()));
        }
        assert!(driver.wait(last.unwrap()));
    }
    // 100 submissions at 200 per second, 10 of which may come at once.
    assert!(started.elapsed() >= Duration::from_millis(449), "{:?}", started.elapsed());
    let usage = parent.usage(vgpu);
    assert!((80..=100).contains(&usage.throttled), "{usage:?}");
    parent.gpu.set_quotas(vgpu, &Quotas::default()).unwrap();
    let (started, before) = (Instant::now(), parent.usage(vgpu).throttled);
    for _ in 0..500 {
        driver.finish(&mut ring, Pushbuffer::default());
    }
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    assert_eq!(parent.usage(vgpu).throttled, before);
}

#[test]
fn channels_and_imports_beyond_their_quotas_are_refused() {
    let mut parent = Parent::start();
    let (vgpu, mut driver) = parent.guest();
    let kept = driver.ring(EngineKind::Copy);
    let _second = driver.ring(EngineKind::Copy);
    let imported = parent.usage(vgpu).imported_bytes;
    let quotas = Quotas {
        max_channels: Some(1),
        max_import_bytes: Some(imported + MIB),
        ..Quotas::default()
    };
    parent.gpu.set_quotas(vgpu, &quotas).unwrap();
    let spec = mdev_core::gpu::ChannelSpec {
        engine: EngineKind::Copy,
        gpfifo: mdev_core::ids::GpuVa(driver.va(0)),
        gpfifo_entries: 64,
        userd: mdev_core::gpu::Backing::Guest { memory: driver.memory(), offset: 0 },
        vector: 0,
        space: mdev_core::ids::SpaceId::DEFAULT,
        group: None,
        placement: mdev_core::gpu::Placement::default(),
        preamble: None,
    };
    let refused = driver.client().create_channel(&spec).unwrap_err();
    assert_eq!(refused.to_string(), "Limit reached: channels");
    driver.client().query_channel(kept.id()).expect("existing channels stay");

    let ram = ipc::mem::SharedMemory::new(c"ram", 2 * MIB).unwrap();
    let mut import = |len| {
        let fd = std::os::fd::AsFd::as_fd(&ram.fd);
        driver.client().import(mdev_core::gpu::GuestRam { fd, offset: 0, len, writable: true })
    };
    assert_eq!(import(2 * MIB).unwrap_err().to_string(), "Limit reached: imported guest memory");
    import(MIB).unwrap();
}

#[test]
fn an_endless_kernel_is_reset_at_the_hang_limit_alone() {
    let mut parent = Parent::start();
    let (hung, mut driver) = parent.guest();
    let (neighbour_id, mut neighbour) = parent.guest();
    let hang_timeout = Some(Duration::from_millis(200));
    let quotas = Quotas { hang_timeout, ..Quotas::default() };
    parent.gpu.set_quotas(hung, &quotas).unwrap();
    let mut busy = neighbour.ring(EngineKind::Compute);
    neighbour.spin_forever(&mut busy);
    let mut good = driver.ring(EngineKind::Copy);
    let mut bad = driver.ring(EngineKind::Compute);
    driver.spin_forever(&mut bad);
    let status = driver.expect_fault(&bad);
    assert_eq!(status.error, notifier::IDLE_TIMEOUT);
    // The limit counts engine time, half of which went to the neighbour.
    assert!((200_000_000..260_000_000).contains(&status.engine_ns), "{status:?}");
    assert!(driver.client().take_pending().contains(Pending::CHANNEL_ERROR));
    driver.finish(&mut good, Pushbuffer::default());
    assert_eq!(neighbour.client().query_channel(busy.id()).unwrap().error, 0);
    let usage = parent.usage(hung);
    assert_eq!((usage.hang_resets, usage.faults), (1, 1));
    assert_eq!(parent.usage(neighbour_id).hang_resets, 0);

    // Many kernels that end in time are no hang.
    let mut long = driver.ring(EngineKind::Copy);
    let before = parent.usage(hung).engine_ns;
    while parent.usage(hung).engine_ns - before < 400_000_000 {
        let data = driver.va(20 * MIB);
        driver.finish(&mut long, Pushbuffer::default().copy(data, data + 8 * MIB, 8 << 20));
    }
}

#[test]
fn a_blocked_semaphore_times_out_only_with_an_acquire_limit() {
    let mut parent = Parent::start();
    let (unlimited, mut waiting) = parent.guest();
    let (limited, mut driver) = parent.guest();
    let acquire_timeout = Some(Duration::from_secs(1));
    let quotas = Quotas { acquire_timeout, ..Quotas::default() };
    parent.gpu.set_quotas(limited, &quotas).unwrap();
    let flag = |driver: &Driver| driver.va(20 * MIB);
    let mut rings = Vec::new();
    for driver in [&mut waiting, &mut driver] {
        let mut ring = driver.ring(EngineKind::Copy);
        let acquire = Pushbuffer::default().semaphore(flag(driver), 7, host::sem::ACQUIRE);
        let done = driver.submit(&mut ring, acquire);
        rings.push((ring, done));
    }
    let started = Instant::now();
    let status = driver.expect_fault(&rings[1].0);
    assert_eq!(status.error, notifier::SEMAPHORE_TIMEOUT);
    assert!(started.elapsed() >= Duration::from_millis(950), "{:?}", started.elapsed());
    let usage = parent.usage(limited);
    assert_eq!(usage.hang_resets, 1);
    assert!(usage.engine_ns < 50_000_000, "waiting uses no engine time: {usage:?}");

    // Semaphores that are released in time are no hang, even if all together take longer than the
    // limit.
    let mut ring = driver.ring(EngineKind::Copy);
    for round in 1..=8 {
        let acquire = Pushbuffer::default().semaphore(flag(&driver), round, host::sem::ACQUIRE);
        let done = driver.submit(&mut ring, acquire);
        thread::sleep(Duration::from_millis(150));
        driver.write(20 * MIB, &round.to_le_bytes()[..4]);
        assert!(driver.wait(done));
    }

    let (ring, done) = &rings[0];
    assert_eq!(waiting.client().query_channel(ring.id()).unwrap().error, 0);
    waiting.write(20 * MIB, &7u32.to_le_bytes());
    assert!(waiting.wait(*done));
    assert_eq!(parent.usage(unlimited).hang_resets, 0);
}

#[test]
fn engine_time_is_counted_by_engine() {
    let mut parent = Parent::start();
    let (computes, mut one) = parent.guest();
    let (copies, mut two) = parent.guest();
    let mut spinning = one.ring(EngineKind::Compute);
    one.spin_forever(&mut spinning);
    let mut ring = two.ring(EngineKind::Compute);
    for _ in 0..20 {
        let data = two.va(20 * MIB);
        two.finish(&mut ring, Pushbuffer::default().copy(data, data + 8 * MIB, 8 << 20));
    }
    let (one, two) = (parent.usage(computes), parent.usage(copies));
    assert!(one.compute_ns > 0 && one.copy_ns == 0, "{one:?}");
    assert!(two.copy_ns > 0 && two.compute_ns == 0, "a copy on any channel is a copy: {two:?}");
    for usage in [one, two] {
        // A reading may happen between the updates of the parts and of the total.
        let parts = usage.copy_ns + usage.compute_ns + usage.host_ns();
        assert!(parts.abs_diff(usage.engine_ns) < 10_000_000, "{usage:?}");
        assert!(usage.host_ns() < usage.engine_ns / 5, "{usage:?}");
    }
}
