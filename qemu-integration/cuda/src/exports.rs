//! The functions of libc that the library replaces.
//!
//! * [`open`]: `open`, `openat`, `fopen` and their variants
//! * [`descriptors`]: `close`, `dup`, `fcntl`
//! * [`control`]: `ioctl`, `mmap`
//! * [`wait`]: `poll`, `ppoll`
//! * [`status`]: `stat`, `access`, `readlink` and their variants
//! * [`nodes`]: `mknod`, `symlink`, `unlink`, `remove`, `chmod`, `chown`
//!
//! C declares `open`, `openat`, `fcntl` and `ioctl` with a variable number of arguments. The
//! functions here have a fixed number, one more than the declared. That is the same to a caller in
//! the calling conventions of Linux on x86-64 and aarch64: integers and pointers are passed in the
//! next argument register, variable or not, and the caller cleans up. A register that the caller
//! did not set is passed on and not used.
//!
//! `C-unwind`: libc ends a cancelled thread by unwinding its stack. Frames of functions that call
//! libc for other files have nothing to drop. Requests to the worker cannot be cancelled.

mod control;
mod descriptors;
mod nodes;
mod open;
mod status;
mod wait;

use std::ffi::{CStr, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use nix::errno::Errno;

use crate::environment;
use crate::paths::{self, DriverPath};

/// Returns what a path names that the library answers, if the program has a vGPU.
///
/// # Safety
/// The path is null, or a string with a terminator that outlives the result.
unsafe fn driver_path<'a>(path: *const c_char) -> Option<DriverPath<'a>> {
    environment::socket()?;
    // SAFETY: the first byte of a string can be read.
    if path.is_null() || unsafe { path.cast::<u8>().read() } != b'/' {
        return None;
    }
    // SAFETY: by the caller.
    paths::classify(unsafe { CStr::from_ptr(path) }.to_bytes())
}

/// Runs the library's part of a function. An error, or a defect of the library, is reported as C
/// functions do.
fn answer<T>(failed: T, part: impl FnOnce() -> Result<T, Errno>) -> T {
    match catch_unwind(AssertUnwindSafe(part)).unwrap_or(Err(Errno::EIO)) {
        Ok(value) => value,
        Err(error) => {
            error.set();
            failed
        }
    }
}

/// As [`answer`], for functions that return -1.
fn answer_int(part: impl FnOnce() -> Result<c_int, Errno>) -> c_int {
    answer(-1, part)
}
