//! Checks of faults.

use mdev_core::abi::copy::{self, launch};
use mdev_core::abi::host::{self, sem};
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::notifier;
use mdev_core::gpu::{Backing, EngineKind, GpuCapabilities, MapRequest};
use mdev_core::ids::GpuVa;
use mdev_core::units::{MIB, PAGE_SIZE};

use super::driver::{DATA, Driver, ENTRIES, Pushbuffer, RAM_BYTES};

/// Checks that accesses to unmapped addresses fault their channel only.
pub(super) fn address_faults(driver: &mut Driver) {
    let faults_alone = driver.client().gpu().capabilities.contains(GpuCapabilities::CHANNEL_FAULTS);
    let mut good = driver.ring(if faults_alone { EngineKind::Copy } else { EngineKind::Compute });
    let hole = VA_START + (1 << 36);
    let end = driver.va(RAM_BYTES);
    let data = driver.va(DATA);
    for (from, to) in [(hole, data), (data, hole), (data, end - 8), (data, u64::MAX >> 7)] {
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

/// Checks that read-only memory can be read and faults writes.
pub(super) fn read_only(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    let va = VA_START + (2 << 30);
    let backing = Backing::Guest { memory: driver.memory(), offset: DATA };
    driver.client().map(&MapRequest::new(GpuVa(va), PAGE_SIZE, backing).read_only()).unwrap();
    driver.write(DATA, &[7; 64]);
    let push = Pushbuffer::default().copy(va, driver.va(DATA + MIB), 64);
    driver.finish(&mut ring, push);
    let push = Pushbuffer::default().copy(driver.va(DATA + MIB + 64), va, 64);
    driver.submit(&mut ring, push);
    assert_eq!(driver.expect_fault(&ring).error, notifier::MMU_FAULT);
    assert_eq!(driver.read(DATA, 64), [7; 64]);
}

/// Checks that invalid methods and ring entries fault.
pub(super) fn invalid_methods(driver: &mut Driver) {
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
    driver.set_put(&mut ring, ENTRIES);
    assert_eq!(driver.expect_fault(&ring).error, notifier::PBDMA_ERROR, "GP_PUT past the ring");
    let mut ring = driver.ring(EngineKind::Copy);
    driver.submit_entry(&mut ring, host::GpEntry::Segment { va: VA_START + (1 << 36), dwords: 9 });
    let error = driver.expect_fault(&ring).error;
    assert!([notifier::MMU_FAULT, notifier::PBDMA_ERROR].contains(&error), "pushbuffer: {error}");
}

/// Checks that copies with physical addresses fault.
pub(super) fn physical(driver: &mut Driver) {
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
