//! Arbitrary QMDs, programs and parameters: the launch runs or faults, and writes only memory that
//! is mapped writable.
#![no_main]

use fuzz::emulation::{CONSTANTS, Fixture, PROGRAM, QMD, WRITABLE, call, va};
use fuzz::input::Input;
use libfuzzer_sys::fuzz_target;
use mdev_core::abi::program::{self, Kernel, Program};
use mdev_core::abi::{compute, qmd};
use zerocopy::IntoBytes;

thread_local!(static FIXTURE: Fixture = Fixture::default());

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let kernel = u32::from(input.byte() % 7);
    let mut dimensions = || [(); 3].map(|()| input.number() as u32);
    let (grid, block) = (dimensions(), dimensions());
    let descriptor = qmd::Qmd::from(qmd::Launch {
        grid,
        block,
        program: va(PROGRAM),
        constants: va(CONSTANTS),
        constant_bytes: 0x1_fff0,
        registers: 32,
    });
    let mut bytes = descriptor.to_bytes();
    for _ in 0..input.byte() % 4 {
        bytes[usize::from(input.byte()) % qmd::BYTES] ^= input.byte();
    }
    let param_bytes = Kernel::from_number(kernel).map_or(0, Kernel::param_bytes);
    let mut blob =
        Program { magic: program::MAGIC, version: program::VERSION, kernel, param_bytes };
    if input.byte() == 0xff {
        blob.param_bytes = input.u32();
    }
    // Addresses in parameters have 64 bits. Most are in mapped memory.
    let mut params = Vec::new();
    for _ in 0..3 {
        if input.byte() != 0xff {
            params.extend((va(WRITABLE.start) + (input.number() & 0x2_ffff)).to_le_bytes());
        } else {
            params.extend(input.number().to_le_bytes());
        }
    }
    params.extend((0..8).flat_map(|_| (input.number() as u32).to_le_bytes()));
    // Saxpy, mandelbrot and spin have fewer addresses. The remaining input fills the other
    // parameters.
    if let Some(first) = [0, 2, 3, 1, 1].get(kernel as usize).filter(|_| kernel != 2) {
        params.truncate(8 * first.max(&1));
        params.extend_from_slice(input.bytes(48));
    }
    FIXTURE.with(|fixture| {
        fixture.clear();
        fixture.put(QMD, &bytes);
        fixture.put(PROGRAM, blob.as_bytes());
        fixture.put(CONSTANTS + compute::BLOCK_BASE, block.as_bytes());
        fixture.put(CONSTANTS + compute::PARAM_BASE, &params);
        let mut words = call(1, compute::SEND_PCAS_A, &[(va(QMD) >> 8) as u32]);
        words.extend(call(1, compute::SEND_SIGNALING_PCAS2_B, &[3]));
        fixture.run(&words, &[], 1);
    });
});
