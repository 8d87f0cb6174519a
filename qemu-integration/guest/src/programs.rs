//! What a launch's program address points at: a blob that names a built-in kernel of the software GPU, or machine code.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use mdev_core::abi::compute::PARAM_BASE;
use mdev_core::abi::control::Features;
use mdev_core::abi::program::{self, Kernel, MAGIC, VERSION};
use mdev_core::gpu::EngineKind;
use zerocopy::IntoBytes;

use crate::GuestError;
use crate::channel::Channel;
use crate::copy;
use crate::cubin;
use crate::device::Device;
use crate::memory::Buffer;
use crate::pushbuffer::Methods;

/// Where the machine code of the kernels lies, unless told otherwise.
pub const DEFAULT_CUBIN: &str = "/lib/tessera/kernels.cubin";
/// The silicon fetches code ahead of what it executes, beyond the end.
const FETCHED_AHEAD: u64 = 4096;

/// The programs of one vGPU that are in use.
#[derive(Debug)]
pub struct Programs {
    cubin: PathBuf,
    loaded: Mutex<HashMap<u32, Weak<Program>>>,
}

/// A program in the GPU's memory, and what a launch of it has to say.
#[derive(Debug)]
pub struct Program {
    code: Buffer,
    /// Registers of a thread.
    pub registers: u32,
    /// Barriers of a block.
    pub barriers: u32,
    /// Bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// Where parameters start in constant buffer 0.
    pub param_base: u64,
    /// Bytes of constant buffer 0.
    pub bank_bytes: u64,
}

impl Program {
    /// Where the GPU sees its first instruction.
    pub fn va(&self) -> u64 {
        self.code.va()
    }
}

impl Programs {
    /// None yet; machine code is to come from the file `cubin`.
    pub fn new(cubin: &Path) -> Self {
        Self { cubin: cubin.to_owned(), loaded: Mutex::default() }
    }

    /// The program of a kernel, loaded once for all launches that have it at the same time.
    pub fn find(&self, device: &Device, kernel: Kernel) -> Result<Arc<Program>, GuestError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = loaded.get(&(kernel as u32)).and_then(Weak::upgrade) {
            return Ok(program);
        }
        let features = device.features();
        let program = if features.contains(kernel.feature()) {
            built_in(device, kernel)?
        } else if features.intersects(Features::SOFT_PROGRAMS | Features::FACTORIAL) {
            return Err(GuestError::NoKernel(name(kernel)));
        } else {
            self.machine_code(device, kernel)?
        };
        let program = Arc::new(program);
        loaded.insert(kernel as u32, Arc::downgrade(&program));
        Ok(program)
    }

    fn machine_code(&self, device: &Device, kernel: Kernel) -> Result<Program, GuestError> {
        let path = self.cubin.display();
        let cubin = std::fs::read(&self.cubin).map_err(GuestError::os(format!(
            "This GPU runs machine code: reading it from {path} (--cubin)"
        )))?;
        let found = cubin::Program::find(&cubin, name(kernel))?;
        // Compilers leave out the padding at the end of the parameter blocks.
        let ours = kernel.param_bytes();
        if found.param_bytes > ours || ours - found.param_bytes >= 8 {
            return Err(GuestError::Invalid(format!(
                "kernel {} of {path} takes {} bytes of parameters, should be {ours}",
                name(kernel),
                found.param_bytes
            )));
        }
        let param_base = u64::from(found.param_base);
        Ok(Program {
            code: upload(device, &found.code)?,
            registers: found.registers,
            barriers: found.barriers,
            shared_bytes: found.shared_bytes,
            param_base,
            bank_bytes: u64::from(found.bank_bytes).max(param_base + u64::from(ours)),
        })
    }
}

/// The kernel's name in a CUDA source.
pub const fn name(kernel: Kernel) -> &'static str {
    match kernel {
        Kernel::Saxpy => "saxpy",
        Kernel::Sgemm => "sgemm",
        Kernel::Mandelbrot => "mandelbrot",
        Kernel::Spin => "spin",
        Kernel::VectorAdd => "vadd",
        Kernel::Factorial => "factorial",
    }
}

fn built_in(device: &Device, kernel: Kernel) -> Result<Program, GuestError> {
    let code = Buffer::guest(device, size_of::<program::Program>() as u64)?;
    let param_bytes = kernel.param_bytes();
    let blob =
        program::Program { magic: MAGIC, version: VERSION, kernel: kernel as u32, param_bytes };
    code.store(0, &[blob]);
    Ok(Program {
        code,
        registers: 32,
        barriers: 0,
        shared_bytes: 0,
        param_base: PARAM_BASE,
        bank_bytes: PARAM_BASE + u64::from(param_bytes),
    })
}

/// Puts code where the GPU fetches it quickest: in its own memory, by a copy engine where the CPU does not reach it.
fn upload(device: &Device, bytes: &[u8]) -> Result<Buffer, GuestError> {
    let staging = Buffer::guest(device, bytes.len() as u64 + FETCHED_AHEAD)?;
    staging.store(0, bytes.as_bytes());
    if !device.features().contains(Features::COPY) || device.info().vram_bytes < staging.len() {
        return Ok(staging);
    }
    let code = Buffer::video(device, staging.len())?;
    let mut methods = Methods::new();
    copy::linear(&mut methods, code.va(), staging.va(), staging.len());
    Channel::new(device, EngineKind::Copy)?.run(&methods)?;
    Ok(code)
}
