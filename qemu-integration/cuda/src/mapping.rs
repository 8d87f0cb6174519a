//! `mmap()` of files of the driver.

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;

use cuda_socket::{MapRequest, Node, Reply, Request};
use nix::errno::Errno;

use crate::open_files::OpenFile;
use crate::session;
use crate::sys::kernel;

/// Arguments of `mmap()`.
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    /// Address, or null.
    pub address: *mut c_void,
    /// Length in bytes.
    pub len: usize,
    /// Protection.
    pub protection: c_int,
    /// Flags.
    pub flags: c_int,
    /// Offset in bytes.
    pub offset: i64,
}

/// Maps a file.
///
/// # Safety
/// As for `mmap()`.
pub unsafe fn map(file: OpenFile, mapping: Mapping) -> Result<*mut c_void, Errno> {
    let Mapping { address, len, protection, flags, .. } = mapping;
    let (fd, flags, offset) = match request(file, mapping) {
        Ok((fd, offset)) => (Some(fd), flags, offset),
        // An address range: the driver fills it later, and so does the worker.
        Err(_) if file.node == Node::Uvm => {
            let kept = libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE;
            let own = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            (None, flags & kept | own, 0)
        }
        Err(error) => return Err(error),
    };
    let raw = fd.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    // SAFETY: by the caller; the file is the worker's memory.
    let mapped = unsafe { kernel::mmap(address, len, protection, flags, raw, offset) };
    if mapped == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(mapped) }
}

fn request(file: OpenFile, mapping: Mapping) -> Result<(std::os::fd::OwnedFd, i64), Errno> {
    let request = Request::Map(MapRequest {
        file: file.id,
        len: mapping.len as u64,
        offset: u64::try_from(mapping.offset).map_err(|_| Errno::EINVAL)?,
        writable: mapping.protection & libc::PROT_WRITE != 0,
    });
    let (reply, fds) = session::with(|session| session.call(&request, &[]))?;
    match (reply, fds.into_iter().next()) {
        (Reply::Mapped { offset }, Some(fd)) => {
            Ok((fd, i64::try_from(offset).map_err(|_| Errno::EIO)?))
        }
        _ => Err(Errno::EIO),
    }
}
