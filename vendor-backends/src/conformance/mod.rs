//! What every backend's [`Client`] must do, as assertions: a backend's tests call [`run`] with a way to open one.
//!
//! What a backend does not claim in its [`GpuCapabilities`] is not asked of it. A failed assertion panics.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a suite of assertions")]

mod driver;
mod kernels;
pub mod life;

use std::time::{Duration, Instant};

use mdev_core::abi::copy::{self, launch, remap};
use mdev_core::abi::host::{self, sem};
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::notifier;
use mdev_core::gpu::{
    Backing, ChannelSpec, Client, EngineKind, GpuCapabilities, GpuError, Pending,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId};
use mdev_core::units::{MIB, PAGE_SIZE};

pub use driver::{Done, Driver, Pushbuffer, Ring, readable};

/// Opens a fresh client with at least 16 MiB of video memory, 4 channels and 64 MiB of imports.
pub type Open<'a> = dyn FnMut() -> Box<dyn Client> + 'a;

/// One promise: what it is called, what it needs, and how it is checked.
type Check = (&'static str, GpuCapabilities, fn(&mut Driver));

/// The named programs are what the checks of the compute class run.
const PROGRAMS: GpuCapabilities = GpuCapabilities::COMPUTE.union(GpuCapabilities::SOFT_PROGRAMS);

/// The one named program of a device with a unit for it.
const FACTORIAL: GpuCapabilities = GpuCapabilities::COMPUTE.union(GpuCapabilities::FACTORIAL);

/// Video memory that the guest's CPU sees.
const THROUGH_BAR: GpuCapabilities = GpuCapabilities::COPY.union(GpuCapabilities::VRAM_APERTURE);

const CHECKS: &[Check] = &[
    ("copies any bytes anywhere", GpuCapabilities::COPY, copies),
    ("copies rectangles", GpuCapabilities::COPY, rectangles),
    ("fills with a pattern", GpuCapabilities::COPY, fills),
    ("copies to and from video memory", THROUGH_BAR, video_memory),
    ("releases semaphores in order, stamped", GpuCapabilities::COPY, releases),
    ("waits for semaphores", GpuCapabilities::COPY, acquires),
    ("goes round its ring", GpuCapabilities::COPY, ring_wraps),
    ("faults a channel for an address, and no other", GpuCapabilities::COPY, address_faults),
    ("keeps read-only memory as it is", GpuCapabilities::COPY, read_only),
    ("faults a channel for nonsense", GpuCapabilities::COPY, nonsense),
    ("refuses physical addresses", GpuCapabilities::COPY, physical),
    ("does not touch memory after its release", GpuCapabilities::COPY, release_in_flight),
    ("ends channels in flight", GpuCapabilities::COPY, destroy_in_flight),
    ("resets to nothing, and starts again", GpuCapabilities::COPY, reset),
    ("interrupts", GpuCapabilities::COPY, interrupts),
    ("refuses what cannot be", GpuCapabilities::COPY, refusals),
    ("computes", PROGRAMS, kernels::computes),
    ("computes no more than the grid has", PROGRAMS, kernels::grid_bounds),
    ("faults a channel for a bad descriptor", PROGRAMS, kernels::bad_descriptors),
    ("keeps kernels out of their windows", PROGRAMS, kernels::windows),
    ("computes factorials", FACTORIAL, kernels::factorials),
    ("preempts what never ends", PROGRAMS.union(GpuCapabilities::PREEMPTION), kernels::preempts),
];

/// Checks all promises, each on a client of its own; panics with the name of the one that is broken.
pub fn run(open: &mut Open<'_>) {
    run_with(open, driver::PATIENCE);
}

/// The same, for a GPU of which any one thing may take so long.
pub fn run_with(open: &mut Open<'_>, patience: Duration) {
    for (name, needs, check) in CHECKS {
        let client = open();
        if client.gpu().capabilities.contains(*needs) {
            eprintln!("conformance: {name}");
            let mut driver = Driver::new(client);
            driver.set_patience(patience);
            check(&mut driver);
        }
    }
}

/// Checks only what needs no engine: that what cannot be is refused.
pub fn run_refusals(open: &mut Open<'_>) {
    refusals(&mut Driver::new(open()));
}

/// Checks all promises like [`run`], but goes on after one that is broken: each name, and what was wrong.
pub fn survey(open: &mut Open<'_>) -> Vec<(&'static str, Result<(), String>)> {
    let mut findings = Vec::new();
    for (name, needs, check) in CHECKS {
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let client = open();
            if client.gpu().capabilities.contains(*needs) {
                check(&mut Driver::new(client));
            }
        }));
        let told = checked.map_err(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
                .unwrap_or_default()
        });
        findings.push((*name, told));
    }
    findings
}

/// Where a test's data begins in guest memory.
const DATA: u64 = driver::DATA;

fn pattern(len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..len).map(next).collect()
}

fn copies(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    let at = [(0, 0, 1), (3, 8, 77), (0, 1, 4096), (4095, 4097, 8193), (5, 64, 3 << 20)];
    for (seed, (from, to, len)) in at.into_iter().enumerate() {
        let (from, to) = (DATA + from, DATA + 16 * MIB + to);
        let bytes = pattern(len, seed as u32);
        driver.write(from, &bytes);
        driver.write(to - 1, &vec![0xee; len + 2]);
        let push = Pushbuffer::default().copy(driver.va(from), driver.va(to), len as u32);
        driver.finish(&mut ring, push);
        assert!(driver.read(to, len) == bytes, "{len} bytes");
        assert_eq!(
            (driver.read(to - 1, 1), driver.read(to + len as u64, 1)),
            (vec![0xee], vec![0xee])
        );
    }
}

fn rectangles(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    let bytes = pattern(64 * 256, 1);
    driver.write(DATA, &bytes);
    let to = DATA + MIB;
    driver.write(to, &vec![0; 40 * 300]);
    // 40 rows of 100 bytes, from pitch 256 to pitch 300.
    let push = Pushbuffer::default()
        .addresses(driver.va(DATA), driver.va(to))
        .copy_method(copy::PITCH_IN, &[256, 300, 100, 40])
        .launch(launch::MULTI_LINE);
    driver.finish(&mut ring, push);
    for row in 0..40 {
        let got = driver.read(to + row * 300, 101);
        assert!(got[..100] == bytes[row as usize * 256..][..100] && got[100] == 0, "row {row}");
    }
    // Upside down, by a negative pitch.
    let push = Pushbuffer::default()
        .addresses(driver.va(DATA), driver.va(to + 39 * 300))
        .copy_method(copy::PITCH_IN, &[256, (-300i32).cast_unsigned(), 100, 40])
        .launch(launch::MULTI_LINE);
    driver.finish(&mut ring, push);
    assert!(driver.read(to, 100) == bytes[39 * 256..][..100]);
}

fn fills(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    let words = |count: u32, size: u32, x: u32, y: u32| {
        (count - 1) << remap::NUM_DST_SHIFT | (size - 1) << remap::COMPONENT_SIZE_SHIFT | x | y << 4
    };
    let mut fill = |components: u32, elements: u32| {
        let push = Pushbuffer::default()
            .addresses(0, driver.va(DATA))
            .copy_method(copy::LINE_LENGTH_IN, &[elements])
            .copy_method(copy::SET_REMAP_CONST_A, &[0x1122_3344, 0x5566_7788, components])
            .launch(launch::REMAP);
        driver.write(DATA, &[0xee; 16]);
        driver.finish(&mut ring, push);
        driver.read(DATA, 16)
    };
    assert_eq!(
        fill(words(1, 4, remap::CONST_A, 0), 3)[..13],
        [0x44, 0x33, 0x22, 0x11, 0x44, 0x33, 0x22, 0x11, 0x44, 0x33, 0x22, 0x11, 0xee]
    );
    assert_eq!(
        fill(words(2, 2, remap::CONST_A, remap::CONST_B), 1)[..5],
        [0x44, 0x33, 0x88, 0x77, 0xee]
    );
    assert_eq!(
        fill(words(2, 1, remap::NO_WRITE, remap::CONST_A), 2)[..5],
        [0xee, 0x44, 0xee, 0x44, 0xee]
    );
    fill(words(1, 4, remap::CONST_B, 0), 1 << 20);
    assert_eq!(driver.read(DATA + (4 << 20) - 4, 4), [0x88, 0x77, 0x66, 0x55]);
}

fn video_memory(driver: &mut Driver) {
    let vram = driver.map_vram(4 * MIB, 2 * MIB);
    let mut ring = driver.ring(EngineKind::Copy);
    let bytes = pattern(1 << 20, 9);
    driver.write(DATA, &bytes);
    let push = Pushbuffer::default().copy(driver.va(DATA), vram + 4096, 1 << 20);
    driver.finish(&mut ring, push);
    assert!(driver.read_vram(4 * MIB + 4096, 1 << 20) == bytes, "through the aperture");
    let push = Pushbuffer::default().copy(vram + 4096, driver.va(DATA + 8 * MIB), 1 << 20);
    driver.finish(&mut ring, push);
    assert!(driver.read(DATA + 8 * MIB, 1 << 20) == bytes);
}

fn releases(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    let va = driver.va(DATA);
    driver.write(DATA, &[0; 64]);
    let push = Pushbuffer::default()
        .semaphore(va, 0x1_0000_0007, sem::RELEASE)
        .semaphore(va + 8, 0x2_0000_0008, sem::RELEASE | sem::PAYLOAD_64)
        .semaphore(va + 16, 9, sem::RELEASE | sem::RELEASE_TIMESTAMP | sem::RELEASE_WFI)
        .semaphore(va + 32, 10, sem::RELEASE | sem::RELEASE_TIMESTAMP);
    driver.finish(&mut ring, push);
    let word = |offset: u64| u64::from_le_bytes(driver.read(DATA + offset, 8).try_into().unwrap());
    assert_eq!((word(0), word(8)), (7, 0x2_0000_0008), "only as wide as asked for");
    assert_eq!((word(16) as u32, word(32) as u32), (9, 10));
    assert!(word(24) > 0 && word(40) >= word(24), "stamps go up");
    let push = Pushbuffer::default()
        .copy_method(copy::SET_SEMAPHORE_A, &[(va >> 32) as u32, va as u32 + 48, 11])
        .copy_method(copy::LAUNCH_DMA, &[launch::SEMAPHORE_TIMESTAMP]);
    driver.finish(&mut ring, push);
    let last = u64::from_le_bytes(driver.read(DATA + 56, 8).try_into().unwrap());
    assert_eq!(driver.read(DATA + 48, 4), [11, 0, 0, 0]);
    assert!(last >= word_of(driver, 40));
}

fn word_of(driver: &Driver, offset: u64) -> u64 {
    u64::from_le_bytes(driver.read(DATA + offset, 8).try_into().unwrap())
}

fn acquires(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    let va = driver.va(DATA);
    let cases: [(u32, u32, &[u32], u32); 5] = [
        (sem::ACQUIRE, 5, &[4, 6], 5),
        (sem::ACQ_STRICT_GEQ, 5, &[0, 4], 0xffff_ffff),
        (sem::ACQ_CIRC_GEQ, 5, &[4, 0xffff_fff0], 6),
        (sem::ACQ_AND, 6, &[0, 9], 2),
        (sem::ACQ_NOR, 0xffff_0000, &[0xffff, 0xffff_ffff], 0xfffe),
    ];
    for (operation, payload, not_enough, enough) in cases {
        driver.write(DATA, &not_enough[0].to_le_bytes());
        let flags = operation | sem::ACQUIRE_SWITCH_TSG;
        let push = Pushbuffer::default().semaphore(va, payload.into(), flags);
        let done = driver.submit(&mut ring, push);
        for value in not_enough {
            driver.write(DATA, &value.to_le_bytes());
            assert!(!driver.wait_for(done, Duration::from_millis(20)), "{operation}: {value:#x}");
        }
        driver.write(DATA, &enough.to_le_bytes());
        assert!(driver.wait(done), "{operation}: {enough:#x}");
    }
}

fn ring_wraps(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    for round in 0..3 * driver::ENTRIES {
        let push = Pushbuffer::default().host(host::NOP, round);
        driver.finish(&mut ring, push);
    }
    let status = driver.client().query_channel(ring.id()).unwrap();
    assert_eq!((status.error, status.gp_get), (0, ring.put()));
    // A pushbuffer that is longer than any window a backend may fetch at a time.
    let mut push = Pushbuffer::default();
    for word in 0..700 {
        push = push.host(host::SET_REFERENCE, word);
    }
    driver.finish(&mut ring, push);
}

fn address_faults(driver: &mut Driver) {
    let alone = driver.client().gpu().capabilities.contains(GpuCapabilities::CHANNEL_FAULTS);
    let mut good = driver.ring(if alone { EngineKind::Copy } else { EngineKind::Compute });
    let hole = VA_START + (1 << 36);
    let past_the_end = driver.va(driver::RAM_BYTES);
    let data = driver.va(DATA);
    for (from, to) in [(hole, data), (data, hole), (data, past_the_end - 8), (data, u64::MAX >> 7)]
    {
        let mut bad = driver.ring(EngineKind::Copy);
        driver.submit(&mut bad, Pushbuffer::default().copy(from, to, 64));
        let status = driver.expect_fault(&bad);
        assert_eq!(status.error, notifier::MMU_FAULT, "{from:#x} to {to:#x}");
        let push = Pushbuffer::default().copy(data, data + MIB, 64);
        driver.finish(&mut good, push);
        driver.destroy(bad);
    }
    let mut bad = driver.ring(EngineKind::Copy);
    driver.submit(&mut bad, Pushbuffer::default().semaphore(hole, 1, sem::RELEASE));
    assert_eq!(driver.expect_fault(&bad).error, notifier::MMU_FAULT);
    assert!(driver.client().usage().unwrap().faults >= 5);
}

fn read_only(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    let va = VA_START + (2 << 30);
    let backing = Backing::Guest { memory: driver.memory(), offset: DATA };
    driver.client().map(GpuVa(va), PAGE_SIZE, backing, false).unwrap();
    driver.write(DATA, &[7; 64]);
    let push = Pushbuffer::default().copy(va, driver.va(DATA + MIB), 64);
    driver.finish(&mut ring, push);
    let push = Pushbuffer::default().copy(driver.va(DATA + MIB + 64), va, 64);
    driver.submit(&mut ring, push);
    assert_eq!(driver.expect_fault(&ring).error, notifier::MMU_FAULT);
    assert_eq!(driver.read(DATA, 64), [7; 64]);
}

fn nonsense(driver: &mut Driver) {
    let data = driver.va(DATA);
    let pushes = [
        Pushbuffer::default().host(0x00f0, 0),
        Pushbuffer::default().copy_method(0x0ffc, &[0]),
        Pushbuffer::default().method(6, 0x0300, &[0]),
        Pushbuffer::default().host(host::SET_OBJECT, 0x1234),
        Pushbuffer::default().semaphore(data + 4, 0, sem::RELEASE | sem::RELEASE_TIMESTAMP),
        Pushbuffer::default().copy_method(host::MEM_OP_D, &[9 << 27]),
    ];
    for (case, push) in pushes.into_iter().enumerate() {
        let mut ring = driver.ring(EngineKind::Copy);
        driver.submit(&mut ring, push);
        let error = driver.expect_fault(&ring).error;
        assert!(
            [notifier::GR_ERROR, notifier::PBDMA_ERROR].contains(&error),
            "case {case}: {error}"
        );
        driver.destroy(ring);
    }
    let mut ring = driver.ring(EngineKind::Copy);
    driver.set_put(&mut ring, driver::ENTRIES);
    assert_eq!(driver.expect_fault(&ring).error, notifier::PBDMA_ERROR, "GP_PUT past the ring");
    let mut ring = driver.ring(EngineKind::Copy);
    driver.submit_entry(&mut ring, host::GpEntry::Segment { va: VA_START + (1 << 36), dwords: 9 });
    let error = driver.expect_fault(&ring).error;
    assert!([notifier::MMU_FAULT, notifier::PBDMA_ERROR].contains(&error), "pushbuffer: {error}");
}

fn physical(driver: &mut Driver) {
    driver.write(DATA + MIB, &[7; 64]);
    let pitch = launch::SRC_PITCH | launch::DST_PITCH;
    for flags in [pitch | launch::SRC_PHYSICAL, pitch | launch::DST_PHYSICAL, launch::SRC_PITCH] {
        let mut ring = driver.ring(EngineKind::Copy);
        let push = Pushbuffer::default()
            .addresses(driver.va(DATA), driver.va(DATA + MIB))
            .copy_method(copy::LINE_LENGTH_IN, &[64])
            .copy_method(copy::LAUNCH_DMA, &[launch::TRANSFER_NON_PIPELINED | flags]);
        driver.submit(&mut ring, push);
        driver.expect_fault(&ring);
        driver.destroy(ring);
    }
    assert_eq!(driver.read(DATA + MIB, 64), [7; 64]);
}

/// Queues copies for a second or more: all that the ring takes, so that nobody has to refill it.
fn submit_long_copy(driver: &mut Driver, ring: &mut Ring, to: u64) {
    let from = driver.va(DATA);
    for _ in 0..driver::ENTRIES - 4 {
        let mut push = Pushbuffer::default();
        for _ in 0..180 {
            push = push.copy(from, to, 4 << 20);
        }
        driver.submit(ring, push);
    }
}

fn release_in_flight(driver: &mut Driver) {
    let (other, memory) = driver.import(4 * MIB);
    let va = VA_START + (3 << 30);
    let backing = Backing::Guest { memory, offset: 0 };
    driver.client().map(GpuVa(va), 4 * MIB, backing, true).unwrap();
    driver.write(DATA, &vec![1; 1 << 20]);
    let mut ring = driver.ring(EngineKind::Copy);
    submit_long_copy(driver, &mut ring, va);
    let started = Instant::now();
    while other.mapping.load_u32(4096) == Some(0) {
        let status = driver.client().query_channel(ring.id());
        assert!(started.elapsed() < Duration::from_secs(5), "the copy does not start: {status:?}");
    }
    driver.client().release(memory).unwrap();
    other.mapping.write(0, &vec![2; 1 << 20]).unwrap();
    std::thread::sleep(Duration::from_millis(5));
    let mut after = vec![0; 1 << 20];
    other.mapping.read(0, &mut after).unwrap();
    assert!(after.iter().all(|byte| *byte == 2), "written after release");
    assert_eq!(driver.expect_fault(&ring).error, notifier::MMU_FAULT);
    assert!(matches!(driver.client().release(memory), Err(GpuError::NotFound(_))));
    let again = Backing::Guest { memory, offset: 0 };
    assert!(driver.client().map(GpuVa(va), PAGE_SIZE, again, true).is_err());
}

fn destroy_in_flight(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    let to = driver.va(DATA + 16 * MIB);
    submit_long_copy(driver, &mut ring, to);
    let started = Instant::now();
    driver.client().destroy_channel(ring.id()).unwrap();
    assert!(started.elapsed() < Duration::from_secs(2));
    assert!(matches!(driver.client().query_channel(ring.id()), Err(GpuError::NotFound(_))));
    let mut ring = driver.ring(EngineKind::Copy);
    driver.finish(&mut ring, Pushbuffer::default());
    let va = GpuVa(driver.va(0));
    driver.client().unmap(va, driver::RAM_BYTES).unwrap();
    driver.submit(&mut ring, Pushbuffer::default());
    assert_eq!(driver.expect_fault(&ring).error, notifier::MMU_FAULT, "its ring is gone");
}

fn reset(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    let to = driver.va(DATA + 16 * MIB);
    submit_long_copy(driver, &mut ring, to);
    driver.client().reset().unwrap();
    assert!(matches!(driver.client().query_channel(ring.id()), Err(GpuError::NotFound(_))));
    assert_eq!(driver.client().usage().unwrap().channels, 0);
    // The import is still there, and all addresses are free again.
    driver.map_ram();
    let mut ring = driver.ring(EngineKind::Copy);
    driver.write(DATA, &[5; 16]);
    let push = Pushbuffer::default().copy(driver.va(DATA), driver.va(DATA + MIB), 16);
    driver.finish(&mut ring, push);
    assert_eq!(driver.read(DATA + MIB, 16), [5; 16]);
}

fn interrupts(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    driver.client().take_pending();
    assert!(!driver.event_within(Duration::ZERO), "quiet at first");
    let vector = driver.set_vector(0);
    driver.finish(&mut ring, Pushbuffer::default().host(host::NON_STALL_INTERRUPT, 0));
    assert!(driver.event_within(Duration::from_secs(5)));
    assert!(driver::readable(&vector, Duration::from_secs(5)), "the guest's own eventfd");
    assert!(driver.client().take_pending().contains(Pending::NONSTALL));
    assert!(driver.client().take_pending().is_empty());
    driver.submit(&mut ring, Pushbuffer::default().host(host::SET_OBJECT, 0x1234));
    driver.expect_fault(&ring);
    assert!(driver.event_within(Duration::from_secs(5)));
    assert!(driver.client().take_pending().contains(Pending::CHANNEL_ERROR));
}

fn refusals(driver: &mut Driver) {
    let memory = driver.memory();
    let client = driver.client();
    let guest = |offset| Backing::Guest { memory, offset };
    let free = VA_START + (5 << 30);
    let mut map = |va: u64, len: u64, backing| client.map(GpuVa(va), len, backing, true);
    assert!(matches!(map(free + 1, PAGE_SIZE, guest(0)), Err(GpuError::Invalid(_))));
    assert!(matches!(map(free, 0, guest(0)), Err(GpuError::Invalid(_))));
    assert!(matches!(map(0, PAGE_SIZE, guest(0)), Err(GpuError::OutOfRange(_))));
    assert!(matches!(map(!0xfff, PAGE_SIZE, guest(0)), Err(GpuError::OutOfRange(_))));
    assert!(matches!(map(free, PAGE_SIZE, guest(driver::RAM_BYTES)), Err(GpuError::OutOfRange(_))));
    assert!(matches!(map(free, PAGE_SIZE, guest(!0xfff)), Err(GpuError::OutOfRange(_))));
    let no_memory = Backing::Guest { memory: MemoryId(u32::MAX), offset: 0 };
    assert!(matches!(map(free, PAGE_SIZE, no_memory), Err(GpuError::NotFound(_))));
    map(free, 2 * PAGE_SIZE, guest(0)).unwrap();
    let overlap = map(free + PAGE_SIZE, PAGE_SIZE, guest(0));
    assert!(matches!(overlap, Err(GpuError::Overlap(GpuVa(va))) if va == free + PAGE_SIZE));
    let client = driver.client();
    assert!(matches!(client.unmap(GpuVa(free), 3 * PAGE_SIZE), Err(GpuError::NotFound(_))));
    client.unmap(GpuVa(free), 2 * PAGE_SIZE).unwrap();

    let good = ChannelSpec {
        engine: EngineKind::Copy,
        gpfifo: GpuVa(free),
        gpfifo_entries: 64,
        userd: guest(0),
        vector: 0,
    };
    for bad in [
        ChannelSpec { gpfifo: GpuVa(free + 4), ..good },
        ChannelSpec { gpfifo: GpuVa(1 << 41), ..good },
        ChannelSpec { gpfifo_entries: 63, ..good },
        ChannelSpec { gpfifo_entries: 0, ..good },
        ChannelSpec { gpfifo_entries: 1 << 17, ..good },
        ChannelSpec { userd: guest(8), ..good },
        ChannelSpec { userd: guest(driver::RAM_BYTES), ..good },
        ChannelSpec { userd: no_memory, ..good },
        ChannelSpec { vector: 99, ..good },
    ] {
        assert!(client.create_channel(&bad).is_err(), "{bad:?}");
    }
    let missing = client.destroy_channel(ChannelId(12345));
    assert!(matches!(missing, Err(GpuError::NotFound(_))));
    assert!(client.release(MemoryId(12345)).is_err());
    let limit = client.spec().max_channels;
    for _ in 0..limit {
        client.create_channel(&good).unwrap();
    }
    assert!(matches!(client.create_channel(&good), Err(GpuError::Limit(_))));
}
