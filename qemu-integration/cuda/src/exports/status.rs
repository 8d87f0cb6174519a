//! `stat`, `access`, `readlink` and their variants.

use std::ffi::{c_char, c_int, c_uint};
use std::ptr::write_bytes;

use nix::errno::Errno;

use super::{answer, answer_int, driver_path};
use crate::file_status::FileStatus;
use crate::node_files;
use crate::open_files;
use crate::paths::DriverPath;
use crate::sys::kernel;
use crate::sys::next::FACCESSAT;

/// Writes a status for `stat()`.
///
/// # Safety
/// `to` is null, or memory for a status.
unsafe fn put(status: FileStatus, to: *mut libc::stat) -> Result<c_int, Errno> {
    if to.is_null() {
        return Err(Errno::EFAULT);
    }
    // SAFETY: by the caller; all-zero is a valid status.
    unsafe {
        write_bytes(to, 0, 1);
        status.fill(&mut *to);
    }
    Ok(0)
}

/// # Safety
/// As for `fstatat()`.
unsafe fn path_status(at: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
    // SAFETY: by the caller.
    if let Some(driver) = unsafe { driver_path(path) }.filter(DriverPath::is_of_driver) {
        let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        // SAFETY: by the caller.
        return answer_int(|| unsafe { put(FileStatus::of_path(driver, follow)?, to) });
    }
    // A program may ask for a descriptor with an empty path.
    // SAFETY: by the caller.
    unsafe { kernel::fstatat(at, path, to, flags) }
}

/// # Safety
/// As for `fstat()`.
unsafe fn file_status(fd: c_int, to: *mut libc::stat) -> c_int {
    if open_files::possible(fd)
        && let Some(file) = open_files::get(fd)
    {
        // SAFETY: by the caller.
        return answer_int(|| unsafe { put(FileStatus::of_node(file.node), to) });
    }
    // SAFETY: by the caller.
    unsafe { kernel::fstat(fd, to) }
}

macro_rules! statuses {
    ($($stat:ident, $lstat:ident, $fstat:ident, $fstatat:ident,
       $xstat:ident, $lxstat:ident, $fxstat:ident, $fxstatat:ident;)*) => {$(
        /// # Safety
        /// As for libc's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $stat(path: *const c_char, to: *mut libc::stat) -> c_int {
            // SAFETY: by the caller.
            unsafe { path_status(libc::AT_FDCWD, path, to, 0) }
        }

        /// # Safety
        /// As for libc's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $lstat(path: *const c_char, to: *mut libc::stat) -> c_int {
            // SAFETY: by the caller.
            unsafe { path_status(libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW) }
        }

        /// # Safety
        /// As for libc's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $fstat(fd: c_int, to: *mut libc::stat) -> c_int {
            // SAFETY: by the caller.
            unsafe { file_status(fd, to) }
        }

        /// # Safety
        /// As for libc's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $fstatat(
            at: c_int,
            path: *const c_char,
            to: *mut libc::stat,
            flags: c_int,
        ) -> c_int {
            // SAFETY: by the caller.
            unsafe { path_status(at, path, to, flags) }
        }

        /// `stat` of programs that were built for libc before 2.33. All versions of the structure
        /// are the same on 64-bit machines.
        ///
        /// # Safety
        /// As for libc's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $xstat(
            _: c_int,
            path: *const c_char,
            to: *mut libc::stat,
        ) -> c_int {
            // SAFETY: by the caller.
            unsafe { path_status(libc::AT_FDCWD, path, to, 0) }
        }

        /// As above, `lstat`.
        ///
        /// # Safety
        /// As for libc's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $lxstat(
            _: c_int,
            path: *const c_char,
            to: *mut libc::stat,
        ) -> c_int {
            // SAFETY: by the caller.
            unsafe { path_status(libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW) }
        }

        /// As above, `fstat`.
        ///
        /// # Safety
        /// As for libc's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $fxstat(_: c_int, fd: c_int, to: *mut libc::stat) -> c_int {
            // SAFETY: by the caller.
            unsafe { file_status(fd, to) }
        }

        /// As above, `fstatat`.
        ///
        /// # Safety
        /// As for libc's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $fxstatat(
            _: c_int,
            at: c_int,
            path: *const c_char,
            to: *mut libc::stat,
            flags: c_int,
        ) -> c_int {
            // SAFETY: by the caller.
            unsafe { path_status(at, path, to, flags) }
        }
    )*};
}

statuses! {
    stat, lstat, fstat, fstatat, __xstat, __lxstat, __fxstat, __fxstatat;
    stat64, lstat64, fstat64, fstatat64, __xstat64, __lxstat64, __fxstat64, __fxstatat64;
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn statx(
    at: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    to: *mut libc::statx,
) -> c_int {
    // SAFETY: by the caller.
    let named = unsafe { driver_path(path) }.filter(DriverPath::is_of_driver);
    let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
    let status = match named {
        Some(driver) => answer(None, || FileStatus::of_path(driver, follow).map(Some)),
        // SAFETY: a path that is not null is a string.
        None if open_files::possible(at) && (path.is_null() || unsafe { *path == 0 }) => {
            open_files::get(at).map(|file| FileStatus::of_node(file.node))
        }
        None => None,
    };
    match status {
        Some(status) if !to.is_null() => {
            // SAFETY: by the caller; all-zero is a valid status.
            unsafe {
                write_bytes(to, 0, 1);
                status.fill_statx(&mut *to);
            }
            0
        }
        // `answer` has set errno.
        None if named.is_some() => -1,
        // SAFETY: by the caller.
        _ => unsafe { kernel::statx(at, path, flags, mask, to) },
    }
}

/// Answers `access()` for a path of the driver.
fn accessible(path: DriverPath<'_>, mode: c_int) -> Result<c_int, Errno> {
    if FileStatus::of_path(path, true)?.allows(mode) { Ok(0) } else { Err(Errno::EACCES) }
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn access(path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: by the caller.
    match unsafe { driver_path(path) }.filter(DriverPath::is_of_driver) {
        Some(driver) => answer_int(|| accessible(driver, mode)),
        // SAFETY: by the caller.
        None => unsafe { kernel::faccessat(libc::AT_FDCWD, path, mode) },
    }
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn faccessat(
    at: c_int,
    path: *const c_char,
    mode: c_int,
    flags: c_int,
) -> c_int {
    // SAFETY: by the caller.
    if let Some(driver) = unsafe { driver_path(path) }.filter(DriverPath::is_of_driver) {
        return answer_int(|| accessible(driver, mode));
    }
    // SAFETY: by the caller.
    unsafe {
        match FACCESSAT.get() {
            Some(faccessat) => faccessat(at, path, mode, flags),
            None => kernel::faccessat(at, path, mode),
        }
    }
}

/// Answers `readlink()` for a link of `/dev/char`.
///
/// # Safety
/// `buffer` is memory of `len` bytes.
unsafe fn link(path: DriverPath<'_>, buffer: *mut c_char, len: usize) -> Result<isize, Errno> {
    let status = FileStatus::of_path(path, true)?;
    if !matches!(path, DriverPath::CharacterLink { .. }) || len == 0 {
        return Err(Errno::EINVAL);
    }
    let name = match node_files::node_of(status.device.0, status.device.1) {
        Some(cuda_socket::Node::Control) => "../nvidiactl".to_owned(),
        Some(cuda_socket::Node::Uvm) => "../nvidia-uvm".to_owned(),
        _ => format!("../nvidia{}", status.device.1),
    };
    let len = len.min(name.len());
    // SAFETY: by the caller.
    unsafe { name.as_ptr().copy_to(buffer.cast(), len) };
    Ok(len.cast_signed())
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readlink(path: *const c_char, buffer: *mut c_char, len: usize) -> isize {
    // SAFETY: by the caller.
    unsafe { readlinkat(libc::AT_FDCWD, path, buffer, len) }
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readlinkat(
    at: c_int,
    path: *const c_char,
    buffer: *mut c_char,
    len: usize,
) -> isize {
    // SAFETY: by the caller.
    unsafe {
        match driver_path(path).filter(DriverPath::is_of_driver) {
            Some(driver) => answer(-1, || link(driver, buffer, len)),
            None => kernel::readlinkat(at, path, buffer, len),
        }
    }
}
