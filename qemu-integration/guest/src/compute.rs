//! Methods and launch descriptors of the compute class.

use std::sync::Arc;

use mdev_core::abi::compute::{
    BLOCK_BASE, GRID_BASE, INVALIDATE_SHADER_CACHES, INVALIDATE_SKED_CACHES,
    PCAS_INVALIDATE_COPY_SCHEDULE, SEND_PCAS_A, SEND_SIGNALING_PCAS2_B,
    SET_SHADER_LOCAL_MEMORY_WINDOW_A, SET_SHADER_SHARED_MEMORY_WINDOW_A,
};
use mdev_core::abi::control::Features;
use mdev_core::abi::host::SUBCHANNEL_COMPUTE as COMPUTE;
use mdev_core::abi::program::Kernel;
use mdev_core::abi::qmd::{self, Qmd};
use mdev_core::gpu::EngineKind;
use zerocopy::{Immutable, IntoBytes};

use crate::GuestError;
use crate::channel::Channel;
use crate::copy;
use crate::device::Device;
use crate::memory::Buffer;
use crate::programs::Program;
use crate::pushbuffer::Methods;

/// Address of the shared memory window: 4 GiB beyond the 40 bits that guests map.
const SHARED_WINDOW: u64 = 0x7294_0000_0000;
/// Address of the local memory window.
const LOCAL_WINDOW: u64 = 0x7293_0000_0000;
/// `INSTRUCTION`, `GLOBAL_DATA` and `CONSTANT` of `INVALIDATE_SHADER_CACHES`.
const INVALIDATE_ALL: u32 = 1 | 1 << 4 | 1 << 12;

/// Shader model of Hopper's machine code.
const SASS_VERSION: u32 = 0x90;
/// Sizes of on-chip memory that a multiprocessor can give to blocks, in KiB.
const CARVE_OUTS: [u32; 10] = [0, 8, 16, 32, 64, 100, 132, 164, 196, 228];

/// Returns the descriptor's code of the smallest shared memory size that holds `bytes`, or of the
/// largest size.
fn carve_out(bytes: u32) -> u32 {
    let needed = bytes.div_ceil(1024);
    let found = CARVE_OUTS.into_iter().find(|size| *size >= needed);
    found.unwrap_or(CARVE_OUTS[CARVE_OUTS.len() - 1]) / 4 + 1
}

/// Adds the setup methods that hardware needs before the first launch.
pub fn set_up(methods: &mut Methods) {
    methods
        .push_address(COMPUTE, SET_SHADER_SHARED_MEMORY_WINDOW_A, SHARED_WINDOW)
        .push_address(COMPUTE, SET_SHADER_LOCAL_MEMORY_WINDOW_A, LOCAL_WINDOW)
        .push(COMPUTE, INVALIDATE_SKED_CACHES, &[0])
        .push(COMPUTE, INVALIDATE_SHADER_CACHES, &[INVALIDATE_ALL]);
}

/// Blocks of a grid and threads of a block, in x, y and z.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of each block.
    pub block: [u32; 3],
}

impl Shape {
    /// Covers at least `n` threads in x, with blocks of 256.
    pub fn line(n: u32) -> Self {
        Self { grid: [n.div_ceil(256).max(1), 1, 1], block: [256, 1, 1] }
    }

    /// Covers at least `width` by `height` threads, with blocks of 16 by 16.
    pub fn plane(width: u32, height: u32) -> Self {
        let grid = [width.div_ceil(16).max(1), height.div_ceil(16).max(1), 1];
        Self { grid, block: [16, 16, 1] }
    }
}

/// Kernel with its parameters, ready for any number of launches.
#[derive(Debug)]
pub struct Launch {
    /// One page: launch descriptor and constant buffer.
    page: Buffer,
    /// Copy of the page in video memory, if the kernel uses one.
    resident: Option<Buffer>,
    program: Arc<Program>,
}

impl Launch {
    const CONSTANTS: u64 = 0x400;
    /// Constants at which compiled code expects the memory windows and the top of the stack.
    const WINDOWS: u64 = Self::CONSTANTS + 0x18;
    const STACK_TOP: u64 = 0xff_fdc0;

    /// Prepares a launch. `P` is the kernel's parameter block of [`mdev_core::abi::program`].
    pub fn new<P: IntoBytes + Immutable>(
        device: &Device,
        kernel: Kernel,
        shape: Shape,
        parameters: &P,
    ) -> Result<Self, GuestError> {
        if !device.features().contains(Features::COMPUTE) {
            return Err(GuestError::Unsupported("compute engine"));
        }
        let program = device.programs().find(device, kernel)?;
        let page = Buffer::guest(device, 4096)?;
        if Self::CONSTANTS + program.bank_bytes > page.len() {
            return Err(GuestError::Invalid(format!(
                "a kernel with {} bytes of constants",
                program.bank_bytes
            )));
        }
        page.store(Self::WINDOWS, &[SHARED_WINDOW, LOCAL_WINDOW, Self::STACK_TOP]);
        page.store(Self::CONSTANTS + BLOCK_BASE, &shape.block);
        page.store(Self::CONSTANTS + GRID_BASE, &shape.grid);
        let launch = Self { page, resident: None, program };
        launch.set_parameters(parameters);
        launch.set_descriptor(&launch.descriptor(shape));
        Ok(launch)
    }

    /// Changes the parameters. No launch with the old parameters may be in flight.
    pub fn set_parameters<P: IntoBytes + Immutable>(&self, parameters: &P) {
        let at = Self::CONSTANTS + self.program.param_base;
        self.page.window().write(at, parameters.as_bytes());
    }

    /// Copies the page to video memory, from which the GPU fetches it faster than from guest RAM.
    /// The parameters and the descriptor must not change afterwards.
    pub fn reside(mut self, device: &Device, shape: Shape) -> Result<Self, GuestError> {
        let resident = Buffer::video(device, self.page.len())?;
        self.set_descriptor(&self.descriptor_in(&resident, shape));
        let mut methods = Methods::new();
        copy::linear(&mut methods, resident.va(), self.page.va(), self.page.len());
        Channel::new(device, EngineKind::Copy)?.run(&methods)?;
        self.resident = Some(resident);
        Ok(self)
    }

    /// Builds the descriptor for [`Self::new`].
    pub fn descriptor(&self, shape: Shape) -> Qmd {
        self.descriptor_in(&self.page, shape)
    }

    fn descriptor_in(&self, page: &Buffer, shape: Shape) -> Qmd {
        let shared = self.program.shared_bytes.next_multiple_of(256);
        Qmd::from(qmd::Launch {
            grid: shape.grid,
            block: shape.block,
            program: self.program.va(),
            constants: page.va() + Self::CONSTANTS,
            constant_bytes: self.program.bank_bytes.next_multiple_of(16) as u32,
            registers: self.program.registers,
        })
        .with(qmd::SASS_VERSION, SASS_VERSION)
        .with(qmd::INVALIDATE_SHADER_DATA_CACHE, 1)
        .with(qmd::SHARED_MEMORY_SIZE, shared)
        .with(qmd::MIN_SM_CONFIG_SHARED_MEM_SIZE, carve_out(shared))
        .with(qmd::MAX_SM_CONFIG_SHARED_MEM_SIZE, carve_out(u32::MAX))
        .with(qmd::TARGET_SM_CONFIG_SHARED_MEM_SIZE, carve_out(8 * shared))
        .with(qmd::BARRIER_COUNT, self.program.barriers)
    }

    /// Replaces the descriptor. No launch with the old descriptor may be in flight.
    pub fn set_descriptor(&self, qmd: &Qmd) {
        self.page.window().write(0, &qmd.to_bytes());
    }

    /// Adds the launch to `methods`.
    pub fn push(&self, methods: &mut Methods) {
        let page = self.resident.as_ref().unwrap_or(&self.page);
        methods.push(COMPUTE, SEND_PCAS_A, &[(page.va() >> 8) as u32]).push(
            COMPUTE,
            SEND_SIGNALING_PCAS2_B,
            &[PCAS_INVALIDATE_COPY_SCHEDULE],
        );
    }
}
