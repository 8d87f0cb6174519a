//! Checks of rings, channels, resets and interrupts.

use std::time::{Duration, Instant};

use mdev_core::abi::host::{self};
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::notifier;
use mdev_core::gpu::{Backing, EngineKind, GpuError, MapRequest, Pending};
use mdev_core::ids::{GpuVa, SpaceId};
use mdev_core::units::{MIB, PAGE_SIZE};

use super::driver::{DATA, Driver, ENTRIES, Pushbuffer, RAM_BYTES, Ring, readable};

/// Checks that a ring wraps around, and long pushbuffers.
pub(super) fn ring_wraps(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    for round in 0..3 * ENTRIES {
        let push = Pushbuffer::default().host(host::NOP, round);
        driver.finish(&mut ring, push);
    }
    let status = driver.client().query_channel(ring.id()).unwrap();
    assert_eq!((status.error, status.gp_get), (0, ring.put()));
    // A pushbuffer longer than a backend fetches at a time.
    let mut push = Pushbuffer::default();
    for word in 0..700 {
        push = push.host(host::SET_REFERENCE, word);
    }
    driver.finish(&mut ring, push);
}

/// Fills the ring with copies that take a second or more.
fn submit_long_copy(driver: &mut Driver, ring: &mut Ring, to: u64) {
    let from = driver.va(DATA);
    for _ in 0..ENTRIES - 4 {
        let mut push = Pushbuffer::default();
        for _ in 0..180 {
            push = push.copy(from, to, 4 << 20);
        }
        driver.submit(ring, push);
    }
}

/// Checks that a copy stops when its memory is released.
pub(super) fn release_in_flight(driver: &mut Driver) {
    let (other, memory) = driver.import(4 * MIB);
    let va = VA_START + (3 << 30);
    let backing = Backing::Guest { memory, offset: 0 };
    driver.client().map(&MapRequest::new(GpuVa(va), 4 * MIB, backing)).unwrap();
    driver.write(DATA, &vec![1; 1 << 20]);
    let mut ring = driver.ring(EngineKind::Copy);
    submit_long_copy(driver, &mut ring, va);
    let started = Instant::now();
    while other.mapping.load_u32(4096) == Some(0) {
        let status = driver.client().query_channel(ring.id());
        assert!(started.elapsed() < Duration::from_secs(5), "the copy has not started: {status:?}");
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
    assert!(driver.client().map(&MapRequest::new(GpuVa(va), PAGE_SIZE, again)).is_err());
}

/// Checks that a channel with work can be destroyed, and that unmapped rings fault.
pub(super) fn destroy_in_flight(driver: &mut Driver) {
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
    driver.client().unmap(SpaceId::DEFAULT, va, RAM_BYTES).unwrap();
    driver.submit(&mut ring, Pushbuffer::default());
    assert_eq!(driver.expect_fault(&ring).error, notifier::MMU_FAULT, "the ring is unmapped");
}

/// Checks that a reset removes channels and mappings and keeps imports.
pub(super) fn reset(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    let to = driver.va(DATA + 16 * MIB);
    submit_long_copy(driver, &mut ring, to);
    driver.client().reset().unwrap();
    assert!(matches!(driver.client().query_channel(ring.id()), Err(GpuError::NotFound(_))));
    assert_eq!(driver.client().usage().unwrap().channels, 0);
    // The reset keeps the import and removes all mappings.
    driver.map_ram();
    let mut ring = driver.ring(EngineKind::Copy);
    driver.write(DATA, &[5; 16]);
    let push = Pushbuffer::default().copy(driver.va(DATA), driver.va(DATA + MIB), 16);
    driver.finish(&mut ring, push);
    assert_eq!(driver.read(DATA + MIB, 16), [5; 16]);
}

/// Checks the events of interrupts and faults.
pub(super) fn interrupts(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    driver.client().take_pending();
    assert!(!driver.event_within(Duration::ZERO), "no event before the interrupt");
    let vector = driver.set_vector(0);
    driver.finish(&mut ring, Pushbuffer::default().host(host::NON_STALL_INTERRUPT, 0));
    assert!(driver.event_within(Duration::from_secs(5)));
    assert!(readable(&vector, Duration::from_secs(5)), "the guest's eventfd");
    assert!(driver.client().take_pending().contains(Pending::NONSTALL));
    assert!(driver.client().take_pending().is_empty());
    driver.submit(&mut ring, Pushbuffer::default().host(host::SET_OBJECT, 0x1234));
    driver.expect_fault(&ring);
    assert!(driver.event_within(Duration::from_secs(5)));
    assert!(driver.client().take_pending().contains(Pending::CHANNEL_ERROR));
}
