//! Checks of what NVIDIA's libcuda submits. Only the software GPU runs them.

use std::time::Duration;

use mdev_core::abi::compute::{self, inline_copy, report, report_d};
use mdev_core::abi::copy::{self, launch, remap};
use mdev_core::abi::host::{self, sem};
use mdev_core::abi::program::{Kernel, Spin, VectorAdd};
use mdev_core::abi::{notifier, qmd};
use mdev_core::gpu::{EngineKind, Pending};

use super::driver::{DATA, Driver, Pushbuffer, Ring};
use super::kernels::{launch_with, prepare};

/// Offset of memory that the checks change.
const AT: u64 = DATA + 0x10_0000;

/// Values of the methods with which libcuda sets a channel up, but for the addresses.
const SET_UP: [(u32, u32); 27] = [
    (0x100, 0),
    (0x200, 2),
    (0x204, 0),
    (0x208, 0x4_0000),
    (0x23c, 1),
    (0x248, 0x2_003f),
    (0x288, 0x1_0040),
    (0x2e4, 0),
    (0x2e8, 0x64_0000),
    (0x2ec, 4),
    (0x310, 0x900),
    (0x3400, 0),
    (0x3404, 0x3_0000),
    (0x510, 0x17_e2ac),
    (0x790, 0x7fd2),
    (0x794, 0x9600_0000),
    (0x7ac, 1),
    (0x7b0, 0x7fd2),
    (0x7b4, 0xb900_0000),
    (0x155c, 0x100),
    (0x1560, 0x200_0000),
    (0x1564, 0),
    (0x1574, 0x100),
    (0x157c, 0xf_ffff),
    (0x1698, 0x1001),
    (0x25f8, 0x7fd2),
    (0x25fc, 0xb572_5a00),
];

fn compute_ring(driver: &mut Driver) -> Ring {
    driver.ring(EngineKind::Compute)
}

fn call(push: Pushbuffer, method: u32, data: &[u32]) -> Pushbuffer {
    push.method(host::SUBCHANNEL_COMPUTE, method, data)
}

fn halves(va: u64) -> [u32; 2] {
    [(va >> 32) as u32, va as u32]
}

fn word(driver: &Driver, at: u64) -> u32 {
    u32::from_le_bytes(driver.read(at, 4).try_into().unwrap())
}

fn double(driver: &Driver, at: u64) -> u64 {
    u64::from_le_bytes(driver.read(at, 8).try_into().unwrap())
}

/// Checks that the methods that set a context up are accepted, and that a kernel then runs.
pub(super) fn set_up(driver: &mut Driver) {
    let mut ring = compute_ring(driver);
    let push = SET_UP
        .iter()
        .fold(Pushbuffer::default(), |push, (method, data)| call(push, *method, &[*data]));
    let push = call(push, compute::SET_SHADER_SHARED_MEMORY_WINDOW_A, &[0x7fd3, 0]);
    driver.finish(&mut ring, push);
    driver.write(AT, &[0; 4]);
    let params = Spin { iterations: 1, out: driver.va(AT), reserved: 0 };
    let descriptor = prepare(driver, Kernel::Spin, &params, [1, 1], [32, 1]);
    let push = launch_with(driver, &descriptor, compute::PCAS_INVALIDATE_PREFETCH_COPY_SCHEDULE);
    driver.finish(&mut ring, push);
    assert_ne!(word(driver, AT), 0);
}

/// Checks reductions of the host, the copy class and the compute class.
pub(super) fn reductions(driver: &mut Driver) {
    let mut ring = compute_ring(driver);
    let va = driver.va(AT);
    driver.write(AT, &[0; 64]);
    let reduce = |number: u32| sem::REDUCTION | number << sem::REDUCTION_SHIFT;
    let push = Pushbuffer::default()
        .semaphore(va, 7, reduce(5))
        .semaphore(va, 0x18, reduce(4))
        .semaphore(va + 8, 0xffff_ffff, reduce(5) | sem::PAYLOAD_64)
        .semaphore(va + 8, 2, reduce(5) | sem::PAYLOAD_64)
        .copy_method(copy::SET_SEMAPHORE_A, &[halves(va + 16)[0], halves(va + 16)[1], 5, 1])
        .copy_method(
            copy::LAUNCH_DMA,
            &[launch::SEMAPHORE_ONE_WORD
                | launch::SEMAPHORE_PAYLOAD_64
                | launch::SEMAPHORE_REDUCTION
                | 5 << launch::SEMAPHORE_REDUCTION_SHIFT],
        );
    let [upper, lower] = halves(va + 32);
    let add = report_d::REDUCTION | report_d::ONE_WORD;
    let push = call(push, compute::SET_REPORT_SEMAPHORE_A, &[upper, lower, 9, add]);
    let push = call(push, compute::SET_REPORT_SEMAPHORE_D, &[add]);
    driver.finish(&mut ring, push);
    assert_eq!((word(driver, AT), double(driver, AT + 8)), (0x1f, 0x1_0000_0001));
    assert_eq!((double(driver, AT + 16), word(driver, AT + 32)), (0x1_0000_0005, 18));
    let push = Pushbuffer::default().semaphore(va, 1, reduce(9));
    driver.submit(&mut ring, push);
    assert_eq!(driver.expect_fault(&ring).error, notifier::PBDMA_ERROR, "no such reduction");
}

/// Checks the semaphores of the compute class.
pub(super) fn reports(driver: &mut Driver) {
    let mut ring = compute_ring(driver);
    let va = driver.va(AT);
    driver.write(AT, &[0xee; 64]);
    let [upper, lower] = halves(va);
    let push = Pushbuffer::default();
    let push = call(push, compute::SET_REPORT_SEMAPHORE_A, &[upper, lower, 3, 0]);
    let push = call(push, compute::SET_REPORT_SEMAPHORE_B, &[lower + 16, 4, report_d::ONE_WORD]);
    let wide = [5, 6, lower + 32, upper, report::PAYLOAD_64];
    let push = call(push, compute::SET_REPORT_SEMAPHORE_PAYLOAD_LOWER, &wide);
    driver.finish(&mut ring, push);
    assert_eq!((word(driver, AT), word(driver, AT + 16)), (3, 4));
    assert_eq!(word(driver, AT + 24), 0xeeee_eeee, "one word");
    assert_eq!(double(driver, AT + 32), 6 << 32 | 5);
    let times = [8, 40].map(|at| double(driver, AT + at));
    assert!(times[0] > 0 && times[1] >= times[0] && times[1] - times[0] < 1 << 40, "{times:?}");
    for awaken in [report_d::ONE_WORD | 1 << 20, report_d::TRAP] {
        driver.client().take_pending();
        let push = call(Pushbuffer::default(), compute::SET_REPORT_SEMAPHORE_D, &[awaken]);
        driver.finish(&mut ring, push);
        assert!(driver.event_within(Duration::from_secs(5)), "it raises an interrupt");
        assert!(driver.client().take_pending().contains(Pending::NONSTALL));
    }
}

/// Checks copies of data in the pushbuffer.
pub(super) fn inline_copies(driver: &mut Driver) {
    let mut ring = compute_ring(driver);
    let va = driver.va(AT);
    driver.write(AT, &[0xee; 64]);
    let start = |va: u64, len: u32, flags: u32| {
        let [upper, lower] = halves(va);
        let push = call(Pushbuffer::default(), compute::LINE_LENGTH_IN, &[len, 1, upper, lower]);
        call(push, compute::LAUNCH_DMA, &[flags | inline_copy::PITCH])
    };
    let load = |push: Pushbuffer, words: &[u32]| {
        words.iter().fold(push, |push, word| call(push, compute::LOAD_INLINE_DATA, &[*word]))
    };
    let push = load(start(va + 1, 7, 0), &[0x0403_0201, 0xff07_0605]);
    driver.finish(&mut ring, push);
    assert_eq!(driver.read(AT, 10), [0xee, 1, 2, 3, 4, 5, 6, 7, 0xee, 0xee], "not one byte more");
    let [upper, lower] = halves(va + 32);
    let semaphore =
        call(Pushbuffer::default(), compute::SET_I2M_SEMAPHORE_A, &[upper, lower, 0x55]);
    driver.finish(&mut ring, semaphore);
    let flags = inline_copy::COMPLETION_SEMAPHORE | inline_copy::ONE_WORD;
    let push = load(start(va, 4, flags), &[0x1111_1111]);
    driver.finish(&mut ring, push);
    assert_eq!((word(driver, AT), word(driver, AT + 32)), (0x1111_1111, 0x55));
    let push = load(start(va, 4, 0), &[1, 2]);
    driver.submit(&mut ring, push);
    assert_eq!(driver.expect_fault(&ring).error, notifier::GR_ERROR, "more data than length");
}

/// Checks copies that rearrange the components of elements.
pub(super) fn components(driver: &mut Driver) {
    let mut ring = driver.ring(EngineKind::Copy);
    driver.write(AT, &[1, 2, 3, 4, 5, 6]);
    driver.write(AT + 64, &[0xee; 16]);
    // Two elements of three components of one byte become elements of four.
    let fields = 2 | 1 << 4 | remap::CONST_A << 8 | remap::NO_WRITE << 12;
    let components = fields | 2 << remap::NUM_SRC_SHIFT | 3 << remap::NUM_DST_SHIFT;
    let push = Pushbuffer::default()
        .addresses(driver.va(AT), driver.va(AT + 64))
        .copy_method(copy::LINE_LENGTH_IN, &[2, 1])
        .copy_method(copy::SET_REMAP_CONST_A, &[0x99, 0, components])
        .launch(launch::REMAP);
    driver.finish(&mut ring, push);
    assert_eq!(driver.read(AT + 64, 9), [3, 2, 0x99, 0xee, 6, 5, 0x99, 0xee, 0xee]);
    let push = Pushbuffer::default()
        .copy_method(copy::SET_REMAP_COMPONENTS, &[3 | 2 << remap::NUM_SRC_SHIFT])
        .launch(launch::REMAP);
    driver.submit(&mut ring, push);
    assert_eq!(driver.expect_fault(&ring).error, notifier::GR_ERROR, "a source of three has no W");
}

/// Checks the semaphores of a QMD, and grids without threads.
pub(super) fn grid_releases(driver: &mut Driver) {
    let mut ring = compute_ring(driver);
    let va = driver.va(AT);
    driver.write(AT, &[0; 64]);
    let at = va + 0x1000;
    let params = VectorAdd { a: at, b: at, c: at, n: 4, reserved: 0 };
    let grid = prepare(driver, Kernel::VectorAdd, &params, [1, 1], [32, 1]);
    let release = |grid: qmd::Qmd, index: u32, va: u64| {
        grid.with(qmd::release_enable(index), 1)
            .with(qmd::release_address_lower(index), va as u32)
            .with(qmd::release_address_upper(index), (va >> 32) as u32)
            .with(qmd::release_payload_lower(index), 7 + index)
    };
    let grid = release(grid.with(qmd::release_structure_size(0), 1), 0, va);
    let grid = release(grid.with(qmd::release_payload_64(1), 1), 1, va + 16);
    let push = launch_with(driver, &grid, compute::PCAS_INVALIDATE_COPY_SCHEDULE);
    driver.finish(&mut ring, push);
    assert_eq!((double(driver, AT), double(driver, AT + 16)), (7, 8));
    assert!(double(driver, AT + 8) == 0 && double(driver, AT + 24) > 0, "one word, four words");

    // A grid without threads releases too, unless other grids have to end first.
    driver.write(AT, &[0; 64]);
    let null = grid.with(qmd::QMD_TYPE, qmd::GRID_NULL);
    let waits = null.clone().with(qmd::DEPENDENCE_COUNTER, 2);
    for (grid, value) in [(waits, 0), (null, 7)] {
        let push = launch_with(driver, &grid, compute::PCAS_INVALIDATE_COPY_SCHEDULE);
        driver.finish(&mut ring, push);
        assert_eq!(word(driver, AT), value);
    }
}

/// Checks that machine code is a fault of the channel that launches it, and of no other.
pub(super) fn machine_code(driver: &mut Driver) {
    let mut ring = compute_ring(driver);
    let mut other = compute_ring(driver);
    let params = Spin { iterations: 1, out: driver.va(AT), reserved: 0 };
    let grid = prepare(driver, Kernel::Spin, &params, [1, 1], [32, 1]);
    driver.write(AT, &[0x18; 1024]);
    let code = driver.va(AT);
    // As libcuda's, which invalidate constants by a method, and may have clusters.
    let grid = grid
        .with(qmd::CONSTANT_BUFFER_INVALIDATE_0, 0)
        .with(qmd::QMD_TYPE, qmd::GRID_CTA + 1)
        .with(qmd::PROGRAM_ADDRESS_LOWER, code as u32)
        .with(qmd::PROGRAM_ADDRESS_UPPER, (code >> 32) as u32);
    let push = launch_with(driver, &grid, compute::PCAS_INVALIDATE_COPY_SCHEDULE);
    driver.submit(&mut ring, push);
    let status = driver.expect_fault(&ring);
    assert_eq!((status.error, status.error_info), (notifier::GR_ERROR, code));
    driver.finish(&mut other, Pushbuffer::default());
}
