//! Checks of semaphores.

use std::time::Duration;

use mdev_core::abi::copy::{self, launch};
use mdev_core::abi::host::sem;
use mdev_core::gpu::EngineKind;

use super::driver::{DATA, Driver, Pushbuffer};

/// Checks the order, width and timestamps of releases.
pub(super) fn releases(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    let va = driver.va(DATA);
    driver.write(DATA, &[0; 64]);
    let push = Pushbuffer::default()
        .semaphore(va, 0x1_0000_0007, sem::RELEASE)
        .semaphore(va + 8, 0x2_0000_0008, sem::RELEASE | sem::PAYLOAD_64)
        .semaphore(va + 16, 9, sem::RELEASE | sem::RELEASE_TIMESTAMP | sem::RELEASE_WFI)
        .semaphore(va + 32, 10, sem::RELEASE | sem::RELEASE_TIMESTAMP);
    driver.finish(&mut ring, push);
    let word = |offset: u64| word_of(driver, offset);
    assert_eq!((word(0), word(8)), (7, 0x2_0000_0008), "32 or 64 bits as requested");
    assert_eq!((word(16) as u32, word(32) as u32), (9, 10));
    assert!(word(24) > 0 && word(40) >= word(24), "timestamps increase");
    let push = Pushbuffer::default()
        .copy_method(copy::SET_SEMAPHORE_A, &[(va >> 32) as u32, va as u32 + 48, 11])
        .copy_method(copy::LAUNCH_DMA, &[launch::SEMAPHORE_TIMESTAMP]);
    driver.finish(&mut ring, push);
    let last = word_of(driver, 56);
    assert_eq!(driver.read(DATA + 48, 4), [11, 0, 0, 0]);
    assert!(last >= word_of(driver, 40));
}

/// Reads a 64-bit word of the data.
fn word_of(driver: &Driver, offset: u64) -> u64 {
    u64::from_le_bytes(driver.read(DATA + offset, 8).try_into().unwrap())
}

/// Checks each operation of an acquire.
pub(super) fn acquires(driver: &mut Driver) {
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
