//! System calls on files and descriptors, by numbers that x86-64 and aarch64 have in common.
//!
//! Results are libc's: -1 and `errno`, or a value.

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;

use nix::errno::Errno;

/// Calls of the kernel with the arguments of C functions.
///
/// # Safety
/// As for the C function of the same name.
macro_rules! calls {
    ($($name:ident($($arg:ident: $type:ty),*) => $number:ident($($value:expr),*);)*) => {
        $(
            /// # Safety
            /// As for the C function of this name.
            pub unsafe fn $name($($arg: $type),*) -> c_int {
                // SAFETY: the kernel checks its arguments; the caller answers for the memory.
                unsafe { libc::syscall(libc::$number, $($value),*) as c_int }
            }
        )*
    };
}

calls! {
    openat(at: c_int, path: *const c_char, flags: c_int, mode: c_uint)
        => SYS_openat(at, path, flags, mode);
    close(fd: c_int) => SYS_close(fd);
    ioctl(fd: c_int, request: c_long, arg: *mut c_void) => SYS_ioctl(fd, request, arg);
    fcntl(fd: c_int, command: c_int, arg: c_long) => SYS_fcntl(fd, command, arg);
    dup(fd: c_int) => SYS_dup(fd);
    dup3(old: c_int, new: c_int, flags: c_int) => SYS_dup3(old, new, flags);
    fstatat(at: c_int, path: *const c_char, status: *mut libc::stat, flags: c_int)
        => SYS_newfstatat(at, path, status, flags);
    fstat(fd: c_int, status: *mut libc::stat) => SYS_fstat(fd, status);
    statx(at: c_int, path: *const c_char, flags: c_int, mask: c_uint, status: *mut libc::statx)
        => SYS_statx(at, path, flags, mask, status);
    mknodat(at: c_int, path: *const c_char, mode: c_uint, device: u64)
        => SYS_mknodat(at, path, mode, device);
    symlinkat(target: *const c_char, at: c_int, path: *const c_char)
        => SYS_symlinkat(target, at, path);
    unlinkat(at: c_int, path: *const c_char, flags: c_int) => SYS_unlinkat(at, path, flags);
    fchmodat(at: c_int, path: *const c_char, mode: c_uint) => SYS_fchmodat(at, path, mode);
    fchownat(at: c_int, path: *const c_char, user: c_uint, group: c_uint, flags: c_int)
        => SYS_fchownat(at, path, user, group, flags);
    faccessat(at: c_int, path: *const c_char, mode: c_int) => SYS_faccessat(at, path, mode);
    ppoll(
        fds: *mut libc::pollfd,
        count: libc::nfds_t,
        timeout: *const libc::timespec,
        signals: *const libc::sigset_t
    ) => SYS_ppoll(fds, count, timeout, signals, KERNEL_SIGSET_BYTES);
}

/// Length of the kernel's signal set, which is shorter than libc's.
const KERNEL_SIGSET_BYTES: usize = 8;

/// # Safety
/// As for `readlinkat`.
pub unsafe fn readlinkat(at: c_int, path: *const c_char, buffer: *mut c_char, len: usize) -> isize {
    // SAFETY: by the caller.
    unsafe { libc::syscall(libc::SYS_readlinkat, at, path, buffer, len) as isize }
}

/// # Safety
/// As for `mmap`.
pub unsafe fn mmap(
    address: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: by the caller.
    unsafe {
        libc::syscall(libc::SYS_mmap, address, len, protection, flags, fd, offset) as *mut c_void
    }
}

/// Returns the status of an open file.
pub fn status_of(fd: RawFd) -> Result<libc::stat, Errno> {
    // SAFETY: all-zero is a valid stat: it has only integers.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one stat.
    Errno::result(unsafe { fstat(fd, &raw mut status) })?;
    Ok(status)
}

/// Sets or clears close-on-exec.
pub fn set_close_on_exec(fd: RawFd, on: bool) -> Result<(), Errno> {
    let flags = if on { libc::FD_CLOEXEC } else { 0 };
    // SAFETY: changes a flag of a descriptor.
    Errno::result(unsafe { fcntl(fd, libc::F_SETFD, c_long::from(flags)) }).map(drop)
}

/// Opens a file of the host, past the library's own functions.
pub fn open_host_file(path: &std::ffi::CStr) -> Result<OwnedFd, Errno> {
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    // SAFETY: the path is a string with a terminator.
    let fd = Errno::result(unsafe { openat(libc::AT_FDCWD, path.as_ptr(), flags, 0) })?;
    // SAFETY: the kernel has just created the descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Opens a file of POSIX shared memory for reading and writing.
pub fn open_shared_memory(path: &std::ffi::CStr) -> Result<OwnedFd, Errno> {
    let flags = libc::O_RDWR | libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK;
    // SAFETY: the path is a string with a terminator.
    let fd = Errno::result(unsafe { openat(libc::AT_FDCWD, path.as_ptr(), flags, 0) })?;
    // SAFETY: the kernel has just created the descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Opens a `FILE` on a descriptor, for reading. Returns null if there is no memory.
pub fn stream(fd: OwnedFd) -> *mut libc::FILE {
    use std::os::fd::IntoRawFd;
    let fd = fd.into_raw_fd();
    // SAFETY: the stream owns the descriptor from here on.
    let file = unsafe { libc::fdopen(fd, c"r".as_ptr()) };
    if file.is_null() {
        // SAFETY: without a stream, the descriptor is still this function's.
        unsafe { close(fd) };
        return null_mut();
    }
    file
}

/// Returns a copy of a descriptor, close-on-exec.
pub fn duplicate(fd: RawFd) -> Result<OwnedFd, Errno> {
    // SAFETY: makes a descriptor.
    let copy = Errno::result(unsafe { fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) })?;
    // SAFETY: the kernel has just created the descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}
