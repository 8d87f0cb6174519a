//! What programs do with the library. Each test runs in a process of its own.
//!
//! * [`files`]: opening, status, descriptors and events of files of the driver
//! * [`memory`]: arguments, mappings and shared memory
//! * [`processes`]: threads, children, and descriptors of other processes

#![allow(clippy::undocumented_unsafe_blocks, reason = "C programs, in Rust")]

use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;

use nix::errno::Errno;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

use super::fake_worker::number;

/// Makes tests that run in a process with the library.
macro_rules! programs {
    ($($(#[$doc:meta])* fn $name:ident() $body:block)*) => {$(
        $(#[$doc])*
        #[test]
        #[ignore = "runs in a process with the library"]
        fn $name() {
            if std::env::var_os(MARK).is_some() {
                $body
            }
        }
    )*};
}

mod files;
mod memory;
mod processes;

/// Environment variable of processes that run a function of this module.
pub const MARK: &str = "TESSERA_CUDA_INSIDE";

const PAGE: usize = 4096;

/// Opens a device node, as libcuda does.
fn open(path: &str) -> OwnedFd {
    let path = CString::new(path).unwrap();
    let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDWR) };
    assert!(fd >= 0, "{path:?}: {}", Errno::last());
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Returns the file that the worker sees for a descriptor, or 0.
fn named(control: &OwnedFd, fd: RawFd) -> u64 {
    let mut argument = [u64::from(fd.cast_unsigned()), 0];
    ioctl(control.as_raw_fd(), number::FILE, &mut argument).unwrap();
    argument[1]
}

/// Makes an ioctl of RM's nodes.
fn ioctl<T>(fd: RawFd, number: u32, argument: &mut T) -> Result<(), Errno> {
    let request = 3 << 30 | (size_of::<T>() as u64) << 16 | 0x46 << 8 | u64::from(number);
    let result = unsafe { libc::ioctl(fd, request, std::ptr::from_mut(argument)) };
    Errno::result(result).map(drop)
}

/// Returns the number of open files and of connections so far.
fn counts(fd: RawFd) -> (u32, u32) {
    let mut counts = [0_u32; 2];
    ioctl(fd, number::COUNT, &mut counts).unwrap();
    (counts[0], counts[1])
}

/// Maps private memory.
fn private(pages: usize) -> *mut u8 {
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let at = unsafe { libc::mmap(null_mut(), pages * PAGE, access, flags, -1, 0) };
    assert!(at != libc::MAP_FAILED);
    at.cast()
}

/// Argument of the ioctl that shares memory.
#[repr(C)]
struct Share {
    address: u64,
    len: u64,
    parts: u32,
    seen: u32,
}

/// Shares memory. Returns the number of parts and the first byte that the worker saw.
fn share(fd: &OwnedFd, at: *mut u8, pages: usize) -> Result<(u32, u32), Errno> {
    let len = (pages * PAGE) as u64;
    let mut argument = Share { address: at as u64, len, parts: 0, seen: 0 };
    ioctl(fd.as_raw_fd(), number::SHARE, &mut argument)?;
    Ok((argument.parts, argument.seen))
}

/// Runs a function in a child and waits for its success.
fn in_child(part: impl FnOnce()) {
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(part));
            unsafe { libc::_exit(i32::from(done.is_err())) }
        }
        ForkResult::Parent { child } => {
            assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));
        }
    }
}
