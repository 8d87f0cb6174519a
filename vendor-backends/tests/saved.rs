//! Saving and restoring a vGPU of the software GPU while it works.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "support/soft_vgpu.rs"]
mod soft_vgpu;

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use mdev_core::abi::copy::{self, remap};
use mdev_core::abi::host::sem;
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::program::{Kernel, Mandelbrot, Saxpy, Sgemm, Spin};
use mdev_core::gpu::{
    Apertures, Backing, ChannelHandle, ChannelSpec, ChannelStatus, Client, ClientHandle,
    ClientSpec, EngineKind, GpuDescription, GpuError, GuestRam, MapRequest, Pending, SavedChannel,
    SavedClient, SharedClient, Usage,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, SpaceId, Token};
use mdev_core::units::MIB;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use vendor_backends::conformance::{self, Driver, Pushbuffer, client_spec as spec, launch_program};

/// Part of the guest's memory that the tests use.
const RAM: usize = 1 << 20;
/// GPU virtual address of the driver's memory.
const VA: u64 = VA_START + (1 << 30);
/// Offset of a test's data in guest memory.
const DATA: u64 = 12 * MIB;
/// Time between two restores. A step of a kernel takes some 10 us.
const INTERVAL: Duration = Duration::from_micros(300);

/// Destroys all channels, mappings and address spaces of a client, and restores them.
fn restore(client: &mut dyn Client, saved: &SavedClient) -> Result<(), GpuError> {
    client.reset()?;
    client.saving().unwrap().pause()?;
    for space in &saved.spaces {
        client.saving().unwrap().restore_space(*space)?;
    }
    for mapping in &saved.mappings {
        client.map(mapping)?;
    }
    for channel in &saved.channels {
        client.saving().unwrap().restore_channel(channel)?;
    }
    Ok(())
}

/// A client that a thread saves and restores all the time.
#[derive(Debug)]
struct Restless {
    client: ClientHandle,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _held: soft_vgpu::Held,
}

fn save_and_restore(client: &SharedClient, restores: &AtomicU32) {
    let mut client = client.lock();
    client.saving().unwrap().pause().unwrap();
    let saved = client.saving().unwrap().save().unwrap();
    restore(&mut **client, &saved).unwrap();
    let saving = client.saving().unwrap();
    assert_eq!(saving.save().unwrap(), saved, "the restored state is the saved one");
    saving.resume().unwrap();
    restores.fetch_add(1, Ordering::Relaxed);
}

impl Restless {
    fn start(restores: &Arc<AtomicU32>) -> Self {
        let (client, held) = soft_vgpu::start(&spec());
        let client = ClientHandle::new(Box::new(client)).unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let (shared, end, count) = (client.share(), Arc::clone(&ends), Arc::clone(restores));
        let thread = thread::spawn(move || {
            while !end.load(Ordering::Relaxed) {
                save_and_restore(&shared, &count);
                thread::sleep(INTERVAL);
            }
        });
        Self { client, ends, thread: Some(thread), _held: held }
    }
}

impl Drop for Restless {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || thread::panicking(), "a restore failed");
    }
}

impl Client for Restless {
    fn spec(&self) -> &ClientSpec {
        self.client.spec()
    }

    fn gpu(&self) -> &GpuDescription {
        self.client.gpu()
    }

    fn apertures(&self) -> &Apertures {
        self.client.apertures()
    }

    fn import(&mut self, ram: GuestRam<'_>) -> Result<MemoryId, GpuError> {
        self.client.lock().import(ram)
    }

    fn release(&mut self, memory: MemoryId) -> Result<(), GpuError> {
        self.client.lock().release(memory)
    }

    fn create_space(&mut self) -> Result<SpaceId, GpuError> {
        self.client.lock().create_space()
    }

    fn destroy_space(&mut self, space: SpaceId) -> Result<(), GpuError> {
        self.client.lock().destroy_space(space)
    }

    fn map(&mut self, request: &MapRequest) -> Result<(), GpuError> {
        self.client.lock().map(request)
    }

    fn unmap(&mut self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), GpuError> {
        self.client.lock().unmap(space, va, len)
    }

    fn create_channel(&mut self, spec: &ChannelSpec) -> Result<ChannelHandle, GpuError> {
        self.client.lock().create_channel(spec)
    }

    fn destroy_channel(&mut self, id: ChannelId) -> Result<(), GpuError> {
        self.client.lock().destroy_channel(id)
    }

    fn query_channel(&mut self, id: ChannelId) -> Result<ChannelStatus, GpuError> {
        self.client.lock().query_channel(id)
    }

    fn wake(&mut self, token: Token) -> Result<(), GpuError> {
        self.client.lock().wake(token)
    }

    fn wake_event(&self) -> Option<BorrowedFd<'_>> {
        self.client.wake_event()
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.client.event()
    }

    fn set_interrupt(
        &mut self,
        vector: u32,
        event: Option<BorrowedFd<'_>>,
    ) -> Result<(), GpuError> {
        self.client.lock().set_interrupt(vector, event)
    }

    fn take_pending(&mut self) -> Pending {
        self.client.lock().take_pending()
    }

    fn reset(&mut self) -> Result<(), GpuError> {
        self.client.lock().reset()
    }

    fn usage(&mut self) -> Result<Usage, GpuError> {
        self.client.lock().usage()
    }
}

/// All classes, kernels, faults and waits, interrupted thousands of times.
#[test]
fn work_that_is_saved_and_restored_all_the_time_has_the_same_results() {
    let restores = Arc::new(AtomicU32::new(0));
    conformance::run(&mut || Box::new(Restless::start(&restores)));
    let restores = restores.load(Ordering::Relaxed);
    println!("{restores} restores");
    assert!(restores > 300, "{restores}");
}

/// Runs a long job of each kind. Returns what they have written.
fn long_jobs(driver: &mut Driver) -> Vec<u8> {
    let mut ring = driver.ring(EngineKind::Compute);
    let at = |offset: u64| DATA + offset * MIB;
    let va = |offset: u64| VA + at(offset);
    let numbers: Vec<u8> =
        (0..2_u32 << 20).flat_map(|n| ((n % 1013) as f32 * 0.25).to_le_bytes()).collect();
    driver.write(at(1), &numbers);
    let mut run = |driver: &mut Driver, push| driver.finish(&mut ring, push);

    let (n, reserved) = (400, 0);
    let sgemm = Sgemm { a: va(1), b: va(2), c: va(10), n, reserved };
    let push = launch_program(driver, Kernel::Sgemm, &sgemm, [50, 50], [8, 8]);
    run(driver, push);
    let (width, height) = (400, 300);
    let picture = Mandelbrot {
        pixels: va(12),
        pitch: 4 * width,
        width,
        height,
        max_iterations: 500,
        left: -2.0,
        top: -1.2,
        step: 0.006,
        reserved,
    };
    let push = launch_program(driver, Kernel::Mandelbrot, &picture, [50, 38], [8, 8]);
    run(driver, push);
    let n = 1_000_000;
    let saxpy = Saxpy { x: va(1), y: va(14), a: 1.5, n };
    let push = launch_program(driver, Kernel::Saxpy, &saxpy, [n.div_ceil(256), 1], [256, 1]);
    // A launch that ran twice would add twice.
    run(driver, push);
    let spin = Spin { out: va(9), iterations: 3000, reserved };
    let push = launch_program(driver, Kernel::Spin, &spin, [500, 1], [32, 1]);
    run(driver, push);
    // A copy of rows, a fill with a gap in each element, and a rearranged copy.
    let rows = Pushbuffer::default()
        .addresses(va(1), va(19))
        .copy_method(copy::PITCH_IN, &[7000, 8000, 6999, 500])
        .launch(copy::launch::MULTI_LINE);
    run(driver, rows);
    let elements = |bits, to, constants: [u32; 2]| {
        Pushbuffer::default()
            .addresses(va(1), to)
            .copy_method(copy::SET_REMAP_CONST_A, &[constants[0], constants[1], bits])
            .copy_method(copy::LINE_LENGTH_IN, &[100_000, 1])
            .launch(copy::launch::REMAP)
    };
    let two = 1 << remap::NUM_DST_SHIFT | 1 << remap::NUM_SRC_SHIFT;
    let [first, second, ..] = remap::DST_SHIFTS;
    let gaps = two | remap::CONST_A << first | remap::NO_WRITE << second;
    run(driver, elements(gaps, va(24), [0xab, 0]));
    let swapped = two | 1 << first | 0 << second;
    run(driver, elements(swapped, va(25), [0, 0]));
    run(driver, elements(remap::CONST_A | 3 << remap::COMPONENT_SIZE_SHIFT, va(26), [77, 0]));
    driver.read(at(9), 18 << 20)
}

/// Long kernels, copies and fills, each interrupted many times, have the results of calm ones.
#[test]
fn long_jobs_that_are_interrupted_have_the_same_results() {
    let (mut calm, _held) = driver();
    let expected = long_jobs(&mut calm);
    assert_eq!(expected[..4], 500_u32.to_le_bytes(), "one for each block");
    let restores = Arc::new(AtomicU32::new(0));
    let mut driver = Driver::new(Box::new(Restless::start(&restores)));
    let found = long_jobs(&mut driver);
    drop(driver);
    let different = expected.iter().zip(&found).position(|(one, other)| one != other);
    assert_eq!(different, None, "of {} bytes", expected.len());
    let restores = restores.load(Ordering::Relaxed);
    println!("{restores} restores during long jobs");
    assert!(restores > 50, "{restores}");
}

/// Returns a driver of a vGPU, and what keeps the vGPU.
fn driver() -> (Driver, soft_vgpu::Held) {
    let (client, held) = soft_vgpu::start(&spec());
    (Driver::new(Box::new(client)), held)
}

#[test]
fn a_paused_vgpu_does_nothing_until_it_is_resumed() {
    let (mut driver, _held) = driver();
    let mut ring = driver.ring(EngineKind::Copy);
    assert!(driver.client().saving().unwrap().save().is_err(), "it runs");
    driver.client().saving().unwrap().pause().unwrap();
    let done = driver.submit(&mut ring, Pushbuffer::default());
    let memory = driver.read(0, RAM);
    assert!(!driver.wait_for(done, Duration::from_millis(100)), "it is paused");
    assert!(driver.read(0, RAM) == memory, "nothing is written, not even NEED_WAKEUP");
    driver.client().saving().unwrap().resume().unwrap();
    assert!(driver.wait(done));
    // A reset ends a pause.
    driver.client().saving().unwrap().pause().unwrap();
    driver.client().reset().unwrap();
    driver.map_ram();
    let mut ring = driver.ring(EngineKind::Copy);
    driver.finish(&mut ring, Pushbuffer::default());
}

#[test]
fn a_channel_is_restored_with_its_id_into_a_paused_vgpu_only() {
    let (mut driver, _held) = driver();
    let ring = driver.ring(EngineKind::Copy);
    driver.client().saving().unwrap().pause().unwrap();
    let saved = driver.client().saving().unwrap().save().unwrap();
    let [channel] = &saved.channels[..] else { panic!("{saved:?}") };
    assert_eq!(channel.id, ring.id());
    let client = driver.client();
    assert!(client.saving().unwrap().restore_channel(channel).is_err(), "it exists");
    client.destroy_channel(channel.id).unwrap();
    client.saving().unwrap().resume().unwrap();
    assert!(client.saving().unwrap().restore_channel(channel).is_err(), "it is not paused");
    client.saving().unwrap().pause().unwrap();
    client.saving().unwrap().restore_channel(channel).unwrap();
    let outside = SavedChannel {
        id: ChannelId(channel.id.0 + 1),
        spec: ChannelSpec { userd: Backing::Vram { offset: 64 * MIB }, ..channel.spec },
        ..channel.clone()
    };
    assert!(client.saving().unwrap().restore_channel(&outside).is_err(), "its USERD is nowhere");
    client.saving().unwrap().resume().unwrap();
}

/// Returns the state of a vGPU with an endless kernel, a wait and a long copy in progress.
fn busy_state(driver: &mut Driver) -> SavedClient {
    let mut rings: Vec<_> = (0..3).map(|_| driver.ring(EngineKind::Compute)).collect();
    driver.spin_forever(&mut rings[0]);
    let (from, to) = (driver.va(DATA), driver.va(DATA + 16 * MIB));
    let wait = Pushbuffer::default().semaphore(from, 1, sem::ACQUIRE);
    driver.submit(&mut rings[1], wait);
    let copies = (0..20).fold(Pushbuffer::default(), |push, _| push.copy(from, to, 16 << 20));
    driver.submit(&mut rings[2], copies);
    // All three have begun.
    while rings.iter().any(|ring| driver.client().query_channel(ring.id()).unwrap().engine_ns == 0)
    {
        thread::sleep(Duration::from_millis(1));
    }
    driver.client().saving().unwrap().pause().unwrap();
    driver.client().saving().unwrap().save().unwrap()
}

/// Damaged states are refused, or are states that a guest can cause: the engine survives them.
#[test]
fn damaged_states_harm_nothing() {
    let (mut driver, _held) = driver();
    let saved = busy_state(&mut driver);
    let client = std::cell::RefCell::new(driver);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(512));
    let change = (any::<prop::sample::Index>(), any::<u8>());
    let damage = (0..saved.channels.len(), prop::collection::vec(change, 1..4), any::<bool>());
    let (restored, refused) = (Cell::new(0), Cell::new(0));
    runner
        .run(&damage, |(channel, changes, shorten)| {
            let mut state = saved.clone();
            let bytes = &mut state.channels[channel].state;
            for (index, byte) in changes {
                let at = index.index(bytes.len());
                bytes[at] = byte;
                if shorten {
                    bytes.truncate(at);
                    break;
                }
            }
            let mut driver = client.borrow_mut();
            match restore(driver.client(), &state) {
                Ok(()) => restored.set(restored.get() + 1),
                Err(GpuError::Lost(reason)) => panic!("{reason}"),
                Err(_) => refused.set(refused.get() + 1),
            }
            driver.client().saving().unwrap().resume().unwrap();
            thread::sleep(Duration::from_millis(1));
            Ok(())
        })
        .unwrap();
    println!("{} restored, {} refused", restored.get(), refused.get());
    assert!(restored.get() > 0 && refused.get() > 0);
    // The engine still runs.
    let mut driver = client.into_inner();
    driver.client().reset().unwrap();
    driver.map_ram();
    let mut ring = driver.ring(EngineKind::Copy);
    driver.finish(&mut ring, Pushbuffer::default());
}
