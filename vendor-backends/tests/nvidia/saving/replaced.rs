//! Workers that die while their vGPU is paused, or is being paused.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use mdev_core::gpu::{EngineKind, Saving};
use nvidia_rm::fake_rm::{self, Engines, FakeRm};
use vendor_backends::nvidia::NvidiaGpu;

use super::guest::Guest;
use super::{KERNEL, SAVED, VRAM, copy_vram, kernels};
use crate::adoption::{Anchor, Worker};
use crate::{DRIVER, spec};

/// What outlives workers.
struct Host {
    rm: Arc<FakeRm>,
    anchor: Anchor,
    guest: Guest,
    // The manager's connections.
    _gpu: NvidiaGpu,
}

/// Returns a worker without threads, with kernels in progress.
fn busy() -> (Host, Worker, Engines) {
    let rm = FakeRm::new(DRIVER);
    rm.set_clock(1_000_000_000);
    let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, SAVED).unwrap();
    let (mut anchor, mut worker) = Anchor::new(&rm, &mut gpu, &spec(VRAM));
    let engines = Engines::start(&rm, KERNEL);
    let mut guest = Guest::new(&mut worker.client, &[EngineKind::Compute, EngineKind::Copy]);
    anchor.record(&mut worker.client);
    guest.launch(0, 12);
    for number in 0..8 {
        guest.copy(1, number * 1024, number * 1024, 1024);
    }
    std::thread::sleep(Duration::from_millis(1));
    (Host { rm, anchor, guest, _gpu: gpu }, worker, engines)
}

impl Host {
    /// Starts the next worker.
    fn replace(&mut self, worker: Worker) -> Worker {
        worker.process.end_after(0);
        // The fake's engines read guest memory at the addresses in this worker.
        std::mem::forget(worker.client);
        let mut next = self.anchor.adopt().unwrap();
        self.anchor.record(&mut next.client);
        next
    }

    /// Waits for all work, and checks it.
    fn check(&self, worker: &mut Worker, end: u64) {
        self.guest.wait();
        worker.client.pause().unwrap();
        let mut vram = vec![0; 4 << 20];
        copy_vram(&mut worker.client, &mut vram, false);
        assert_eq!(kernels(&vram), 12, "{end}");
        assert!(self.rm.violations().is_empty(), "{:?}", self.rm.violations());
    }
}

#[test]
fn the_next_worker_has_the_pause() {
    let (mut host, mut worker, _engines) = busy();
    worker.client.pause().unwrap();
    let saved = worker.client.save().unwrap();
    let mut worker = host.replace(worker);
    let executed = host.guest.progress(0);
    std::thread::sleep(Duration::from_millis(3));
    assert_eq!(host.guest.progress(0), executed, "it is still paused");
    assert_eq!(worker.client.save().unwrap(), saved);
    let mut worker = host.replace(worker);
    worker.client.resume().unwrap();
    host.check(&mut worker, 0);
}

#[test]
fn a_worker_dies_at_each_call_of_a_pause() {
    for end in 0.. {
        let (mut host, mut worker, _engines) = busy();
        match end % 2 {
            0 => worker.process.end_after(end / 2),
            _ => worker.process.end_within(end / 2),
        }
        let Worker { client, .. } = &mut worker;
        let pause = || client.pause().and_then(|()| client.resume());
        let ended = catch_unwind(AssertUnwindSafe(pause)).is_err();
        let mut worker = host.replace(worker);
        // As the manager asks, since it got no answer.
        worker.client.resume().unwrap();
        host.check(&mut worker, end);
        if !ended {
            assert!(end > 6, "{end} calls are too few");
            return;
        }
    }
}
