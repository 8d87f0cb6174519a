//! `vgpu-checkpoint`: asks NVIDIA's libcuda to checkpoint or restore a process.
//!
//! The command line is that of NVIDIA's `cuda-checkpoint`, and the calls are those of libcuda's
//! documented interface (CUDA Driver API, "CUDA Checkpointing"). `vgpu-guest` runs this program,
//! since it is linked statically and cannot load a library itself.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::process::ExitCode;
use std::ptr::null;

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use libloading::{Library, Symbol};

/// Library with the interface.
const LIBRARY: &str = "libcuda.so.1";
/// `CUDA_ERROR_NOT_INITIALIZED`.
const NOT_INITIALIZED: c_int = 3;

/// Asks NVIDIA's libcuda to checkpoint or restore a process. Exits with 1 on any error.
#[derive(Debug, Parser)]
#[command(name = "vgpu-checkpoint", version)]
struct Cli {
    /// What to do with the process.
    #[arg(long, value_enum)]
    action: Action,
    /// Process id.
    #[arg(long)]
    pid: c_int,
    /// Longest time for the work of the process to end, in ms; 0 is no limit. For lock only.
    #[arg(long, default_value_t = 0)]
    timeout: c_uint,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Action {
    /// Calls of CUDA wait, and work that was submitted ends.
    Lock,
    /// Video memory moves into the process, which releases the GPU.
    Checkpoint,
    /// The process gets the GPU, and its video memory moves back.
    Restore,
    /// Calls of CUDA continue.
    Unlock,
}

impl Action {
    /// Returns the function's name, with a zero byte.
    const fn function(self) -> &'static CStr {
        match self {
            Self::Lock => c"cuCheckpointProcessLock",
            Self::Checkpoint => c"cuCheckpointProcessCheckpoint",
            Self::Restore => c"cuCheckpointProcessRestore",
            Self::Unlock => c"cuCheckpointProcessUnlock",
        }
    }
}

/// `CUcheckpointLockArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct LockArgs {
    /// Limit in ms, or 0.
    timeout_ms: c_uint,
    /// Zero.
    reserved0: c_uint,
    /// Zero.
    reserved1: [u64; 7],
}

type Step = unsafe extern "C" fn(c_int, *const c_void) -> c_int;
type Init = unsafe extern "C" fn(c_uint) -> c_int;
type ErrorString = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    // SAFETY: libcuda's initializers have no requirements.
    let library = unsafe { Library::new(LIBRARY) }.context("There is no libcuda")?;
    // SAFETY: the type is that of cuda.h.
    let step: Symbol<'_, Step> = unsafe { library.get(cli.action.function().to_bytes_with_nul()) }
        .ok()
        .context("This libcuda cannot checkpoint; it takes 570 or newer")?;
    let lock = LockArgs { timeout_ms: cli.timeout, ..LockArgs::default() };
    let args = match cli.action {
        Action::Lock => (&raw const lock).cast(),
        Action::Checkpoint | Action::Restore | Action::Unlock => null(),
    };
    // SAFETY: the arguments are null, which means none, or live until the return.
    let call = || unsafe { step(cli.pid, args) };
    let mut code = call();
    if code == NOT_INITIALIZED {
        // SAFETY: the type is that of cuda.h.
        let init: Symbol<'_, Init> = unsafe { library.get(b"cuInit\0") }?;
        // SAFETY: cuInit has no requirements.
        code = unsafe { init(0) };
        if code == 0 {
            code = call();
        }
    }
    if code != 0 {
        bail!("{} (CUDA error {code})", describe(&library, code));
    }
    Ok(())
}

/// Returns libcuda's text for an error.
fn describe(library: &Library, code: c_int) -> String {
    // SAFETY: the type is that of cuda.h.
    let describe: Result<Symbol<'_, ErrorString>, _> =
        unsafe { library.get(b"cuGetErrorString\0") };
    let mut text = null();
    // SAFETY: the pointer is valid for a write.
    if describe.is_ok_and(|describe| unsafe { describe(code, &raw mut text) } == 0)
        && !text.is_null()
    {
        // SAFETY: libcuda returns a constant that ends with a zero byte.
        return unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    }
    "unknown error".to_owned()
}
