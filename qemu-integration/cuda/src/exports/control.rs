//! `ioctl`, `mmap`.

use std::ffi::{c_int, c_ulong, c_void};

use super::{answer, answer_int};
use crate::mapping::{self, Mapping};
use crate::sys::kernel;
use crate::{ioctl as requests, open_files};

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int {
    if open_files::possible(fd)
        && let Some(file) = open_files::get(fd)
    {
        return answer_int(|| requests::ioctl(file, request as u32, arg as u64).map(|()| 0));
    }
    // SAFETY: by the caller.
    unsafe { kernel::ioctl(fd, request.cast_signed(), arg) }
}

/// # Safety
/// As for `mmap()`.
unsafe fn map(fd: c_int, mapping: Mapping) -> *mut c_void {
    if mapping.flags & libc::MAP_ANONYMOUS == 0
        && open_files::possible(fd)
        && let Some(file) = open_files::get(fd)
    {
        // SAFETY: by the caller.
        return answer(libc::MAP_FAILED, || unsafe { mapping::map(file, mapping) });
    }
    let Mapping { address, len, protection, flags, offset } = mapping;
    // SAFETY: by the caller.
    unsafe { kernel::mmap(address, len, protection, flags, fd, offset) }
}

macro_rules! maps {
    ($($name:ident)*) => {$(
        /// # Safety
        /// As for libc's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            address: *mut c_void,
            len: usize,
            protection: c_int,
            flags: c_int,
            fd: c_int,
            offset: i64,
        ) -> *mut c_void {
            // SAFETY: by the caller.
            unsafe { map(fd, Mapping { address, len, protection, flags, offset }) }
        }
    )*};
}

maps! { mmap mmap64 }
