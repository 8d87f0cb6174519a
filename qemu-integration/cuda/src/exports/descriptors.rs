//! `close`, `dup`, `fcntl`.

use std::ffi::{c_int, c_long};

use crate::open_files;
use crate::sys::kernel;
use crate::sys::next::{CLOSE, FCNTL};

/// Closes a descriptor. The worker sees the end of a file's socket.
///
/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    // Before the number can be used again.
    open_files::remove(fd);
    // SAFETY: by the caller.
    unsafe {
        match CLOSE.get() {
            Some(close) => close(fd),
            None => kernel::close(fd),
        }
    }
}

/// Enters a copy of a descriptor, if one was made.
fn copied(from: c_int, to: c_int) -> c_int {
    if to >= 0 && to != from && (open_files::possible(from) || open_files::possible(to)) {
        let errno = nix::errno::Errno::last();
        open_files::copy(from, to);
        errno.set();
    }
    to
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup(fd: c_int) -> c_int {
    // SAFETY: by the caller.
    copied(fd, unsafe { kernel::dup(fd) })
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if old == new {
        // SAFETY: reads a flag of a descriptor.
        return if unsafe { kernel::fcntl(old, libc::F_GETFD, 0) } < 0 { -1 } else { new };
    }
    // SAFETY: by the caller.
    copied(old, unsafe { kernel::dup3(old, new, 0) })
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    // SAFETY: by the caller.
    copied(old, unsafe { kernel::dup3(old, new, flags) })
}

/// # Safety
/// As for `fcntl()`.
unsafe fn control(fd: c_int, command: c_int, arg: c_long) -> c_int {
    // SAFETY: by the caller.
    let result = unsafe {
        match FCNTL.get() {
            Some(fcntl) => fcntl(fd, command, arg),
            None => kernel::fcntl(fd, command, arg),
        }
    };
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => copied(fd, result),
        _ => result,
    }
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl(fd: c_int, command: c_int, arg: c_long) -> c_int {
    // SAFETY: by the caller.
    unsafe { control(fd, command, arg) }
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl64(fd: c_int, command: c_int, arg: c_long) -> c_int {
    // SAFETY: by the caller.
    unsafe { control(fd, command, arg) }
}
