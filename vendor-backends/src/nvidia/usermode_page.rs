//! The GPU's usermode page, which holds its doorbell and its clock.

use std::sync::atomic::{Ordering, fence};

use ipc::mem::Mapping;
use mdev_core::abi::doorbell;
use mdev_core::ids::Token;

/// Offset of `NVC661_TIME_0` in the usermode page.
const TIME_LOW: u64 = 0x80;
/// Offset of `NVC661_TIME_1` in the usermode page.
const TIME_HIGH: u64 = 0x84;

/// Rings the GPU's doorbell.
pub fn ring(page: &Mapping, token: Token) {
    fence(Ordering::SeqCst);
    let _ = page.store_u32(doorbell::TOKEN, token.0);
}

/// Reads the GPU's clock, in nanoseconds.
pub fn clock_ns(page: &Mapping) -> Option<u64> {
    // Reads the upper half twice, in case the lower half wraps between the reads.
    loop {
        let high = page.load_u32(TIME_HIGH)?;
        let low = page.load_u32(TIME_LOW)?;
        if high == page.load_u32(TIME_HIGH)? {
            return Some(u64::from(high) << 32 | u64::from(low));
        }
    }
}
