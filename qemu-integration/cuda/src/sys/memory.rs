//! Memory of the program: addresses that the program passed to `ioctl()` or `mmap()`.
//!
//! Addresses may be wrong. The kernel copies, so that a wrong one is an error and no signal.

use std::ffi::{c_int, c_void};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd};

use cuda_socket::Range;
use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::getpid;

use super::kernel;

/// Size of a page of the kernel.
pub fn page_size() -> u64 {
    // SAFETY: returns a constant.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

fn remote(address: u64, len: usize) -> RemoteIoVec {
    RemoteIoVec { base: address as usize, len }
}

/// Returns whether a sandbox forbids the system call. Docker before 19.03 does.
fn forbidden(error: Errno) -> bool {
    matches!(error, Errno::EPERM | Errno::ENOSYS)
}

/// Copies memory of the program.
pub fn read(range: Range) -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0; usize::try_from(range.len).map_err(|_| Errno::EFAULT)?];
    if bytes.is_empty() {
        return Ok(bytes);
    }
    let from = remote(range.address, bytes.len());
    match process_vm_readv(getpid(), &mut [IoSliceMut::new(&mut bytes)], &[from]) {
        Ok(len) if len == bytes.len() => Ok(bytes),
        Err(error) if forbidden(error) => {
            let from = range.address as *const u8;
            // SAFETY: the program passed the range to ioctl() as readable memory.
            unsafe { from.copy_to(bytes.as_mut_ptr(), bytes.len()) };
            Ok(bytes)
        }
        _ => Err(Errno::EFAULT),
    }
}

/// Writes memory of the program.
pub fn write(address: u64, bytes: &[u8]) -> Result<(), Errno> {
    if bytes.is_empty() {
        return Ok(());
    }
    let to = remote(address, bytes.len());
    match process_vm_writev(getpid(), &[IoSlice::new(bytes)], &[to]) {
        Ok(len) if len == bytes.len() => Ok(()),
        Err(error) if forbidden(error) => {
            // SAFETY: the program passed the range to ioctl() as memory to write.
            unsafe { bytes.as_ptr().copy_to(address as *mut u8, bytes.len()) };
            Ok(())
        }
        _ => Err(Errno::EFAULT),
    }
}

/// Flags of a mapping that takes the place of what is there.
const IN_PLACE: c_int = libc::MAP_SHARED | libc::MAP_FIXED;

/// Maps a file in place of memory of the program.
pub fn replace(
    range: Range,
    file: BorrowedFd<'_>,
    offset: u64,
    protection: c_int,
) -> Result<(), Errno> {
    map_fixed(range, file, offset, protection, IN_PLACE)
}

/// Maps a private view of a file in place of memory of the program.
pub fn replace_private(
    range: Range,
    file: BorrowedFd<'_>,
    offset: u64,
    protection: c_int,
) -> Result<(), Errno> {
    map_fixed(range, file, offset, protection, libc::MAP_PRIVATE | libc::MAP_FIXED)
}

fn map_fixed(
    range: Range,
    file: BorrowedFd<'_>,
    offset: u64,
    protection: c_int,
    flags: c_int,
) -> Result<(), Errno> {
    let (address, len) = (range.address as *mut c_void, range.len as usize);
    let offset = i64::try_from(offset).map_err(|_| Errno::EINVAL)?;
    // SAFETY: the program has made an ioctl or a fork that gives its range new pages, as it would
    // with NVIDIA's driver. The library itself has no reference into the program's memory.
    let mapped = unsafe { kernel::mmap(address, len, protection, flags, file.as_raw_fd(), offset) };
    if mapped == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(()) }
}

/// Gives a page of a private mapping its own copy, if the page is readable and writable.
pub fn copy_page(address: u64) {
    // One byte is read and written again, by the kernel: another thread cannot exist in a child.
    if let Ok(byte) = read(Range { address, len: 1 }) {
        let _ = write(address, &byte);
    }
}

/// Writes memory of the program to a file.
pub fn write_file(file: BorrowedFd<'_>, offset: u64, range: Range) -> Result<(), Errno> {
    let mut done = 0;
    while done < range.len {
        let (address, len) = ((range.address + done) as *const c_void, (range.len - done) as usize);
        let at = i64::try_from(offset + done).map_err(|_| Errno::EINVAL)?;
        // SAFETY: the kernel reads the program's memory, and reports wrong addresses as EFAULT.
        match Errno::result(unsafe { libc::pwrite(file.as_raw_fd(), address, len, at) }) {
            Ok(0) => return Err(Errno::EIO),
            Ok(written) => done += written.cast_unsigned() as u64,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
