//! Checks of copies and fills.

use mdev_core::abi::copy::{self, launch, remap};
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;

use super::driver::{DATA, Driver, Pushbuffer};

/// Returns pseudorandom bytes.
fn pattern(len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..len).map(next).collect()
}

/// Checks copies of unaligned ranges.
pub(super) fn copies(driver: &mut Driver) {
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

/// Checks copies with different pitches.
pub(super) fn rectangles(driver: &mut Driver) {
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
    // A negative pitch reverses the rows.
    let push = Pushbuffer::default()
        .addresses(driver.va(DATA), driver.va(to + 39 * 300))
        .copy_method(copy::PITCH_IN, &[256, (-300i32).cast_unsigned(), 100, 40])
        .launch(launch::MULTI_LINE);
    driver.finish(&mut ring, push);
    assert!(driver.read(to, 100) == bytes[39 * 256..][..100]);
}

/// Checks fills with a pattern.
pub(super) fn fills(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    let components = |count: u32, size: u32, x: u32, y: u32| {
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
        fill(components(1, 4, remap::CONST_A, 0), 3)[..13],
        [0x44, 0x33, 0x22, 0x11, 0x44, 0x33, 0x22, 0x11, 0x44, 0x33, 0x22, 0x11, 0xee]
    );
    assert_eq!(
        fill(components(2, 2, remap::CONST_A, remap::CONST_B), 1)[..5],
        [0x44, 0x33, 0x88, 0x77, 0xee]
    );
    assert_eq!(
        fill(components(2, 1, remap::NO_WRITE, remap::CONST_A), 2)[..5],
        [0xee, 0x44, 0xee, 0x44, 0xee]
    );
    fill(components(1, 4, remap::CONST_B, 0), 1 << 20);
    assert_eq!(driver.read(DATA + (4 << 20) - 4, 4), [0x88, 0x77, 0x66, 0x55]);
}

/// Checks copies to and from video memory.
pub(super) fn video_memory(driver: &mut Driver) {
    let vram = driver.map_vram(4 * MIB, 2 * MIB);
    let mut ring = driver.ring(EngineKind::Copy);
    let bytes = pattern(1 << 20, 9);
    driver.write(DATA, &bytes);
    let push = Pushbuffer::default().copy(driver.va(DATA), vram + 4096, 1 << 20);
    driver.finish(&mut ring, push);
    assert!(driver.read_vram(4 * MIB + 4096, 1 << 20) == bytes, "read through the aperture");
    let push = Pushbuffer::default().copy(vram + 4096, driver.va(DATA + 8 * MIB), 1 << 20);
    driver.finish(&mut ring, push);
    assert!(driver.read(DATA + 8 * MIB, 1 << 20) == bytes);
}
