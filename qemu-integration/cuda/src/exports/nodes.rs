//! `mknod`, `symlink`, `unlink`, `remove`, `chmod`, `chown`.
//!
//! libcuda and libnvidia-ml of a privileged process make device nodes and links to them where they
//! find none. A vGPU has the nodes that it needs: these functions leave the host's files alone.

use std::ffi::{c_char, c_int, c_uint};

use nix::errno::Errno;

use super::{answer_int, driver_path};
use crate::paths::DriverPath;
use crate::sys::kernel;
use crate::sys::next::REMOVE;

/// Returns whether a path is a device node of the driver, or a link to one.
///
/// # Safety
/// As for [`driver_path`].
unsafe fn is_node(path: *const c_char) -> bool {
    // SAFETY: by the caller.
    match unsafe { driver_path(path) } {
        Some(path @ DriverPath::CharacterLink { .. }) => path.is_of_driver(),
        Some(DriverPath::Node(_) | DriverPath::Absent) => true,
        _ => false,
    }
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mknod(path: *const c_char, mode: c_uint, device: u64) -> c_int {
    // SAFETY: by the caller.
    unsafe {
        if is_node(path) {
            return answer_int(|| Err(Errno::EPERM));
        }
        kernel::mknodat(libc::AT_FDCWD, path, mode, device)
    }
}

/// `mknod` of programs that were built for libc before 2.33.
///
/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __xmknod(
    _: c_int,
    path: *const c_char,
    mode: c_uint,
    device: *const u64,
) -> c_int {
    // SAFETY: by the caller.
    unsafe { mknod(path, mode, *device) }
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symlink(target: *const c_char, path: *const c_char) -> c_int {
    // SAFETY: by the caller.
    unsafe { if is_node(path) { 0 } else { kernel::symlinkat(target, libc::AT_FDCWD, path) } }
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unlink(path: *const c_char) -> c_int {
    // SAFETY: by the caller.
    unsafe { if is_node(path) { 0 } else { kernel::unlinkat(libc::AT_FDCWD, path, 0) } }
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn remove(path: *const c_char) -> c_int {
    // SAFETY: by the caller.
    unsafe {
        if is_node(path) {
            return 0;
        }
        match REMOVE.get() {
            Some(remove) => remove(path),
            None => kernel::unlinkat(libc::AT_FDCWD, path, 0),
        }
    }
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn chmod(path: *const c_char, mode: c_uint) -> c_int {
    // SAFETY: by the caller.
    unsafe { if is_node(path) { 0 } else { kernel::fchmodat(libc::AT_FDCWD, path, mode) } }
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn chown(path: *const c_char, user: c_uint, group: c_uint) -> c_int {
    // SAFETY: by the caller.
    unsafe {
        if is_node(path) { 0 } else { kernel::fchownat(libc::AT_FDCWD, path, user, group, 0) }
    }
}
