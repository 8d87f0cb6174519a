//! Checks of the compute class, with the programs of the software GPU.

use std::time::Duration;

use mdev_core::abi::program::{
    self, FixedFunction, Kernel, Mandelbrot, Program, Saxpy, Sgemm, Spin, VectorAdd,
};
use mdev_core::abi::qmd::{self, Launch, Qmd};
use mdev_core::abi::{compute, host, notifier};
use mdev_core::gpu::{EngineKind, GpuCapabilities};
use zerocopy::{Immutable, IntoBytes};

use super::driver::{DATA, Driver, Pushbuffer};
use crate::mediator::factorial;

const QMD: u64 = DATA;
const PROGRAM: u64 = DATA + 0x1000;
const CONSTANTS: u64 = DATA + 0x2000;
const X: u64 = DATA + 0x10_0000;
const Y: u64 = DATA + 0x40_0000;
const Z: u64 = DATA + 0x80_0000;

/// Writes a program and its parameters to memory. Returns the launch descriptor.
pub(super) fn prepare<P: IntoBytes + Immutable>(
    driver: &Driver,
    kernel: Kernel,
    params: &P,
    grid: [u32; 2],
    block: [u32; 2],
) -> Qmd {
    let program = Program {
        magic: program::MAGIC,
        version: program::VERSION,
        kernel: kernel.number(),
        param_bytes: kernel.param_bytes(),
    };
    driver.write(PROGRAM, program.as_bytes());
    driver.write(CONSTANTS + compute::BLOCK_BASE, [block[0], block[1], 1].as_bytes());
    driver.write(CONSTANTS + compute::PARAM_BASE, params.as_bytes());
    Qmd::from(Launch {
        grid: [grid[0], grid[1], 1],
        block: [block[0], block[1], 1],
        program: driver.va(PROGRAM),
        constants: driver.va(CONSTANTS),
        constant_bytes: 0x1000,
        registers: 32,
    })
}

/// Returns methods that launch a program of the software GPU. One launch uses the driver's place
/// for descriptors at a time.
pub fn launch_program<P: IntoBytes + Immutable>(
    driver: &Driver,
    kernel: Kernel,
    params: &P,
    grid: [u32; 2],
    block: [u32; 2],
) -> Pushbuffer {
    launch(driver, &prepare(driver, kernel, params, grid, block))
}

/// Returns methods that launch a descriptor.
fn launch(driver: &Driver, descriptor: &Qmd) -> Pushbuffer {
    launch_with(driver, descriptor, compute::PCAS_INVALIDATE_COPY_SCHEDULE)
}

/// Returns methods that launch a descriptor with an action.
pub(super) fn launch_with(driver: &Driver, descriptor: &Qmd, action: u32) -> Pushbuffer {
    driver.write(QMD, &descriptor.to_bytes());
    let launch = [action];
    Pushbuffer::default()
        .method(host::SUBCHANNEL_COMPUTE, compute::SEND_PCAS_A, &[(driver.va(QMD) >> 8) as u32])
        .method(host::SUBCHANNEL_COMPUTE, compute::SEND_SIGNALING_PCAS2_B, &launch)
}

fn floats(driver: &Driver, at: u64, count: usize) -> Vec<f32> {
    let bytes = driver.read(at, count * 4);
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// More words than a device does at a time, the largest among them; what is not there is a
/// channel's error.
pub fn factorials(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Compute);
    let n = 300;
    let mut words: Vec<u32> = (0..n).map(|i| i % 40).collect();
    words[7..10].copy_from_slice(&[u32::MAX, 1_000_000, factorial::FIRST_ZERO]);
    driver.write(X, words.as_bytes());
    driver.write(X + 4 * u64::from(n), &[0xee; 4]);
    let params = FixedFunction { x: driver.va(X), n, reserved: 0 };
    let grid = [n.div_ceil(256), 1];
    let push = launch(
        driver,
        &prepare(driver, Kernel::FixedFunction(factorial::FUNCTION), &params, grid, [256, 1]),
    );
    driver.finish(&mut ring, push);
    let want: Vec<u32> = words.iter().map(|word| factorial::factorial(*word)).collect();
    assert!(driver.read(X, 4 * n as usize) == want.as_bytes(), "factorial");
    assert_eq!(driver.read(X + 4 * u64::from(n), 4), [0xee; 4], "and not one more");

    let elsewhere = FixedFunction { x: 0x1000, n, reserved: 0 };
    let push = launch(
        driver,
        &prepare(driver, Kernel::FixedFunction(factorial::FUNCTION), &elsewhere, grid, [256, 1]),
    );
    driver.submit(&mut ring, push);
    assert_eq!(driver.expect_fault(&ring).error, notifier::MMU_FAULT);
    driver.destroy(ring);
    if !driver.client().gpu().capabilities.contains(GpuCapabilities::SOFT_PROGRAMS) {
        let mut ring = driver.ring(EngineKind::Compute);
        let at = driver.va(X);
        let params = VectorAdd { a: at, b: at, c: at, n, reserved: 0 };
        let push = launch(driver, &prepare(driver, Kernel::VectorAdd, &params, grid, [256, 1]));
        driver.submit(&mut ring, push);
        assert_eq!(driver.expect_fault(&ring).error, notifier::GR_ERROR);
    }
}

#[allow(clippy::many_single_char_names, reason = "names of the formulas")]
/// Runs each program and checks its results.
pub fn programs(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Compute);
    let n = 10_007;
    let x: Vec<f32> = (0..n).map(|i| i as f32 * 0.5).collect();
    let y: Vec<f32> = (0..n).map(|i| 1000.0 - i as f32).collect();
    driver.write(X, x.as_bytes());
    driver.write(Y, y.as_bytes());
    let params = VectorAdd { a: driver.va(X), b: driver.va(Y), c: driver.va(Z), n, reserved: 0 };
    let push = launch(
        driver,
        &prepare(driver, Kernel::VectorAdd, &params, [n.div_ceil(256), 1], [256, 1]),
    );
    driver.finish(&mut ring, push);
    let want: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
    assert!(floats(driver, Z, n as usize) == want, "vector add");

    let params = Saxpy { x: driver.va(X), y: driver.va(Y), a: 3.0, n };
    let push =
        launch(driver, &prepare(driver, Kernel::Saxpy, &params, [n.div_ceil(256), 1], [256, 1]));
    driver.finish(&mut ring, push);
    let want: Vec<f32> = x.iter().zip(&y).map(|(x, y)| 3.0 * x + y).collect();
    assert!(floats(driver, Y, n as usize) == want, "saxpy");

    let n = 133;
    let value = |i: u32| ((i * 37 + 11) % 101) as f32 / 101.0;
    let a: Vec<f32> = (0..n * n).map(value).collect();
    let b: Vec<f32> = (0..n * n).map(|i| value(i + 7)).collect();
    driver.write(X, a.as_bytes());
    driver.write(Y, b.as_bytes());
    let params = Sgemm { a: driver.va(X), b: driver.va(Y), c: driver.va(Z), n, reserved: 0 };
    let blocks = n.div_ceil(16);
    let push = launch(driver, &prepare(driver, Kernel::Sgemm, &params, [blocks, blocks], [16, 16]));
    driver.finish(&mut ring, push);
    let n = n as usize;
    for (index, got) in floats(driver, Z, n * n).into_iter().enumerate() {
        let (row, column) = (index / n, index % n);
        let want: f32 = (0..n).map(|k| a[row * n + k] * b[k * n + column]).sum();
        assert!((got - want).abs() < want * 1e-4, "sgemm: row {row}, column {column}");
    }

    let params = Mandelbrot {
        pixels: driver.va(Z),
        pitch: 1024,
        width: 200,
        height: 150,
        max_iterations: 300,
        left: -2.2,
        top: -1.2,
        step: 0.016,
        reserved: 0,
    };
    let push = launch(driver, &prepare(driver, Kernel::Mandelbrot, &params, [13, 10], [16, 16]));
    driver.finish(&mut ring, push);
    for row in 0..150 {
        let got = driver.read(Z + u64::from(row) * 1024, 800);
        let want: Vec<u8> =
            (0..200).flat_map(|column| params.pixel(column, row).to_le_bytes()).collect();
        assert!(got == want, "mandelbrot: row {row}");
    }

    driver.write(Z, &[0; 4]);
    let params = Spin { out: driver.va(Z), iterations: 1000, reserved: 0 };
    let push = launch(driver, &prepare(driver, Kernel::Spin, &params, [12, 2], [32, 1]));
    driver.finish(&mut ring, push);
    assert_eq!(driver.read(Z, 4), [24, 0, 0, 0], "spin");
}

/// Checks that threads outside the grid do not run.
pub fn grid_bounds(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Compute);
    driver.write(X, vec![1f32; 4096].as_bytes());
    driver.write(Y, vec![0f32; 4096].as_bytes());
    let params = Saxpy { x: driver.va(X), y: driver.va(Y), a: 1.0, n: 4096 };
    let push = launch(driver, &prepare(driver, Kernel::Saxpy, &params, [3, 1], [64, 1]));
    driver.finish(&mut ring, push);
    let done = floats(driver, Y, 4096).iter().filter(|y| **y != 0.0).count();
    assert_eq!(done, 3 * 64, "one element per thread");
    let params = Saxpy { x: 0, y: 0, a: 1.0, n: 0 };
    let push = launch(driver, &prepare(driver, Kernel::Saxpy, &params, [1, 1], [64, 1]));
    driver.finish(&mut ring, push);
}

/// Checks that invalid descriptors fault.
pub fn bad_descriptors(driver: &mut Driver) {
    let params = Saxpy { x: driver.va(X), y: driver.va(Y), a: 1.0, n: 16 };
    let good = prepare(driver, Kernel::Saxpy, &params, [1, 1], [64, 1]);
    let hole = Saxpy { x: 0x10_0000, ..params };
    let cases = [
        (good.clone().with(qmd::QMD_MAJOR_VERSION, 3), notifier::GR_ERROR),
        (good.clone().with(qmd::QMD_MINOR_VERSION, 1), notifier::GR_ERROR),
        (good.clone().with(qmd::QMD_TYPE, 0), notifier::GR_ERROR),
        (good.clone().with(qmd::CONSTANT_BUFFER_INVALIDATE_0, 0), notifier::GR_ERROR),
        (good.clone().with(qmd::CWD_MEMBAR_TYPE, 0), notifier::GR_ERROR),
        (good.clone().with(qmd::REGISTER_COUNT, 0), notifier::GR_ERROR),
        (good.clone().with(qmd::BARRIER_COUNT, 17), notifier::GR_ERROR),
        (good.clone().with(qmd::CTA_THREAD_DIMENSION0, 32), notifier::GR_ERROR),
        (good.clone().with(qmd::CTA_RASTER_WIDTH, 0), notifier::GR_ERROR),
        (good.clone().with(qmd::CTA_THREAD_DIMENSION0, 2000), notifier::GR_ERROR),
        (good.clone().with(qmd::CONSTANT_BUFFER_VALID_0, 0), notifier::GR_ERROR),
        (good.clone().with(qmd::CONSTANT_BUFFER_SIZE_0, 1), notifier::GR_ERROR),
        (good.clone().with(qmd::PROGRAM_ADDRESS_LOWER, QMD as u32 + 0x800), notifier::GR_ERROR),
        (good.clone().with(qmd::PROGRAM_ADDRESS_UPPER, 0x100), notifier::MMU_FAULT),
    ];
    for (case, (descriptor, error)) in cases.into_iter().enumerate() {
        let mut ring = driver.ring(EngineKind::Compute);
        let push = launch(driver, &descriptor);
        driver.submit(&mut ring, push);
        let got = driver.expect_fault(&ring).error;
        assert!(got == error || got == notifier::MMU_FAULT, "case {case}: {got}");
        driver.destroy(ring);
    }
    let mut ring = driver.ring(EngineKind::Compute);
    let push = launch(driver, &prepare(driver, Kernel::Saxpy, &hole, [1, 1], [64, 1]));
    driver.submit(&mut ring, push);
    assert_eq!(
        driver.expect_fault(&ring).error,
        notifier::MMU_FAULT,
        "the parameters point to unmapped memory"
    );

    let mut ring = driver.ring(EngineKind::Copy);
    let push = Pushbuffer::default().method(1, host::SET_OBJECT, &[compute::CLASS]);
    driver.submit(&mut ring, push);
    driver.expect_fault(&ring);
}

/// Checks that accesses to the shared and local memory windows fault. Hardware faults or computes
/// wrong results, since the windows hide the address space.
pub fn windows(driver: &mut Driver) {
    const WINDOW: u32 = 0x10;
    let at = u64::from(WINDOW) << 32;
    let window = compute::SET_SHADER_SHARED_MEMORY_WINDOW_A;
    let subchannel = host::SUBCHANNEL_COMPUTE;
    let memory = driver.memory();
    driver.map(at + 0x1000, 0x1000, memory);
    let params = Spin { out: at + 0x1000, iterations: 1, reserved: 0 };
    let descriptor = prepare(driver, Kernel::Spin, &params, [1, 1], [32, 1]);

    let mut ring = driver.ring(EngineKind::Compute);
    let outside = launch(driver, &descriptor);
    driver.finish(&mut ring, outside);
    driver.destroy(ring);
    for method in [window, compute::SET_SHADER_LOCAL_MEMORY_WINDOW_A] {
        let mut ring = driver.ring(EngineKind::Compute);
        let set = Pushbuffer::default().method(subchannel, method, &[WINDOW, 0]);
        driver.finish(&mut ring, set);
        let inside = launch(driver, &descriptor);
        driver.submit(&mut ring, inside);
        assert_eq!(
            driver.expect_fault(&ring).error,
            notifier::GR_ERROR,
            "the result is in a window"
        );
        driver.destroy(ring);
    }
    let mut ring = driver.ring(EngineKind::Compute);
    let misaligned = Pushbuffer::default().method(subchannel, window, &[WINDOW, 0x1000]);
    driver.submit(&mut ring, misaligned);
    assert_eq!(driver.expect_fault(&ring).error, notifier::GR_ERROR, "a window must be aligned");
    driver.destroy(ring);

    let mut ring = driver.ring(EngineKind::Compute);
    let wrong_subchannel =
        Pushbuffer::default().method(host::SUBCHANNEL_COPY, host::SET_OBJECT, &[compute::CLASS]);
    driver.submit(&mut ring, wrong_subchannel);
    driver.expect_fault(&ring);
}

/// Returns methods that launch an endless kernel.
pub fn endless_kernel(driver: &Driver) -> Pushbuffer {
    let params = Spin { out: driver.va(Z), iterations: u32::MAX, reserved: 0 };
    launch(driver, &prepare(driver, Kernel::Spin, &params, [1, 1], [32, 1]))
}

/// Checks that other channels run beside an endless kernel, and that it can be destroyed.
pub fn preemption(driver: &mut Driver) {
    let mut endless = driver.ring(EngineKind::Compute);
    let mut other = driver.ring(EngineKind::Copy);
    let never = driver.spin_forever(&mut endless);
    for _ in 0..50 {
        driver.finish(&mut other, Pushbuffer::default());
    }
    assert!(!driver.wait_for(never, Duration::from_millis(5)));
    driver.client().destroy_channel(endless.id()).unwrap();
    driver.finish(&mut other, Pushbuffer::default());
}
