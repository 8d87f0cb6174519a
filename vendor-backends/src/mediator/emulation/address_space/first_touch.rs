//! Host memory that the engine allocates in imported files.
//!
//! A file of guest memory can be sparse. The first access to a page allocates it, and the kernel
//! charges it to the process that made the access. A client could so have this process allocate
//! memory without end. The engine therefore remembers which pages it has accessed, and looks at the
//! file's size on disk before and after the first access to others: the difference counts against
//! the vGPU's budget. Accesses to known pages cost a look at a bitmap.
//!
//! A client can take known pages away again. The bitmaps are cleared when they contain more pages
//! than the files do.

use std::cell::{Cell, RefCell};
use std::hint::black_box;
use std::io;
use std::os::fd::OwnedFd;

use ipc::mem::Mapping;
use mdev_core::units::{MIB, PAGE_SIZE};
use nix::sys::stat::fstat;

/// Bytes that the engine may allocate for a vGPU, in addition to as much as its VM has allocated.
const FREE_BYTES: u64 = 256 * MIB;
/// Pages by which the bitmaps may exceed the files.
const SLACK_BYTES: u64 = 16 * MIB;
/// Unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// File of an import.
#[derive(Debug)]
pub struct ImportedFile {
    fd: OwnedFd,
    /// Device and inode.
    id: (u64, u64),
    /// Bitmap of the import's pages that the engine has accessed.
    known: RefCell<Vec<u64>>,
    known_bytes: Cell<u64>,
    /// Bytes that the engine allocated and that no [`FirstTouch`] has counted yet.
    allocated: Cell<u64>,
}

impl ImportedFile {
    /// Takes the file of an import of `len` bytes.
    pub fn new(fd: OwnedFd, len: u64) -> io::Result<Self> {
        let stat = fstat(&fd)?;
        let words = usize::try_from(len.div_ceil(64 * PAGE_SIZE));
        Ok(Self {
            fd,
            id: (stat.st_dev, stat.st_ino),
            known: RefCell::new(vec![0; words.map_err(|_| io::ErrorKind::InvalidInput)?]),
            known_bytes: Cell::new(0),
            allocated: Cell::new(0),
        })
    }

    /// Returns the bytes of memory that the file has.
    fn bytes(&self) -> u64 {
        fstat(&self.fd).map_or(0, |stat| stat.st_blocks.cast_unsigned() * BLOCK_BYTES)
    }

    /// Prepares an access to `len` bytes of the import at `offset`, which are in the mapping.
    #[inline]
    pub fn touch(&self, mapping: &Mapping, offset: u64, len: u64) {
        let (first, last) = (offset / PAGE_SIZE, (offset + len.max(1) - 1) / PAGE_SIZE);
        let known = self.known.borrow();
        let all_known = (first / 64..=last / 64).all(|word| {
            let mask = mask(word, first, last);
            known.get(word as usize).is_none_or(|bits| bits & mask == mask)
        });
        drop(known);
        if !all_known {
            self.touch_first(mapping, first, last);
        }
    }

    /// Accesses pages of which some are new.
    #[cold]
    fn touch_first(&self, mapping: &Mapping, first: u64, last: u64) {
        let before = self.bytes();
        let mut known = self.known.borrow_mut();
        for page in first..=last {
            let Some(bits) = known.get_mut((page / 64) as usize) else { break };
            let bit = 1 << (page % 64);
            if *bits & bit == 0 {
                *bits |= bit;
                self.known_bytes.set(self.known_bytes.get() + PAGE_SIZE);
                // An access, which must not be optimized away.
                let mut byte = [0];
                let _ = mapping.read(page * PAGE_SIZE, &mut byte);
                black_box(byte);
            }
        }
        let grown = self.bytes().saturating_sub(before);
        self.allocated.set(self.allocated.get() + grown);
    }

    fn forget(&self) {
        let mut known = self.known.borrow_mut();
        // New memory, because clearing would allocate the bitmap of a sparse file.
        let words = known.len();
        *known = vec![0; words];
        self.known_bytes.set(0);
    }
}

/// Returns the bits of pages `first` to `last` in a word of a bitmap.
#[inline]
fn mask(word: u64, first: u64, last: u64) -> u64 {
    let from = first.saturating_sub(word * 64).min(63);
    let to = (last - word * 64).min(63);
    u64::MAX << from & u64::MAX >> (63 - to)
}

/// Bytes that the engine has allocated for one vGPU.
#[derive(Debug, Default)]
pub(super) struct FirstTouch {
    allocated: u64,
}

impl FirstTouch {
    /// Counts what the engine has allocated since the last call. Returns the number of bytes
    /// allocated so far if it exceeds the budget: [`FREE_BYTES`], and as much as others have
    /// allocated in the same files.
    pub fn count<'a>(
        &mut self,
        files: impl Iterator<Item = &'a ImportedFile> + Clone,
    ) -> Option<u64> {
        let new: u64 = files.clone().map(|file| file.allocated.take()).sum();
        if new == 0 {
            return None;
        }
        let total = total_bytes(files);
        self.allocated = (self.allocated + new).min(total);
        (self.allocated > (total - self.allocated).saturating_add(FREE_BYTES))
            .then_some(self.allocated)
    }
}

/// Clears the bitmaps if the client has taken known pages away.
pub(super) fn forget_lost_pages<'a>(files: impl Iterator<Item = &'a ImportedFile> + Clone) {
    let known: u64 = files.clone().map(|file| file.known_bytes.get()).sum();
    if known > SLACK_BYTES && known > total_bytes(files.clone()) + SLACK_BYTES {
        files.for_each(ImportedFile::forget);
    }
}

/// Returns the bytes of memory that all files have. A file may be imported in several pieces.
fn total_bytes<'a>(files: impl Iterator<Item = &'a ImportedFile>) -> u64 {
    let mut seen = Vec::new();
    files
        .filter(|file| {
            let new = !seen.contains(&file.id);
            seen.push(file.id);
            new
        })
        .map(ImportedFile::bytes)
        .sum()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use nix::fcntl::{FallocateFlags, fallocate};
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::unistd::ftruncate;

    use super::*;

    fn sparse(len: u64) -> (OwnedFd, Arc<Mapping>, ImportedFile) {
        let fd = memfd_create(c"sparse", MFdFlags::MFD_CLOEXEC).unwrap();
        ftruncate(&fd, len.cast_signed()).unwrap();
        let mapping = Mapping::new(fd.as_fd(), 0, len, true).unwrap();
        let file = ImportedFile::new(fd.try_clone().unwrap(), len).unwrap();
        (fd, mapping, file)
    }

    #[test]
    fn masks_select_the_pages_of_a_word() {
        assert_eq!(mask(0, 0, 0), 1);
        assert_eq!(mask(0, 3, 4), 0b11000);
        assert_eq!(mask(0, 60, 70), 0xf << 60);
        assert_eq!(mask(1, 60, 70), 0x7f);
        assert_eq!(mask(1, 60, 300), u64::MAX);
    }

    #[test]
    fn only_pages_that_the_engine_allocates_count() {
        let (fd, mapping, file) = sparse(64 * MIB);
        fallocate(&fd, FallocateFlags::empty(), 0, 8 << 20).unwrap();
        file.touch(&mapping, 0, 8 * MIB);
        assert_eq!(file.allocated.get(), 0, "the VM has allocated them");
        file.touch(&mapping, 8 * MIB + 5, 3);
        assert!(file.allocated.get() >= PAGE_SIZE);
        let before = file.allocated.get();
        file.touch(&mapping, 8 * MIB, PAGE_SIZE);
        assert_eq!(file.allocated.get(), before, "the page is known");
        assert_eq!(FirstTouch::default().count([&file].into_iter()), None);
    }

    #[test]
    fn the_budget_ends_and_the_vms_own_memory_extends_it() {
        let (fd, mapping, file) = sparse(600 * MIB);
        let mut budget = FirstTouch::default();
        file.touch(&mapping, 0, FREE_BYTES);
        assert_eq!(budget.count([&file].into_iter()), None);
        file.touch(&mapping, FREE_BYTES, MIB);
        assert_eq!(budget.count([&file].into_iter()), Some(FREE_BYTES + MIB));
        let end = (FREE_BYTES + MIB).cast_signed();
        fallocate(&fd, FallocateFlags::empty(), end, 8 << 20).unwrap();
        file.touch(&mapping, FREE_BYTES + 9 * MIB, MIB);
        assert_eq!(budget.count([&file].into_iter()), None);
    }

    #[test]
    fn pages_that_are_taken_away_count_again() {
        let (fd, mapping, file) = sparse(64 * MIB);
        fallocate(&fd, FallocateFlags::empty(), 0, 64 << 20).unwrap();
        file.touch(&mapping, 0, 64 * MIB);
        forget_lost_pages([&file].into_iter());
        assert_eq!(file.known_bytes.get(), 64 * MIB);
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&fd, punch, 0, 64 << 20).unwrap();
        forget_lost_pages([&file].into_iter());
        file.touch(&mapping, 0, 32 * MIB);
        assert_eq!(file.allocated.get(), 32 * MIB);
    }
}
