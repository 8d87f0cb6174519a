//! Programs that launches refer to: blobs that name a built-in kernel of the software GPU, or
//! machine code.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use mdev_core::abi::compute::PARAM_BASE;
use mdev_core::abi::control::Features;
use mdev_core::abi::program::{self, Kernel, MAGIC, VERSION};
use mdev_core::gpu::EngineKind;
use mdev_core::untrusted::read_whole;
use zerocopy::IntoBytes;

use crate::GuestError;
use crate::channel::Channel;
use crate::copy;
use crate::cubin;
use crate::device::Device;
use crate::memory::Buffer;
use crate::pushbuffer::Methods;
use crate::work::factorial;

/// Largest file with machine code, in bytes.
const MAX_CUBIN: usize = 64 << 20;

/// Default path of the kernels' machine code.
pub const DEFAULT_CUBIN: &str = "/lib/tessera/kernels.cubin";
/// Padding after the code, because hardware prefetches beyond its end.
const FETCHED_AHEAD: u64 = 4096;

/// Programs of one vGPU that are in use.
#[derive(Debug)]
pub struct Programs {
    cubin: PathBuf,
    loaded: Mutex<HashMap<u32, Weak<Program>>>,
}

/// Program in the GPU's memory, with the values that a launch needs.
#[derive(Debug)]
pub struct Program {
    code: Buffer,
    /// Registers of each thread.
    pub registers: u32,
    /// Barriers of each block.
    pub barriers: u32,
    /// Bytes of shared memory of each block.
    pub shared_bytes: u32,
    /// Offset of the parameters in constant buffer 0.
    pub param_base: u64,
    /// Bytes of constant buffer 0.
    pub bank_bytes: u64,
}

impl Program {
    /// Returns the GPU address of the first instruction.
    pub fn va(&self) -> u64 {
        self.code.va()
    }
}

impl Programs {
    /// Creates an empty set that reads machine code from the file `cubin`.
    pub fn new(cubin: &Path) -> Self {
        Self { cubin: cubin.to_owned(), loaded: Mutex::default() }
    }

    /// Returns the program of a kernel. Concurrent launches share one loaded copy.
    pub fn find(&self, device: &Device, kernel: Kernel) -> Result<Arc<Program>, GuestError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = loaded.get(&kernel.number()).and_then(Weak::upgrade) {
            return Ok(program);
        }
        let features = device.features();
        let program = if features.contains(kernel.feature()) {
            built_in(device, kernel)?
        } else if features.intersects(Features::SOFT_PROGRAMS | Features::FIXED_FUNCTION) {
            return Err(GuestError::NoKernel(name(kernel)));
        } else {
            self.machine_code(device, kernel)?
        };
        let program = Arc::new(program);
        loaded.insert(kernel.number(), Arc::downgrade(&program));
        Ok(program)
    }

    fn machine_code(&self, device: &Device, kernel: Kernel) -> Result<Program, GuestError> {
        let path = self.cubin.display();
        let cubin = read_whole(&self.cubin, MAX_CUBIN).map_err(GuestError::os(format!(
            "This GPU executes machine code: reading {path} (--cubin)"
        )))?;
        let found = cubin::Program::find(&cubin, name(kernel))?;
        // Compilers omit the padding at the end of the parameter blocks.
        let ours = kernel.param_bytes();
        if found.param_bytes > ours || ours - found.param_bytes >= 8 {
            return Err(GuestError::Invalid(format!(
                "kernel {} of {path} takes {} bytes of parameters, expected {ours}",
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

/// Returns the kernel's name in the CUDA source.
pub const fn name(kernel: Kernel) -> &'static str {
    match kernel {
        Kernel::Saxpy => "saxpy",
        Kernel::Sgemm => "sgemm",
        Kernel::Mandelbrot => "mandelbrot",
        Kernel::Spin => "spin",
        Kernel::VectorAdd => "vadd",
        Kernel::FixedFunction(factorial::FUNCTION) => "factorial",
        Kernel::FixedFunction(_) => "fixed function",
    }
}

fn built_in(device: &Device, kernel: Kernel) -> Result<Program, GuestError> {
    let code = Buffer::guest(device, size_of::<program::Program>() as u64)?;
    let param_bytes = kernel.param_bytes();
    let blob =
        program::Program { magic: MAGIC, version: VERSION, kernel: kernel.number(), param_bytes };
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

/// Places code in video memory, with a copy engine if the CPU cannot access it.
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
