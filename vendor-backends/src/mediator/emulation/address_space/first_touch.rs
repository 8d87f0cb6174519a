//! Host memory that the engine allocates in imported files.
//!
//! A file of guest memory can be sparse. The first access to a page allocates it, and the kernel
//! charges it to the process that made the access. A client could so have this process allocate
//! memory without end. The engine therefore remembers which pages it has accessed, and looks at the
//! file's size on disk before and after the first access to others: the difference counts against
//! the vGPU's budget, while the vGPU exists. Accesses to known pages cost a look at a bitmap.
//!
//! A client can take known pages away again. The bitmaps are cleared when they contain more pages
//! than the files do.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
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
    /// Bytes that the engine may allocate before a [`FirstTouch`] counts them.
    room: Cell<u64>,
}

/// The engine has allocated more than it may.
#[derive(Debug, PartialEq, Eq)]
pub struct BeyondBudget;

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
            room: Cell::new(FREE_BYTES),
        })
    }

    /// Returns the bytes of memory that the file has.
    fn bytes(&self) -> u64 {
        fstat(&self.fd).map_or(0, |stat| stat.st_blocks.cast_unsigned() * BLOCK_BYTES)
    }

    /// Prepares an access to `len` bytes of the import at `offset`, which are in the mapping. Fails
    /// after the page that exceeds the budget.
    #[inline]
    pub fn touch(&self, mapping: &Mapping, offset: u64, len: u64) -> Result<(), BeyondBudget> {
        let (first, last) = (offset / PAGE_SIZE, (offset + len.max(1) - 1) / PAGE_SIZE);
        let known = self.known.borrow();
        let all_known = (first / 64..=last / 64).all(|word| {
            let mask = mask(word, first, last);
            known.get(word as usize).is_none_or(|bits| bits & mask == mask)
        });
        drop(known);
        if all_known { Ok(()) } else { self.touch_first(mapping, first, last) }
    }

    /// Accesses pages of which some are new.
    #[cold]
    fn touch_first(&self, mapping: &Mapping, first: u64, last: u64) -> Result<(), BeyondBudget> {
        let before = self.bytes();
        let room = self.room.get().saturating_sub(self.allocated.get());
        let mut touched = 0;
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
                touched += PAGE_SIZE;
                // Without a look at the file's size while the room is sufficient in any case.
                if touched > room && self.bytes().saturating_sub(before) > room {
                    break;
                }
            }
        }
        let grown = self.bytes().saturating_sub(before);
        self.allocated.set(self.allocated.get() + grown);
        if grown > room { Err(BeyondBudget) } else { Ok(()) }
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

/// Bytes that the engine has allocated for one vGPU, while the vGPU exists.
///
/// Of a file that is imported now, what the file has lost since is subtracted. The client may have
/// kept a file that is withdrawn, so everything that the engine allocated in such a file counts.
#[derive(Debug, Default)]
pub(super) struct FirstTouch {
    /// Bytes by device and inode of the file. Has an entry for each page of the budget at most.
    by_file: BTreeMap<(u64, u64), u64>,
    /// Sum of `by_file`.
    allocated: u64,
    /// Bytes that others have allocated in the files that are imported now.
    of_others: u64,
}

impl FirstTouch {
    /// Counts what the engine has allocated since the last call. Returns the number of bytes
    /// allocated so far if it exceeds the budget: [`FREE_BYTES`], and as much as others have
    /// allocated in the files that are imported now.
    pub fn count<'a>(
        &mut self,
        files: impl Iterator<Item = &'a ImportedFile> + Clone,
    ) -> Option<u64> {
        let before = self.allocated;
        files.clone().for_each(|file| self.add(file));
        if self.allocated == before {
            return None;
        }
        self.update_room(files);
        (self.allocated > self.budget()).then_some(self.allocated)
    }

    fn budget(&self) -> u64 {
        self.of_others.saturating_add(FREE_BYTES)
    }

    /// Returns the bytes that the engine may still allocate.
    fn room(&self) -> u64 {
        self.budget().saturating_sub(self.allocated)
    }

    /// Adapts the room of all files to what they have now.
    pub fn update_room<'a>(&mut self, files: impl Iterator<Item = &'a ImportedFile> + Clone) {
        self.of_others = 0;
        for file in distinct(files.clone()) {
            let bytes = file.bytes();
            self.of_others += bytes.saturating_sub(self.limit(file.id, bytes));
        }
        files.for_each(|file| self.set_room(file));
    }

    /// Sets the room of a file.
    pub fn set_room(&self, file: &ImportedFile) {
        file.room.set(self.room());
    }

    /// Counts what the engine has allocated in a file, such as one that is withdrawn.
    pub fn add(&mut self, file: &ImportedFile) {
        let new = file.allocated.take();
        if new > 0 {
            *self.by_file.entry(file.id).or_default() += new;
            self.allocated += new;
        }
    }

    /// Limits the count of a file to what the file has. Returns the count.
    fn limit(&mut self, id: (u64, u64), bytes: u64) -> u64 {
        let Some(counted) = self.by_file.get_mut(&id) else { return 0 };
        let lost = counted.saturating_sub(bytes);
        *counted -= lost;
        self.allocated -= lost;
        let counted = *counted;
        if counted == 0 {
            self.by_file.remove(&id);
        }
        counted
    }
}

/// Clears the bitmaps if the client has taken known pages away.
pub(super) fn forget_lost_pages<'a>(files: impl Iterator<Item = &'a ImportedFile> + Clone) {
    let known: u64 = files.clone().map(|file| file.known_bytes.get()).sum();
    if known > SLACK_BYTES && known > total_bytes(files.clone()) + SLACK_BYTES {
        files.for_each(ImportedFile::forget);
    }
}

/// Returns the bytes of memory that all files have.
fn total_bytes<'a>(files: impl Iterator<Item = &'a ImportedFile>) -> u64 {
    distinct(files).map(ImportedFile::bytes).sum()
}

/// Returns each file once. A file may be imported in several pieces.
fn distinct<'a>(
    files: impl Iterator<Item = &'a ImportedFile>,
) -> impl Iterator<Item = &'a ImportedFile> {
    let mut seen = Vec::new();
    files.filter(move |file| {
        let new = !seen.contains(&file.id);
        seen.push(file.id);
        new
    })
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

    /// The engine stops at the page that exceeds the budget. Large pages can be 2 MiB.
    fn is_beyond(allocated: Option<u64>) -> bool {
        allocated.is_some_and(|it| (FREE_BYTES + 1..=FREE_BYTES + 4 * MIB).contains(&it))
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
        file.touch(&mapping, 0, 8 * MIB).unwrap();
        assert_eq!(file.allocated.get(), 0, "the VM has allocated them");
        file.touch(&mapping, 8 * MIB + 5, 3).unwrap();
        assert!(file.allocated.get() >= PAGE_SIZE);
        let before = file.allocated.get();
        file.touch(&mapping, 8 * MIB, PAGE_SIZE).unwrap();
        assert_eq!(file.allocated.get(), before, "the page is known");
        assert_eq!(FirstTouch::default().count([&file].into_iter()), None);
    }

    #[test]
    fn the_budget_ends_and_the_vms_own_memory_extends_it() {
        let (fd, mapping, file) = sparse(600 * MIB);
        let mut budget = FirstTouch::default();
        file.touch(&mapping, 0, FREE_BYTES).unwrap();
        assert_eq!(budget.count([&file].into_iter()), None);
        assert_eq!(file.touch(&mapping, FREE_BYTES, MIB), Err(BeyondBudget));
        assert!(is_beyond(budget.count([&file].into_iter())));
        let end = (FREE_BYTES + MIB).cast_signed();
        fallocate(&fd, FallocateFlags::empty(), end, 8 << 20).unwrap();
        budget.update_room([&file].into_iter());
        file.touch(&mapping, FREE_BYTES + 9 * MIB, MIB).unwrap();
        assert_eq!(budget.count([&file].into_iter()), None);
    }

    #[test]
    fn the_budget_does_not_begin_anew_with_another_file() {
        let mut budget = FirstTouch::default();
        let mut kept = Vec::new();
        for _ in 0..8 {
            let (fd, mapping, file) = sparse(32 * MIB);
            file.touch(&mapping, 0, 32 * MIB).unwrap();
            assert_eq!(budget.count([&file].into_iter()), None);
            kept.push(fd);
        }
        // Withdrawn before a count.
        let (_kept, mapping, file) = sparse(32 * MIB);
        budget.set_room(&file);
        assert_eq!(file.touch(&mapping, 0, 32 * MIB), Err(BeyondBudget));
        budget.add(&file);
        let (fd, mapping, file) = sparse(600 * MIB);
        budget.set_room(&file);
        assert_eq!(file.touch(&mapping, 0, MIB), Err(BeyondBudget));
        assert!(is_beyond(budget.count([&file].into_iter())));
        // What the VM itself uses now extends the budget.
        fallocate(&fd, FallocateFlags::empty(), 1 << 20, 8 << 20).unwrap();
        budget.update_room([&file].into_iter());
        file.touch(&mapping, 9 * MIB, MIB).unwrap();
        assert_eq!(budget.count([&file].into_iter()), None);
        // So does what a file has lost while it was imported, and no other.
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&fd, punch, 0, 600 << 20).unwrap();
        budget.update_room([&file].into_iter());
        assert_eq!(file.touch(&mapping, 10 * MIB, MIB), Err(BeyondBudget));
        assert!(is_beyond(budget.count([&file].into_iter())));
    }

    #[test]
    fn a_file_that_is_imported_again_counts_once() {
        let mut budget = FirstTouch::default();
        let (fd, mapping, file) = sparse(600 * MIB);
        file.touch(&mapping, 0, 200 * MIB).unwrap();
        assert_eq!(budget.count([&file].into_iter()), None);
        drop(file);
        let again = ImportedFile::new(fd, 600 * MIB).unwrap();
        again.touch(&mapping, 0, 256 * MIB).unwrap();
        assert_eq!(budget.count([&again].into_iter()), None);
        assert_eq!(again.touch(&mapping, 256 * MIB, MIB), Err(BeyondBudget));
        assert!(is_beyond(budget.count([&again].into_iter())));
    }

    #[test]
    fn pages_that_are_taken_away_count_again() {
        let (fd, mapping, file) = sparse(64 * MIB);
        fallocate(&fd, FallocateFlags::empty(), 0, 64 << 20).unwrap();
        file.touch(&mapping, 0, 64 * MIB).unwrap();
        forget_lost_pages([&file].into_iter());
        assert_eq!(file.known_bytes.get(), 64 * MIB);
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&fd, punch, 0, 64 << 20).unwrap();
        forget_lost_pages([&file].into_iter());
        file.touch(&mapping, 0, 32 * MIB).unwrap();
        assert_eq!(file.allocated.get(), 32 * MIB);
    }
}
