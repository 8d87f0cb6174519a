//! `open`, `openat`, `fopen` and their variants.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::ptr::null_mut;

use nix::errno::Errno;

use super::{answer, answer_int, driver_path};
use crate::node_files;
use crate::paths::DriverPath;
use crate::sys::kernel;
use crate::sys::next::{FOPEN, OPEN, OPENAT};

/// Returns whether the library opens a path: its own, and the list of devices.
fn is_answered(path: &DriverPath<'_>) -> bool {
    matches!(path, DriverPath::Devices) || path.is_of_driver()
}

/// # Safety
/// As for `open()`.
unsafe fn open_path(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: by the caller.
    if let Some(driver) = unsafe { driver_path(path) }.filter(is_answered) {
        return answer_int(|| node_files::open(driver, flags));
    }
    // SAFETY: by the caller.
    unsafe {
        match OPEN.get() {
            // libc's functions for 64-bit offsets are the same on 64-bit machines.
            Some(open) => open(path, flags, mode),
            None => kernel::openat(libc::AT_FDCWD, path, flags, mode),
        }
    }
}

/// # Safety
/// As for `openat()`.
unsafe fn open_at(at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: by the caller.
    if let Some(driver) = unsafe { driver_path(path) }.filter(is_answered) {
        return answer_int(|| node_files::open(driver, flags));
    }
    // SAFETY: by the caller.
    unsafe {
        match OPENAT.get() {
            Some(openat) => openat(at, path, flags, mode),
            None => kernel::openat(at, path, flags, mode),
        }
    }
}

macro_rules! opens {
    ($($name:ident, $at:ident, $checked:ident, $checked_at:ident;)*) => {$(
        /// # Safety
        /// As for libc's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            path: *const c_char,
            flags: c_int,
            mode: c_uint,
        ) -> c_int {
            // SAFETY: by the caller.
            unsafe { open_path(path, flags, mode) }
        }

        /// # Safety
        /// As for libc's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $at(
            at: c_int,
            path: *const c_char,
            flags: c_int,
            mode: c_uint,
        ) -> c_int {
            // SAFETY: by the caller.
            unsafe { open_at(at, path, flags, mode) }
        }

        /// # Safety
        /// As for libc's function, which `_FORTIFY_SOURCE` calls for two arguments.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $checked(path: *const c_char, flags: c_int) -> c_int {
            // SAFETY: by the caller.
            unsafe { open_path(path, flags, 0) }
        }

        /// # Safety
        /// As for libc's function, which `_FORTIFY_SOURCE` calls for three arguments.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $checked_at(
            at: c_int,
            path: *const c_char,
            flags: c_int,
        ) -> c_int {
            // SAFETY: by the caller.
            unsafe { open_at(at, path, flags, 0) }
        }
    )*};
}

opens! {
    open, openat, __open_2, __openat_2;
    open64, openat64, __open64_2, __openat64_2;
}

/// # Safety
/// As for `fopen()`.
unsafe fn open_stream(path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    // SAFETY: by the caller.
    if let Some(driver) = unsafe { driver_path(path) }.filter(is_text)
        && !mode.is_null()
    {
        return answer(null_mut(), || {
            // SAFETY: a string, by the caller.
            if !unsafe { CStr::from_ptr(mode) }.to_bytes().starts_with(b"r") {
                return Err(Errno::EACCES);
            }
            let file = node_files::memory_file(&node_files::content(driver)?)?;
            Ok(kernel::stream(file))
        });
    }
    let Some(fopen) = FOPEN.get() else {
        Errno::ENOSYS.set();
        return null_mut();
    };
    // SAFETY: by the caller.
    unsafe { fopen(path, mode) }
}

/// Returns whether a path is a file in `/proc` or `/sys`, or absent. Programs open device nodes by
/// `open()`.
fn is_text(path: &DriverPath<'_>) -> bool {
    !matches!(path, DriverPath::Node(_) | DriverPath::CharacterLink { .. })
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fopen(path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    // SAFETY: by the caller.
    unsafe { open_stream(path, mode) }
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fopen64(
    path: *const c_char,
    mode: *const c_char,
) -> *mut libc::FILE {
    // SAFETY: by the caller.
    unsafe { open_stream(path, mode) }
}
