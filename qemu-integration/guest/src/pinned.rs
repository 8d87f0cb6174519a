//! Pinned memory on a stock kernel, with physical addresses from `/proc/self/pagemap`.
//!
//! Without an own kernel driver, compaction and khugepaged could move a page after its address was
//! read. Registering a buffer with io_uring pins its pages for the long term, which prevents both.
//! If io_uring is disabled, the pages are locked, and compaction is configured to skip locked
//! pages.

use std::fs::{self, File};
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

use mdev_core::units::{MIB, PAGE_SIZE};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mlock, mmap_anonymous, munmap};

use crate::GuestError;

/// `IORING_REGISTER_BUFFERS` of linux/io_uring.h.
const REGISTER_BUFFERS: libc::c_uint = 0;
/// Bytes of `struct io_uring_params`.
const PARAMS_BYTES: usize = 120;
/// Largest buffer that io_uring accepts, in bytes.
const MAX_BUFFER: usize = 1 << 30;
/// Alignment of transparent huge pages.
const HUGE: usize = 2 * MIB as usize;

/// Zeroed pages at fixed physical addresses.
#[derive(Debug)]
pub struct Pinned {
    // Declared first, so that the pin is released before the pages.
    _pin: Pin,
    mapping: Mapping,
    /// The physical address of each page.
    pages: Vec<u64>,
}

impl Pinned {
    /// Allocates `len` bytes (whole pages) and reads their physical addresses.
    pub fn new(len: u64) -> Result<Self, GuestError> {
        let mapping =
            Mapping::new(len as usize).map_err(GuestError::os(format!("Mapping {len} bytes")))?;
        let pin = Pin::new(&mapping)?;
        let pages = physical_addresses(mapping.start, mapping.len)?;
        Ok(Self { _pin: pin, mapping, pages })
    }

    /// Returns the start address in this process, mapped for as long as self lives.
    pub fn start(&self) -> NonNull<u8> {
        self.mapping.start
    }

    /// Returns the physical address of each page.
    pub fn pages(&self) -> &[u64] {
        &self.pages
    }
}

/// Anonymous mapping. Large mappings are aligned to a huge page, which keeps scatter lists short.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
    whole: NonNull<libc::c_void>,
    whole_len: usize,
}

// SAFETY: the type only stores the mapping's address, and unmaps it once.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: usize) -> io::Result<Self> {
        let large = len >= HUGE;
        let whole_len = if large { len + HUGE } else { len };
        let size = NonZeroUsize::new(whole_len)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh private mapping at an address of the kernel's choice.
        let whole = unsafe { mmap_anonymous(None, size, protection, MapFlags::MAP_PRIVATE)? };
        let skip = if large { whole.as_ptr().align_offset(HUGE) } else { 0 };
        // SAFETY: within the mapping, which is longer by HUGE where anything is skipped.
        let start = unsafe { whole.cast::<u8>().add(skip) };
        let mapping = Self { start, len, whole, whole_len };
        let advice = if large { MmapAdvise::MADV_HUGEPAGE } else { MmapAdvise::MADV_NOHUGEPAGE };
        // A forked child must not share pages that a device writes to. The other advice affects
        // speed only.
        // SAFETY: this process owns the range, and neither advice changes its contents.
        unsafe {
            let _ = madvise(start.cast(), len, advice);
            madvise(start.cast(), len, MmapAdvise::MADV_DONTFORK)?;
        }
        for page in (0..len).step_by(PAGE_SIZE as usize) {
            // SAFETY: within the mapping. The write replaces the shared zero page by a private
            // page.
            unsafe { start.add(page).as_ptr().write_volatile(0) };
        }
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by new() and unmapped once. An error would mean that it is not mapped.
        let _ = unsafe { munmap(self.whole, self.whole_len) };
    }
}

/// Mechanism that keeps pages at their physical addresses.
#[derive(Debug)]
enum Pin {
    /// The io_uring instance that the pages are registered with; closing it unpins them.
    Registered { _ring: OwnedFd },
    /// Pages locked for as long as they are mapped.
    Locked,
}

impl Pin {
    fn new(mapping: &Mapping) -> Result<Self, GuestError> {
        if let Ok(ring) = register(mapping) {
            return Ok(Self::Registered { _ring: ring });
        }
        // SAFETY: locking a mapping does not change its contents.
        unsafe { mlock(mapping.start.cast(), mapping.len) }
            .map_err(GuestError::os("Locking memory for the device"))?;
        fs::write("/proc/sys/vm/compact_unevictable_allowed", "0").map_err(GuestError::os(
            "Keeping memory in place (vm.compact_unevictable_allowed, since io_uring is off)",
        ))?;
        Ok(Self::Locked)
    }
}

fn register(mapping: &Mapping) -> io::Result<OwnedFd> {
    let mut params = [0u8; PARAMS_BYTES];
    // SAFETY: the kernel fills `params`, which has the structure's size; one entry, no flags.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor for this process.
    let ring = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let parts: Vec<libc::iovec> = (0..mapping.len)
        .step_by(MAX_BUFFER)
        .map(|at| libc::iovec {
            // SAFETY: within the mapping.
            iov_base: unsafe { mapping.start.add(at) }.as_ptr().cast(),
            iov_len: MAX_BUFFER.min(mapping.len - at),
        })
        .collect();
    // SAFETY: the buffers are mapped; the kernel reads `parts` during the call only.
    let result = unsafe {
        libc::syscall(
            libc::SYS_io_uring_register,
            ring.as_raw_fd(),
            REGISTER_BUFFERS,
            parts.as_ptr(),
            parts.len(),
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(ring) }
}

fn physical_addresses(start: NonNull<u8>, len: usize) -> Result<Vec<u64>, GuestError> {
    let what = "Reading /proc/self/pagemap (is /proc mounted?)";
    let file = File::open("/proc/self/pagemap").map_err(GuestError::os(what))?;
    let mut raw = vec![0; len / PAGE_SIZE as usize * 8];
    let first = start.as_ptr() as u64 / PAGE_SIZE;
    file.read_exact_at(&mut raw, first * 8).map_err(GuestError::os(what))?;
    raw.chunks_exact(8).map(|entry| decode(entry).ok_or_else(not_root)).collect()
}

/// Decodes the physical address of a pagemap entry. Returns None if the page is absent or the
/// kernel hides the address.
fn decode(entry: &[u8]) -> Option<u64> {
    let entry = u64::from_le_bytes(entry.try_into().ok()?);
    let frame = entry & ((1 << 55) - 1);
    (entry >> 63 == 1 && frame != 0).then_some(frame * PAGE_SIZE)
}

fn not_root() -> GuestError {
    GuestError::Os {
        what: "Physical addresses are hidden: run as root (CAP_SYS_ADMIN)".into(),
        source: io::ErrorKind::PermissionDenied.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_pagemap_entries() {
        assert_eq!(decode(&(1u64 << 63 | 0x1234).to_le_bytes()), Some(0x123_4000));
        assert_eq!(decode(&(1u64 << 63 | 1 << 61 | 7).to_le_bytes()), Some(0x7000));
        assert_eq!(decode(&(1u64 << 63).to_le_bytes()), None, "hidden by the kernel");
        assert_eq!(decode(&0x1234u64.to_le_bytes()), None, "not present");
    }

    #[test]
    fn maps_whole_huge_pages() {
        let mapping = Mapping::new(3 * HUGE).unwrap();
        assert_eq!(mapping.start.as_ptr() as usize % HUGE, 0);
        let mapping = Mapping::new(4096).unwrap();
        assert_eq!(mapping.len, mapping.whole_len);
    }
}
