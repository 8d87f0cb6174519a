//! Launches: fetches and checks a QMD.

use mdev_core::abi::compute as abi;
use mdev_core::abi::program::{self, Kernel, Program};
use mdev_core::abi::qmd::{self, Qmd};
use mdev_core::gpu::GpuCapabilities;
use zerocopy::{FromBytes, IntoBytes};

use super::ComputeClass;
use super::driver_kernels::DriverKernel;
use super::grid::{Grid, Work};
use crate::mediator::Hardware;
use crate::mediator::emulation::address_space::AddressSpace;
use crate::mediator::emulation::context::Context;
use crate::mediator::emulation::kernels::{Extent, Job};
use crate::mediator::emulation::reduction::Reduction;
use crate::mediator::emulation::semaphore::{Payload, Release};
use crate::mediator::fault::Fault;

/// Maximum number of threads of one block, as on hardware.
const MAX_BLOCK: u64 = 1024;

/// Registers of a multiprocessor, shared by the threads of a block.
const REGISTERS: u64 = 64 << 10;
/// Granularity of register allocation to a warp of 32 threads.
const REGISTER_GRANULARITY: u64 = 256;
/// Maximum number of barriers of a block.
const MAX_BARRIERS: u32 = 16;
/// Maximum number of registers of a thread.
const MAX_REGISTERS: u32 = 255;
/// Offset of the memory descriptor in constant buffer 0, where compiled code finds it. Must be
/// zero.
const MEMORY_DESCRIPTOR: u64 = 0x208;

impl ComputeClass {
    /// Copies the QMD, the program and the parameters once, then checks the copies.
    pub(super) fn launch(&mut self, cx: Context<'_>, va: u64) -> Result<Option<Grid>, Fault> {
        let bad = Fault::class(va);
        let mut bytes = [0; qmd::BYTES];
        cx.space.read(va, &mut bytes)?;
        let qmd = Qmd::from_bytes(&bytes);
        let versions = [qmd::QMD_MAJOR_VERSION, qmd::QMD_MINOR_VERSION];
        if versions.map(|field| qmd.get(field)) != [4, 0] {
            return Err(bad);
        }
        let waits = qmd.get(qmd::DEPENDENCE_COUNTER) != 0;
        match qmd.get(qmd::QMD_TYPE) {
            qmd::GRID_NULL => {
                // libcuda chains its launches with grids without threads, and launches each grid
                // itself too.
                let nothing = Work::Transfers(Box::new([None, None]));
                return Ok((!waits).then(|| with_releases(nothing, &qmd)));
            }
            qmd::GRID_CTA..=qmd::GRID_LAST if !waits => {}
            _ => return Err(bad),
        }
        let code = wide(&qmd, qmd::PROGRAM_ADDRESS_UPPER, qmd::PROGRAM_ADDRESS_LOWER);
        let program = read_program(cx, code, bad)?;
        if program.magic == program::MAGIC {
            self.launch_program(cx, &qmd, &program, bad).map(Some)
        } else {
            self.launch_machine_code(cx, &qmd, code).map(Some)
        }
    }

    /// Starts a kernel of libcuda that is known. Refuses other machine code.
    fn launch_machine_code(
        &mut self,
        cx: Context<'_>,
        qmd: &Qmd,
        code: u64,
    ) -> Result<Grid, Fault> {
        let runs_programs = is_supported(Kernel::Spin, cx.hardware);
        let known = if runs_programs { DriverKernel::find(cx.space, code)? } else { None };
        let Some(kernel) = known else {
            self.machine_code = Some(code);
            return Err(Fault::class(code));
        };
        let transfers = kernel.transfers(cx.space, constants_of(qmd), extent_of(qmd).grid)?;
        Ok(with_releases(Work::Transfers(Box::new(transfers)), qmd))
    }

    /// Checks a QMD and starts its program of the software GPU.
    fn launch_program(
        &self,
        cx: Context<'_>,
        qmd: &Qmd,
        program: &Program,
        bad: Fault,
    ) -> Result<Grid, Fault> {
        // Without the last two, hardware runs the kernel with stale parameters, or does not make
        // its results visible.
        let needed =
            [qmd::CONSTANT_BUFFER_VALID_0, qmd::CONSTANT_BUFFER_INVALIDATE_0, qmd::CWD_MEMBAR_TYPE];
        if qmd.get(qmd::QMD_TYPE) != qmd::GRID_CTA
            || needed.iter().any(|field| qmd.get(*field) & 1 == 0)
        {
            return Err(bad);
        }
        let extent = check_extent(qmd).ok_or(bad)?;
        let kernel = check_program(program, cx).ok_or(bad)?;
        let (space, constants) = (cx.space, constants_of(qmd));
        let size = u64::from(qmd.get(qmd::CONSTANT_BUFFER_SIZE_0)) << 4;
        if abi::PARAM_BASE + u64::from(kernel.param_bytes()) > size {
            return Err(bad);
        }
        let at = constants.checked_add(abi::PARAM_BASE).ok_or(bad)?;
        // Machine code takes the block size from here and computes wrong results if it differs.
        let block: [u32; 3] = read(space, constants.wrapping_add(abi::BLOCK_BASE))?;
        let memory: u64 = read(space, constants.wrapping_add(MEMORY_DESCRIPTOR))?;
        if block != extent.block || memory != 0 {
            return Err(bad);
        }
        let job = match kernel {
            Kernel::Saxpy => Job::saxpy(read(space, at)?, extent),
            Kernel::VectorAdd => Job::vector_add(read(space, at)?, extent),
            Kernel::FixedFunction(id) => Job::fixed_function(id, read(space, at)?, extent),
            Kernel::Sgemm => Job::sgemm(read(space, at)?, extent),
            Kernel::Mandelbrot => Job::mandelbrot(read(space, at)?, extent),
            Kernel::Spin => Job::spin(read(space, at)?, extent),
        };
        // An access to a window goes to the block's own memory, which the emulation does not have.
        let in_window = |va: &u64| self.shared.contains(*va) || self.local.contains(*va);
        match job.pointers().find(in_window) {
            Some(va) => Err(Fault::class(va)),
            None => Ok(with_releases(Work::Job(job), qmd)),
        }
    }
}

/// Returns the size of the grid and its blocks, if they and their registers and barriers fit the
/// hardware.
fn check_extent(qmd: &Qmd) -> Option<Extent> {
    let extent = extent_of(qmd);
    let threads: u64 = extent.block.iter().map(|n| u64::from(*n)).product();
    if extent.grid.contains(&0) || threads == 0 || threads > MAX_BLOCK {
        return None;
    }
    let registers = qmd.get(qmd::REGISTER_COUNT);
    let warp = (u64::from(registers) * 32).next_multiple_of(REGISTER_GRANULARITY);
    let barriers = qmd.get(qmd::BARRIER_COUNT);
    if !(1..=MAX_REGISTERS).contains(&registers)
        || threads.div_ceil(32) * warp > REGISTERS
        || barriers > MAX_BARRIERS
    {
        return None;
    }
    Some(extent)
}

/// Returns the size of the grid and its blocks.
fn extent_of(qmd: &Qmd) -> Extent {
    Extent {
        grid: [qmd::CTA_RASTER_WIDTH, qmd::CTA_RASTER_HEIGHT, qmd::CTA_RASTER_DEPTH]
            .map(|field| qmd.get(field)),
        block: [qmd::CTA_THREAD_DIMENSION0, qmd::CTA_THREAD_DIMENSION1, qmd::CTA_THREAD_DIMENSION2]
            .map(|field| qmd.get(field)),
    }
}

/// Returns the address of constant buffer 0.
fn constants_of(qmd: &Qmd) -> u64 {
    wide(qmd, qmd::CONSTANT_BUFFER_ADDR_UPPER_0, qmd::CONSTANT_BUFFER_ADDR_LOWER_0) << 6
}

/// Reads the header of the program.
fn read_program(cx: Context<'_>, code: u64, bad: Fault) -> Result<Program, Fault> {
    if !code.is_multiple_of(program::ALIGN) {
        return Err(bad);
    }
    read(cx.space, code)
}

/// Checks the header of a program. Returns its kernel.
fn check_program(program: &Program, cx: Context<'_>) -> Option<Kernel> {
    let kernel = Kernel::from_number(program.kernel)?;
    let valid = program.version == program::VERSION
        && program.param_bytes == kernel.param_bytes()
        && is_supported(kernel, cx.hardware);
    valid.then_some(kernel)
}

/// Returns a grid that ends as its QMD asks for.
fn with_releases(work: Work, qmd: &Qmd) -> Grid {
    let enabled = |index: &u32| qmd.get(qmd::release_enable(*index)) != 0;
    let releases = (0..qmd::RELEASES).filter(enabled).map(|index| release(qmd, index)).collect();
    let interrupt = (0..qmd::RELEASES)
        .any(|index| enabled(&index) && qmd.get(qmd::release_trap_type(index)) != 0);
    Grid { work, releases, interrupt }
}

/// Returns a semaphore of a QMD.
fn release(qmd: &Qmd, index: u32) -> Release {
    let payload = wide(qmd, qmd::release_payload_upper(index), qmd::release_payload_lower(index));
    let signed = qmd.get(qmd::release_reduction_format(index)) != 0;
    let reduction = (qmd.get(qmd::release_reduction_enable(index)) != 0)
        .then(|| Reduction::of_compute(qmd.get(qmd::release_reduction_op(index)), signed));
    Release {
        va: wide(qmd, qmd::release_address_upper(index), qmd::release_address_lower(index)),
        payload: Payload::new(payload, qmd.get(qmd::release_payload_64(index)) != 0),
        timestamp: qmd.get(qmd::release_structure_size(index)) == 0,
        reduction,
    }
}

/// Returns true if the device executes the kernel.
fn is_supported(kernel: Kernel, hardware: &dyn Hardware) -> bool {
    let capabilities = hardware.describe().capabilities;
    match kernel {
        Kernel::FixedFunction(id) => {
            capabilities.contains(GpuCapabilities::FIXED_FUNCTION)
                && hardware.fixed_functions().contains(&id)
        }
        _ => capabilities.contains(GpuCapabilities::SOFT_PROGRAMS),
    }
}

fn wide(qmd: &Qmd, upper: qmd::Field, lower: qmd::Field) -> u64 {
    u64::from(qmd.get(upper)) << 32 | u64::from(qmd.get(lower))
}

/// Reads a value of a type.
pub(super) fn read<T: FromBytes + IntoBytes>(space: AddressSpace<'_>, va: u64) -> Result<T, Fault> {
    let mut value = T::new_zeroed();
    space.read(va, value.as_mut_bytes())?;
    Ok(value)
}
