//! A page whose first access waits: a handler of page faults in this process (userfaultfd).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;

use super::driver_files::Mapping;

/// Length of a page.
pub const PAGE: usize = 4096;

/// Requests of userfaultfd.
const API: libc::c_ulong = 0xc018_aa3f;
const REGISTER: libc::c_ulong = 0xc020_aa00;
const COPY: libc::c_ulong = 0xc028_aa03;
const VERSION: u64 = 0xaa;
/// Faults of pages that were never accessed.
const MISSING: u64 = 1;

/// Handler of faults.
#[derive(Debug)]
pub struct Faults(OwnedFd);

impl Faults {
    /// Makes a handler, also of the kernel's own accesses. Needs root.
    pub fn new() -> io::Result<Self> {
        // SAFETY: the call makes a descriptor, or fails.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
        let fd = i32::try_from(Errno::result(fd)?).map_err(io::Error::other)?;
        // SAFETY: the descriptor is new.
        let faults = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        faults.request(API, &mut [VERSION, 0, 0])?;
        Ok(faults)
    }

    /// Makes a page whose first access waits.
    pub fn withhold(&self) -> io::Result<Mapping> {
        let page = Mapping::new(None, None, PAGE)?;
        self.request(REGISTER, &mut [page.address as u64, PAGE as u64, MISSING, 0])?;
        Ok(page)
    }

    /// Waits for an access to such a page. Returns its address.
    pub fn wait(&self) -> io::Result<usize> {
        let mut message = [0_u64; 4];
        let length = size_of_val(&message);
        // SAFETY: the buffer has the length of a message.
        let read = unsafe { libc::read(self.0.as_raw_fd(), message.as_mut_ptr().cast(), length) };
        Errno::result(read)?;
        Ok(message[2] as usize & !(PAGE - 1))
    }

    /// Gives a page its content. The access continues.
    pub fn give(&self, page: usize, content: &[u8; PAGE]) -> io::Result<()> {
        let content = content.as_ptr() as u64;
        self.request(COPY, &mut [page as u64, content, PAGE as u64, 0, 0])
    }

    /// Takes the content of a page away: the next access waits again.
    pub fn take(page: usize) -> io::Result<()> {
        let page = page as *mut libc::c_void;
        // SAFETY: the page is one of `withhold`, to which no reference exists.
        Errno::result(unsafe { libc::madvise(page, PAGE, libc::MADV_DONTNEED) })?;
        Ok(())
    }

    fn request(&self, request: libc::c_ulong, argument: &mut [u64]) -> io::Result<()> {
        let argument = argument.as_mut_ptr();
        // SAFETY: the argument has the length that the request encodes.
        Errno::result(unsafe { libc::ioctl(self.0.as_raw_fd(), request, argument) })?;
        Ok(())
    }
}
