//! Guest RAM without a guest: a memfd, scattered like a guest's memory.

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use mdev_core::abi::mailbox::Scatter;
use mdev_core::units::PAGE_SIZE;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use nix::unistd::ftruncate;
use vgpu_guest::GuestError;
use vgpu_guest::platform::GuestPages;
use vgpu_guest::ranges::Ranges;

/// Guest RAM.
#[derive(Clone, Debug)]
pub struct Ram(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: OwnedFd,
    len: u64,
    piece: u64,
    free: Mutex<Ranges>,
}

impl Ram {
    /// Guest-physical address of the start.
    pub const BASE: u64 = 0x10_0000;

    /// Creates RAM of `len` bytes, allocated in pieces of at most `piece` bytes, scattered in
    /// order.
    pub fn new(len: u64, piece: u64) -> anyhow::Result<Self> {
        assert!(piece.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(piece));
        let file = memfd_create(c"guest-ram", MFdFlags::MFD_CLOEXEC)?;
        ftruncate(&file, len.cast_signed())?;
        let free = Mutex::new(Ranges::new(0, len));
        Ok(Self(Arc::new(Inner { file, len, piece, free })))
    }

    /// Returns the memfd.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Allocates zeroed pages.
    pub fn allocate(&self, bytes: u64) -> Result<GuestPages, GuestError> {
        let len = bytes.next_multiple_of(PAGE_SIZE);
        let exhausted = || GuestError::Exhausted { what: "guest RAM", asked: len };
        let mut pieces = Pieces { ram: self.clone(), taken: Vec::new() };
        while pieces.bytes() < len {
            let piece = (len - pieces.bytes()).min(self.0.piece);
            let mut free = self.0.free.lock().unwrap_or_else(PoisonError::into_inner);
            pieces.taken.push((free.take(piece, PAGE_SIZE).ok_or_else(exhausted)?, piece));
        }
        pieces.taken.reverse();
        let mapping = pieces.map(len as usize).map_err(GuestError::os("Mapping guest RAM"))?;
        let ranges = pieces
            .taken
            .iter()
            .map(|&(at, length)| Scatter { address: Self::BASE + at, length })
            .collect();
        let start = mapping.start;
        let owner = Box::new((mapping, pieces));
        // SAFETY: the owner keeps the pages mapped, and the allocator hands out each page once.
        let pages = unsafe { GuestPages::new(start, len as usize, ranges, owner) };
        pages.window().fill(0);
        Ok(pages)
    }
}

/// Pieces of RAM mapped at consecutive addresses; freed when dropped.
#[derive(Debug)]
struct Pieces {
    ram: Ram,
    taken: Vec<(u64, u64)>,
}

impl Pieces {
    fn bytes(&self) -> u64 {
        self.taken.iter().map(|(_, len)| len).sum()
    }

    fn map(&self, len: usize) -> nix::Result<Mapping> {
        let size = NonZeroUsize::new(len).ok_or(nix::errno::Errno::EINVAL)?;
        // SAFETY: a new mapping that only reserves addresses.
        let start =
            unsafe { mmap_anonymous(None, size, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE)? };
        let mapping = Mapping { start: start.cast(), len };
        let mut done = 0;
        for &(at, piece) in &self.taken {
            let target = NonZeroUsize::new(start.as_ptr() as usize + done);
            let size = NonZeroUsize::new(piece as usize).ok_or(nix::errno::Errno::EINVAL)?;
            let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
            // SAFETY: replaces a part of the reservation.
            unsafe { mmap(target, size, access, flags, self.ram.fd(), at.cast_signed())? };
            done += piece as usize;
        }
        Ok(mapping)
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        let mut free = self.ram.0.free.lock().unwrap_or_else(PoisonError::into_inner);
        for &(at, len) in &self.taken {
            free.give(at, len);
        }
    }
}

#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the value only names the mapping and unmaps it once.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by Pieces::map and is unmapped once.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}
