//! Arbitrary rings and pushbuffers: the channel runs them or faults, and writes only memory that is
//! mapped writable.
#![no_main]

use fuzz::emulation::{Fixture, WRITABLE, call, va};
use fuzz::input::Input;
use libfuzzer_sys::fuzz_target;
use mdev_core::abi::{copy, host};

thread_local!(static FIXTURE: Fixture = Fixture::default());

/// Takes a number that may be the lower half of an address.
fn word(input: &mut Input<'_>) -> u32 {
    let number = input.number();
    // A small page number becomes a page of mapped memory.
    if number & 0xfff == 0 && number < 0x4_0000 {
        return va(WRITABLE.start).wrapping_add(number) as u32;
    }
    number as u32
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let upper = (va(0) >> 32) as u32;
    let put = match input.byte() {
        few @ 0..0xf0 => u32::from(few % 16),
        _ => input.u32(),
    };
    let entries: Vec<u64> = (0..input.byte() % 4)
        .map(|_| match input.byte() {
            0xff => input.number(),
            at => {
                let va = va(WRITABLE.start)
                    .wrapping_add(u64::from(at) * 256 + (input.number() >> 1 & !3));
                host::GpEntry::Segment { va, dwords: u32::from(input.byte()) }.encode()
            }
        })
        .collect();
    let mut words = Vec::new();
    while !input.is_empty() && words.len() < 4096 {
        match input.byte() % 6 {
            0 => words.push(input.u32()),
            1 => {
                let (subchannel, method) = (input.byte() % 8, u32::from(input.byte()) * 4);
                let data: Vec<u32> = (0..input.byte() % 8).map(|_| word(&mut input)).collect();
                words.extend(call(subchannel, method, &data));
            }
            2 => {
                let data = [word(&mut input), upper, word(&mut input), 0, word(&mut input)];
                words.extend(call(0, host::SEM_ADDR_LO, &data));
            }
            3 => {
                let (from, to) = (word(&mut input), word(&mut input));
                words.extend(call(4, copy::OFFSET_IN_UPPER, &[upper, from, upper, to]));
                let shape = [0; 4].map(|_| word(&mut input));
                words.extend(call(4, copy::PITCH_IN, &shape));
                words.extend(call(4, copy::LAUNCH_DMA, &[word(&mut input) ^ 0x182]));
            }
            4 => {
                words.extend(call(4, copy::OFFSET_OUT_UPPER, &[upper, word(&mut input)]));
                let remap = [0; 3].map(|_| word(&mut input));
                words.extend(call(4, copy::SET_REMAP_CONST_A, &remap));
                let length = [0; 2].map(|_| word(&mut input));
                words.extend(call(4, copy::LINE_LENGTH_IN, &length));
                words.extend(call(4, copy::LAUNCH_DMA, &[word(&mut input) ^ 0x582]));
            }
            _ => {
                let data = [upper, word(&mut input), word(&mut input)];
                words.extend(call(4, copy::SET_SEMAPHORE_A, &data));
            }
        }
    }
    FIXTURE.with(|fixture| {
        fixture.clear();
        fixture.run(&words, &entries, put);
    });
});
