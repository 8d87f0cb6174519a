//! The manager's requests while the engine of the software GPU sleeps in one vGPU's memory.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::num::NonZeroU32;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ipc::seqpacket::SeqPacketListener;
use mdev_core::gpu::{ClientSpec, EngineKind, Gpu, GpuDescription, GpuError, Quotas};
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;
use vendor_backends::conformance::{Driver, Pushbuffer};
use vendor_backends::mediator::fault::Fault;
use vendor_backends::mediator::hardware::{MemoryRange, Partition};
use vendor_backends::mediator::wire::Refusal;
use vendor_backends::mediator::{Hardware, MediatedClient, MediatedGpu, server};
use vendor_backends::soft::SoftGpu;

/// Longest answer to a request. The GPU process waits for 0.5 s; a manager gives up after 4 s.
const PROMPT: Duration = Duration::from_secs(2);

/// Software GPU whose copies sleep while it is asleep, as in the memory of a VMM that answers no
/// page fault.
#[derive(Debug)]
struct SleepingGpu {
    gpu: SoftGpu,
    /// Whether copies sleep, and the number of copies that do.
    state: Mutex<(bool, u32)>,
    changed: Condvar,
}

impl SleepingGpu {
    fn set_asleep(&self, asleep: bool) {
        self.state.lock().unwrap().0 = asleep;
        self.changed.notify_all();
    }

    fn await_sleeper(&self) {
        let state = self.state.lock().unwrap();
        let limit = Duration::from_secs(20);
        let (_state, waited) =
            self.changed.wait_timeout_while(state, limit, |(_, sleepers)| *sleepers == 0).unwrap();
        assert!(!waited.timed_out(), "no copy began");
    }
}

impl Hardware for SleepingGpu {
    fn describe(&self) -> &GpuDescription {
        self.gpu.describe()
    }

    fn partition(&self, spec: &ClientSpec) -> Result<Partition, Refusal> {
        self.gpu.partition(spec)
    }

    fn copy(
        &self,
        vgpu: VgpuId,
        from: MemoryRange<'_>,
        to: MemoryRange<'_>,
        streaming: bool,
    ) -> Result<(), Fault> {
        let mut state = self.state.lock().unwrap();
        state.1 += 1;
        self.changed.notify_all();
        let mut state = self.changed.wait_while(state, |(asleep, _)| *asleep).unwrap();
        state.1 -= 1;
        drop(state);
        self.gpu.copy(vgpu, from, to, streaming)
    }
}

fn spec() -> ClientSpec {
    ClientSpec {
        vgpu: VgpuId::random(),
        vram_bytes: 64 * MIB,
        framebuffer_bytes: 0,
        max_channels: 8,
        max_import_bytes: 64 * MIB,
    }
}

fn driver(gpu: &mut MediatedGpu, spec: &ClientSpec) -> Driver {
    let connection = gpu.admit(spec).unwrap().fd.unwrap().into_trusted();
    Driver::new(Box::new(MediatedClient::open(connection).unwrap()))
}

/// Makes a request and checks how long its answer took.
fn promptly<T>(what: &str, request: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let answer = request();
    assert!(begun.elapsed() < PROMPT, "{what} took {:?}", begun.elapsed());
    answer
}

fn is_busy(result: &Result<(), GpuError>) -> bool {
    matches!(result, Err(GpuError::Io(error)) if error.raw_os_error() == Some(libc::EBUSY))
}

#[test]
fn a_vgpu_whose_memory_holds_the_engine_does_not_hold_up_the_manager() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let listener = SeqPacketListener::bind(&path).unwrap();
    let hardware = Arc::new(SleepingGpu {
        gpu: SoftGpu::new("soft0", 256 * MIB),
        state: Mutex::default(),
        changed: Condvar::new(),
    });
    let served = Arc::clone(&hardware);
    thread::spawn(move || server::run(served, Duration::from_secs(60), &listener).unwrap());
    let mut gpu = MediatedGpu::connect(&path).unwrap();
    let (holder, neighbour) = (spec(), spec());
    let mut driver_of_holder = driver(&mut gpu, &holder);
    let _neighbour = driver(&mut gpu, &neighbour);
    let mut ring = driver_of_holder.ring(EngineKind::Copy);
    hardware.set_asleep(true);
    let (from, to) = (driver_of_holder.va(12 * MIB), driver_of_holder.va(24 * MIB));
    driver_of_holder.submit(&mut ring, Pushbuffer::default().copy(from, to, 1 << 20));
    hardware.await_sleeper();

    let quotas = Quotas { submissions_per_second: NonZeroU32::new(1000), ..Quotas::default() };
    let id = holder.vgpu;
    let set = promptly("new quotas", || gpu.set_quotas(id, &quotas));
    assert!(is_busy(&set), "{set:?}");
    let reset = promptly("a reset", || gpu.reset_group(id));
    assert!(is_busy(&reset), "{reset:?}");
    // Requests that need nothing of the holder's take no time at all.
    promptly("a reading of the counters", || gpu.usage()).unwrap();
    promptly("the neighbour's quotas", || gpu.set_quotas(neighbour.vgpu, &quotas)).unwrap();
    promptly("a gate", || gpu.set_gate(id, false)).unwrap();
    promptly("an eviction", || gpu.evict(id)).unwrap();
    let again = promptly("an admission before the end of the eviction", || gpu.admit(&holder));
    assert!(again.is_err(), "its memory is in use");
    promptly("another vGPU", || gpu.admit(&spec())).unwrap();

    hardware.set_asleep(false);
    let begun = Instant::now();
    let _next = loop {
        match gpu.admit(&holder) {
            Ok(admission) => break admission,
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(20), "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    };
    promptly("quotas of the next vGPU", || gpu.set_quotas(id, &quotas)).unwrap();
}
