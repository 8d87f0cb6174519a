//! The compute class: fetches and checks a QMD and runs its program as a grid.

use mdev_core::abi::compute as abi;
use mdev_core::abi::program::{self, Kernel, Program};
use mdev_core::abi::qmd::{self, Qmd};
use mdev_core::gpu::GpuCapabilities;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::address_space::AddressSpace;
use super::context::{Context, Progress};
use super::kernels::{Extent, Job};
use crate::mediator::Hardware;
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
/// Length and alignment of a memory window.
const WINDOW: u64 = 1 << 32;
/// Offset of the memory descriptor in constant buffer 0, where compiled code finds it. Must be
/// zero.
const MEMORY_DESCRIPTOR: u64 = 0x208;

/// Registers of the class.
#[derive(Clone, Copy, Debug, Default)]
pub struct ComputeClass {
    /// QMD address >> 8.
    qmd: u32,
    /// Window of shared memory. It hides the mappings of the address space.
    shared: Option<u64>,
    /// Window of local memory.
    local: Option<u64>,
}

impl ComputeClass {
    /// Executes a method. A launch returns the grid to run.
    pub fn method(
        &mut self,
        cx: Context<'_>,
        method: u32,
        data: u32,
    ) -> Result<Option<Job>, Fault> {
        /// Returns whether a method is one of `registers` consecutive registers from `first` on.
        const fn is_register(method: u32, first: u32, registers: u32) -> bool {
            method >= first && method < first + 4 * registers
        }
        match method {
            abi::SEND_PCAS_A => self.qmd = data,
            abi::SEND_SIGNALING_PCAS2_B if data == abi::PCAS_INVALIDATE_COPY_SCHEDULE => {
                return self.launch(cx, u64::from(self.qmd) << 8).map(Some);
            }
            abi::SET_SHADER_SHARED_MEMORY_WINDOW_A => set_upper(&mut self.shared, data),
            abi::SET_SHADER_LOCAL_MEMORY_WINDOW_A => set_upper(&mut self.local, data),
            // A window begins at a multiple of its length.
            abi::SET_SHADER_SHARED_MEMORY_WINDOW_B | abi::SET_SHADER_LOCAL_MEMORY_WINDOW_B
                if data == 0 => {}
            // No-ops here: one thread runs everything in order, without caches or local memory.
            abi::NO_OPERATION
            | abi::WAIT_FOR_IDLE
            | abi::INVALIDATE_SHADER_CACHES
            | abi::INVALIDATE_SKED_CACHES => {}
            _ if is_register(method, abi::SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A, 3)
                || is_register(method, abi::SET_SHADER_LOCAL_MEMORY_A, 2) => {}
            _ => return Err(Fault::class(method)),
        }
        Ok(None)
    }

    /// Copies the QMD, the program and the parameters once, then checks the copies.
    fn launch(&self, cx: Context<'_>, va: u64) -> Result<Job, Fault> {
        let (bad, space) = (Fault::class(va), cx.space);
        let mut bytes = [0; qmd::BYTES];
        space.read(va, &mut bytes)?;
        let qmd = Qmd::from_bytes(&bytes);
        let versions = [qmd::QMD_TYPE, qmd::QMD_MAJOR_VERSION, qmd::QMD_MINOR_VERSION];
        // Without the last two, hardware runs the kernel with stale parameters, or does not make
        // its results visible.
        let needed =
            [qmd::CONSTANT_BUFFER_VALID_0, qmd::CONSTANT_BUFFER_INVALIDATE_0, qmd::CWD_MEMBAR_TYPE];
        if versions.map(|field| qmd.get(field)) != [2, 4, 0]
            || needed.iter().any(|field| qmd.get(*field) & 1 == 0)
        {
            return Err(bad);
        }
        let extent = check_extent(&qmd).ok_or(bad)?;
        let kernel = read_kernel(cx, &qmd, bad)?;

        let (upper, lower) = (qmd::CONSTANT_BUFFER_ADDR_UPPER_0, qmd::CONSTANT_BUFFER_ADDR_LOWER_0);
        let constants = wide(&qmd, upper, lower) << 6;
        let size = u64::from(qmd.get(qmd::CONSTANT_BUFFER_SIZE_0)) << 4;
        if abi::PARAM_BASE + u64::from(kernel.param_bytes()) > size {
            return Err(bad);
        }
        let at = constants.checked_add(abi::PARAM_BASE).ok_or(bad)?;
        // Machine code takes the block size from here and computes wrong results if it differs.
        let block: [u32; 3] = params(space, constants.wrapping_add(abi::BLOCK_BASE))?;
        let memory: u64 = params(space, constants.wrapping_add(MEMORY_DESCRIPTOR))?;
        if block != extent.block || memory != 0 {
            return Err(bad);
        }
        let job = match kernel {
            Kernel::Saxpy => Job::saxpy(params(space, at)?, extent),
            Kernel::VectorAdd => Job::vector_add(params(space, at)?, extent),
            Kernel::FixedFunction(id) => Job::fixed_function(id, params(space, at)?, extent),
            Kernel::Sgemm => Job::sgemm(params(space, at)?, extent),
            Kernel::Mandelbrot => Job::mandelbrot(params(space, at)?, extent),
            Kernel::Spin => Job::spin(params(space, at)?, extent),
        };
        // An access to a window goes to the block's own memory, which the emulation does not have.
        let in_window = |va: &u64| {
            [self.shared, self.local].into_iter().flatten().any(|at| (at..at + WINDOW).contains(va))
        };
        let bad_pointer = job.pointers().find(in_window);
        bad_pointer.map_or(Ok(job), |va| Err(Fault::class(va)))
    }
}

/// Returns the size of the grid and its blocks, if they and their registers and barriers fit the
/// hardware.
fn check_extent(qmd: &Qmd) -> Option<Extent> {
    let extent = Extent {
        grid: [qmd::CTA_RASTER_WIDTH, qmd::CTA_RASTER_HEIGHT, qmd::CTA_RASTER_DEPTH]
            .map(|field| qmd.get(field)),
        block: [qmd::CTA_THREAD_DIMENSION0, qmd::CTA_THREAD_DIMENSION1, qmd::CTA_THREAD_DIMENSION2]
            .map(|field| qmd.get(field)),
    };
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

/// Reads and checks the header of the program. Returns its kernel.
fn read_kernel(cx: Context<'_>, qmd: &Qmd, bad: Fault) -> Result<Kernel, Fault> {
    let code = wide(qmd, qmd::PROGRAM_ADDRESS_UPPER, qmd::PROGRAM_ADDRESS_LOWER);
    if !code.is_multiple_of(program::ALIGN) {
        return Err(bad);
    }
    let mut program = Program::new_zeroed();
    cx.space.read(code, program.as_mut_bytes())?;
    let kernel = Kernel::from_number(program.kernel).ok_or(bad)?;
    if !is_supported(kernel, cx.hardware) {
        return Err(bad);
    }
    let valid = program.magic == program::MAGIC && program.version == program::VERSION;
    if !valid || program.param_bytes != kernel.param_bytes() {
        return Err(bad);
    }
    Ok(kernel)
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

fn set_upper(window: &mut Option<u64>, data: u32) {
    *window = Some(u64::from(data & 0x1_ffff) << 32);
}

fn wide(qmd: &Qmd, upper: qmd::Field, lower: qmd::Field) -> u64 {
    u64::from(qmd.get(upper)) << 32 | u64::from(qmd.get(lower))
}

fn params<T: FromBytes + IntoBytes>(space: AddressSpace<'_>, va: u64) -> Result<T, Fault> {
    let mut value = T::new_zeroed();
    space.read(va, value.as_mut_bytes())?;
    Ok(value)
}

/// Runs a grid until it is complete or the run limit is reached.
pub fn run(job: &mut Job, cx: Context<'_>) -> Result<Progress, Fault> {
    loop {
        if job.step(cx.space, cx.hardware)? {
            return Ok(Progress::Done);
        }
        if cx.limit.reached() {
            return Ok(Progress::More);
        }
    }
}
