//! Shared memory and all raw accesses to it.
//!
//! A guest or another process may write to a [`Mapping`] at any time. Therefore no reference to the
//! mapped bytes exists: they are copied or accessed as atomics. This module checks every access
//! against the length of the mapping, so that the backends need no unsafe code for memory.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use mdev_core::memory_file::MemoryFile;
use mdev_core::sigbus::held::Access;
use mdev_core::sigbus::{GuardedMapping, Protection};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MmapAdvise, madvise};
use nix::sys::time::TimeSpec;
use nix::unistd::ftruncate;

mod write_log;

pub use write_log::WriteLog;

/// Length in bytes from which copies bypass the caches, as memcpy does.
pub const STREAMING_BYTES: u64 = 4 << 20;

/// Creates a memfd with a sealed length, which no process can change.
pub fn sealed_memfd(name: &CStr, len: u64) -> io::Result<OwnedFd> {
    let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    let len = i64::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
    ftruncate(&fd, len)?;
    let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(fd)
}

/// Returns a file in memory with these bytes, to be read from its start.
pub fn file_of(name: &CStr, bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC)?);
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file.into())
}

/// A shared mapping of a range of a file. If the file is truncated, zeros replace the lost pages
/// and the mapping is poisoned.
#[derive(Debug)]
pub struct Mapping {
    memory: GuardedMapping,
    writable: bool,
    /// Another process has the file, and can make accesses last.
    is_guests: bool,
    /// Whether writes are recorded in `log`.
    is_logged: AtomicBool,
    log: RwLock<Option<WriteLog>>,
}

/// Bytes of a mapping during an access.
struct Place<'a> {
    pointer: *mut u8,
    _access: Option<Access<'a>>,
}

impl Mapping {
    /// Maps `len` bytes of `fd` from `offset`, both page-aligned. The file must belong to this
    /// process or a trusted one: [`Self::of_guest`] maps others'.
    pub fn new(fd: BorrowedFd<'_>, offset: u64, len: u64, writable: bool) -> io::Result<Arc<Self>> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
        let protection = if writable { Protection::ReadWrite } else { Protection::ReadOnly };
        let memory = GuardedMapping::map(fd, offset, len, protection)?;
        Ok(Self::with_huge_pages(memory, writable, false))
    }

    /// Maps `len` bytes of guest memory from `offset`, both page-aligned.
    ///
    /// # Errors
    ///
    /// Fails if the range is not aligned, or the process cannot map more memory.
    pub fn of_guest(
        file: &MemoryFile<'_>,
        offset: u64,
        len: u64,
        writable: bool,
    ) -> io::Result<Arc<Self>> {
        let size = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
        let protection = if writable { Protection::ReadWrite } else { Protection::ReadOnly };
        let memory = file.map(offset, size, protection)?;
        Ok(Self::with_huge_pages(memory, writable, true))
    }

    fn with_huge_pages(memory: GuardedMapping, writable: bool, is_guests: bool) -> Arc<Self> {
        if let Some(base) = NonNull::new(memory.as_ptr().cast()) {
            // SAFETY: the range was mapped above; the advice changes page sizes, not contents. The
            // kernel may refuse the advice.
            let _ = unsafe { madvise(base, memory.len(), MmapAdvise::MADV_HUGEPAGE) };
        }
        let (is_logged, log) = (AtomicBool::new(false), RwLock::default());
        Arc::new(Self { memory, writable, is_guests, is_logged, log })
    }

    /// Returns true once an access has found the file truncated.
    pub fn poisoned(&self) -> bool {
        self.memory.poisoned()
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Returns false: a mapping has at least one page.
    pub fn is_empty(&self) -> bool {
        self.memory.len() == 0
    }

    /// Returns the address in this process, for kernel interfaces that take memory by address.
    pub fn address(&self) -> u64 {
        self.memory.as_ptr().expose_provenance() as u64
    }

    /// Returns whether the mapping may be written.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Begins an access to `len` bytes at `offset`, if they are inside the mapping.
    fn at(&self, offset: u64, len: usize) -> Option<Place<'_>> {
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(len)?;
        (end <= self.memory.len()).then(|| Place {
            // SAFETY: offset is within the mapping.
            pointer: unsafe { self.memory.as_ptr().add(offset) },
            _access: self.is_guests.then(|| self.memory.access()),
        })
    }

    fn at_for_write(&self, offset: u64, len: usize) -> Option<Place<'_>> {
        let place = if self.writable { self.at(offset, len)? } else { return None };
        if self.is_logged.load(Ordering::Relaxed) {
            self.note_write(offset, len as u64);
        }
        Some(place)
    }

    #[cold]
    fn note_write(&self, offset: u64, len: u64) {
        if let Some(log) = &*self.log.read().unwrap_or_else(PoisonError::into_inner) {
            log.note(offset, len);
        }
    }

    /// Records the pages that this process writes from now on, or ends that with `None`. No access
    /// of this process may be in progress.
    pub fn set_log(&self, log: Option<WriteLog>) {
        self.is_logged.store(log.is_some(), Ordering::Relaxed);
        *self.log.write().unwrap_or_else(PoisonError::into_inner) = log;
    }

    /// Copies bytes from the mapping. Returns `None` if the range is not inside.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Option<()> {
        let from = self.at(offset, out.len())?;
        // SAFETY: `from` is valid for `out.len()` bytes of this mapping; `out` is private memory.
        unsafe { from.pointer.copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
        Some(())
    }

    /// Copies bytes to the mapping. Returns `None` if the range is not inside or the mapping is
    /// read-only.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Option<()> {
        let to = self.at_for_write(offset, bytes.len())?;
        // SAFETY: `to` is valid for `bytes.len()` bytes of this mapping; `bytes` is private memory.
        unsafe { to.pointer.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Some(())
    }

    /// Receives up to `len` bytes of a socket, without waiting, and closes descriptors. After the
    /// death of a process within the call, the mapping has the bytes if they have left the socket.
    ///
    /// # Errors
    ///
    /// Fails as recv(2) does, or if the range is not inside.
    pub fn receive(&self, offset: u64, len: usize, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let to = self.at_for_write(offset, len).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = libc::MSG_DONTWAIT;
        // SAFETY: `to` is valid for `len` bytes of this mapping.
        let received =
            unsafe { foreign_fds::receive_at(socket, to.pointer.cast(), len, 0, flags, drop) };
        Ok(received?.bytes)
    }

    /// Copies `len` bytes between two mappings or within one. Ranges may overlap.
    ///
    /// `streaming` says that the bytes are part of a transfer that exceeds the caches.
    pub fn copy(
        &self,
        offset: u64,
        to: &Self,
        to_offset: u64,
        len: usize,
        streaming: bool,
    ) -> Option<()> {
        let (source, target) = (self.at(offset, len)?, to.at_for_write(to_offset, len)?);
        let (from, to) = (source.pointer, target.pointer);
        if streaming && from.addr().abs_diff(to.addr()) >= len {
            // SAFETY: both are valid for `len` bytes, and they do not overlap.
            unsafe { stream::copy(from, to, len) };
        } else {
            // SAFETY: both are valid for `len` bytes.
            unsafe { from.copy_to(to, len) };
        }
        Some(())
    }

    /// Reads an aligned 32-bit word, with acquire ordering.
    pub fn load_u32(&self, offset: u64) -> Option<u32> {
        self.at(offset, 4)?.u32().map(|word| word.load(Ordering::Acquire))
    }

    /// Reads an aligned 64-bit word, with acquire ordering.
    pub fn load_u64(&self, offset: u64) -> Option<u64> {
        self.at(offset, 8)?.u64().map(|word| word.load(Ordering::Acquire))
    }

    /// Writes an aligned 32-bit word, with release ordering.
    pub fn store_u32(&self, offset: u64, value: u32) -> Option<()> {
        let place = self.at_for_write(offset, 4)?;
        let word = place.u32()?;
        word.store(value, Ordering::Release);
        Some(())
    }

    /// Writes an aligned 64-bit word, with release ordering.
    pub fn store_u64(&self, offset: u64, value: u64) -> Option<()> {
        let place = self.at_for_write(offset, 8)?;
        let word = place.u64()?;
        word.store(value, Ordering::Release);
        Some(())
    }

    /// Adds to an aligned 32-bit word, wrapping. Returns the previous value.
    pub fn add_u32(&self, offset: u64, value: u32) -> Option<u32> {
        let place = self.at_for_write(offset, 4)?;
        let word = place.u32()?;
        Some(word.fetch_add(value, Ordering::AcqRel))
    }

    /// Replaces an aligned 32-bit word by a function of it, as one atomic access.
    pub fn update_u32(&self, offset: u64, mut new: impl FnMut(u32) -> u32) -> Option<u32> {
        let place = self.at_for_write(offset, 4)?;
        let word = place.u32()?;
        word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(new(old))).ok()
    }

    /// Replaces an aligned 64-bit word by a function of it, as one atomic access.
    pub fn update_u64(&self, offset: u64, mut new: impl FnMut(u64) -> u64) -> Option<u64> {
        let place = self.at_for_write(offset, 8)?;
        let word = place.u64()?;
        word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(new(old))).ok()
    }

    /// Sets bits of an aligned 32-bit word. Returns the previous value.
    pub fn or_u32(&self, offset: u64, bits: u32) -> Option<u32> {
        let place = self.at_for_write(offset, 4)?;
        let word = place.u32()?;
        Some(word.fetch_or(bits, Ordering::AcqRel))
    }

    /// Waits until another thread or process wakes the waiters of an aligned 32-bit word
    /// ([`Self::wake_u32`]), for `timeout` at most. Returns at once if the word is not `value`, and
    /// may return early.
    pub fn wait_u32(&self, offset: u64, value: u32, timeout: Duration) -> Option<()> {
        let place = self.at(offset, 4)?;
        let word: *const AtomicU32 = place.u32()?;
        let timeout = TimeSpec::from_duration(timeout);
        // SAFETY: the word is in this mapping, and the time lives during the call. A shared futex
        // ends each wait by itself, so that nothing depends on its result.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                word,
                libc::FUTEX_WAIT,
                value,
                std::ptr::from_ref(timeout.as_ref()),
            )
        };
        Some(())
    }

    /// Wakes all that wait for an aligned 32-bit word.
    pub fn wake_u32(&self, offset: u64) -> Option<()> {
        let place = self.at(offset, 4)?;
        let word: *const AtomicU32 = place.u32()?;
        // SAFETY: the word is in this mapping.
        unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX) };
        Some(())
    }

    /// Replaces an aligned 32-bit word. Returns the previous value.
    pub fn swap_u32(&self, offset: u64, value: u32) -> Option<u32> {
        let place = self.at_for_write(offset, 4)?;
        let word = place.u32()?;
        Some(word.swap(value, Ordering::AcqRel))
    }
}

// The pointer comes from `Mapping::at` with the size of the word, and the mapping lives as long as
// the access.
#[allow(clippy::cast_ptr_alignment)]
impl Place<'_> {
    fn u32(&self) -> Option<&AtomicU32> {
        let pointer = self.pointer.cast::<u32>();
        // SAFETY: inside the mapping, aligned, and accessed only atomically or by racing raw
        // copies.
        pointer.is_aligned().then(|| unsafe { AtomicU32::from_ptr(pointer) })
    }

    fn u64(&self) -> Option<&AtomicU64> {
        let pointer = self.pointer.cast::<u64>();
        // SAFETY: as in `u32`.
        pointer.is_aligned().then(|| unsafe { AtomicU64::from_ptr(pointer) })
    }
}

/// Copies that bypass the caches.
mod stream {
    /// Bytes that are copied alternating between pages: several streams use more banks of the
    /// memory.
    #[cfg(target_arch = "x86_64")]
    const BLOCK: usize = 4 * PAGE;
    #[cfg(target_arch = "x86_64")]
    const PAGE: usize = 4096;

    /// Copies `len` bytes.
    ///
    /// # Safety
    /// Both must be valid for `len` bytes, and must not overlap.
    #[cfg(target_arch = "x86_64")]
    pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        let whole = len / BLOCK * BLOCK;
        if !to.addr().is_multiple_of(32)
            || whole == 0
            || !std::arch::is_x86_feature_detected!("avx2")
        {
            // SAFETY: guaranteed by the caller.
            return unsafe { from.copy_to_nonoverlapping(to, len) };
        }
        // SAFETY: AVX2 is available, `to` is aligned, and the caller guarantees the rest.
        unsafe {
            blocks(from, to, whole);
            from.add(whole).copy_to_nonoverlapping(to.add(whole), len - whole);
        }
    }

    /// # Safety
    /// As [`copy`], with `to` 32-byte aligned and `len` a multiple of [`BLOCK`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn blocks(from: *const u8, to: *mut u8, len: usize) {
        use std::arch::x86_64::{_mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
        const LANES: usize = 4;
        for block in (0..len).step_by(BLOCK) {
            for line in (0..PAGE).step_by(LANES * 32) {
                for page in (0..BLOCK).step_by(PAGE) {
                    let at = block + page + line;
                    for lane in 0..LANES {
                        // SAFETY: at + lane * 32 + 32 <= len, and `to` plus a multiple of 32 is
                        // aligned.
                        unsafe {
                            let vector = _mm256_loadu_si256(from.add(at + lane * 32).cast());
                            _mm256_stream_si256(to.add(at + lane * 32).cast(), vector);
                        }
                    }
                }
            }
        }
        // Streaming stores are not ordered with the following store to the semaphore.
        _mm_sfence();
    }

    /// Copies `len` bytes.
    ///
    /// # Safety
    /// Both must be valid for `len` bytes, and must not overlap.
    #[cfg(not(target_arch = "x86_64"))]
    pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { from.copy_to_nonoverlapping(to, len) };
    }
}

/// A memfd with a sealed length, and its mapping in this process.
#[derive(Debug)]
pub struct SharedMemory {
    /// The memfd.
    pub fd: OwnedFd,
    /// Mapping of the whole memfd.
    pub mapping: Arc<Mapping>,
}

impl SharedMemory {
    /// Creates zeroed memory.
    pub fn new(name: &CStr, len: u64) -> io::Result<Self> {
        let fd = sealed_memfd(name, len)?;
        let mapping = Mapping::new(fd.as_fd(), 0, len, true)?;
        Ok(Self { fd, mapping })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(len: u64) -> SharedMemory {
        SharedMemory::new(c"test", len).unwrap()
    }

    #[test]
    fn accesses_outside_are_refused() {
        let memory = memory(4096).mapping;
        assert!(memory.write(4090, &[1; 6]).is_some());
        assert!(memory.write(4090, &[1; 7]).is_none());
        assert!(memory.read(u64::MAX, &mut [0; 2]).is_none());
        assert!(memory.load_u64(4092).is_none(), "past the end");
        assert!(memory.load_u64(4).is_none(), "not aligned");
        assert!(memory.copy(0, &memory, 4000, 100, false).is_none());
    }

    #[test]
    fn read_only_memory_is_not_written() {
        let memory = memory(4096);
        let view = Mapping::new(memory.fd.as_fd(), 0, 4096, false).unwrap();
        assert!(view.store_u32(0, 1).is_none());
        assert!(view.write(0, &[1]).is_none());
        memory.mapping.store_u32(0, 7).unwrap();
        assert_eq!(view.load_u32(0), Some(7));
    }

    #[test]
    fn streaming_copies_copy_all_bytes() {
        let len = 1 << 16;
        let memory = memory(4 * len as u64).mapping;
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 / 3) as u8).collect();
        memory.write(0, &bytes).unwrap();
        for (to, part) in [(len, len), (2 * len + 32, len - 5), (2 * len + 1, len)] {
            memory.copy(0, &memory, to as u64, part, true).unwrap();
            let mut back = vec![0; part];
            memory.read(to as u64, &mut back).unwrap();
            assert!(back == bytes[..part]);
        }
    }

    #[test]
    fn the_length_is_sealed() {
        let memory = memory(8192);
        assert!(ftruncate(&memory.fd, 4096).is_err());
    }
}
