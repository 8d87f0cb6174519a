//! Video memory, cut into one partition for each vGPU.
//!
//! It is reached through the file that the kernel has for the adapter's BAR 0, which has no registers behind it: whoever
//! holds it can map video memory and do nothing else. Each vGPU gets an open file of its own with a lock on its
//! partition. The lock ends when the last copy and the last mapping of that file are gone, wherever they are: a VM that
//! outlived its vGPU still holds it, and its memory is not given to anybody else before it is gone too. The one exception
//! is the same vGPU, whose worker died and is started again: what it gets is what its VM has, who is a guest of no other.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;
use nix::fcntl::{FcntlArg, fcntl};

use crate::mem::Mapping;

/// A range of video memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// From where.
    pub offset: u64,
    /// How long.
    pub len: u64,
}

impl Range {
    pub(super) fn overlaps(self, other: Self) -> bool {
        self.offset < other.offset + other.len && other.offset < self.offset + self.len
    }
}

/// Why there is no partition.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// Nowhere is so much of it together.
    #[error("no {} MiB of video memory are free in one piece", .wanted / MIB)]
    Full {
        /// Bytes that were asked for.
        wanted: u64,
        /// Bytes that VMs still have whose vGPUs are gone.
        outlived: u64,
    },
    /// The kernel refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// An adapter's video memory.
#[derive(Debug)]
pub struct Memory {
    path: PathBuf,
    len: u64,
    book: Mutex<Book>,
}

/// Who has which partition.
#[derive(Debug, Default)]
struct Book {
    /// Given out.
    held: Vec<Entry>,
    /// Those of vGPUs whose workers are gone and may come back. Nobody else has had any of it since.
    left: Vec<Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    owner: VgpuId,
    range: Range,
    /// Whether it is still its owner's when its worker is gone.
    kept: bool,
}

impl Memory {
    /// That of an adapter, whose folder in sysfs is named: the first `len` bytes of its BAR 0.
    pub fn open(device: &Path, len: u64) -> Result<Arc<Self>, MemoryError> {
        // Stores that may be combined are many times faster, and nothing here depends on their order.
        let combined = device.join("resource0_wc");
        let path = if combined.exists() { combined } else { device.join("resource0") };
        let memory = Arc::new(Self { path, len, book: Mutex::default() });
        // Whether the kernel lets it be mapped is better known now than when a vGPU starts.
        memory.map(Range { offset: 0, len: len.min(MIB) })?;
        Ok(memory)
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never: an adapter without memory is refused.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The file that it is reached through.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes a partition, filled with zeros. It begins at a multiple of its length, so that partitions of powers of two
    /// leave as few gaps as can be. What a vGPU had when its worker died is its own again.
    pub fn take(self: &Arc<Self>, owner: VgpuId, len: u64) -> Result<Partition, MemoryError> {
        let mut book = self.book();
        let looker = self.file()?;
        let left = |entry: &&Entry| entry.owner == owner && entry.range.len == len;
        let own = book.left.iter().find(left).map(|entry| entry.range);
        let places = (0..self.len / len.max(1)).map(|n| Range { offset: n * len, len });
        let mut found = None;
        for range in own.into_iter().chain(places).filter(|_| len > 0) {
            let given_out = book.held.iter().any(|other| range.overlaps(other.range));
            if !given_out && (Some(range) == own || !self.is_locked(&looker, range)?) {
                found = Some(range);
                break;
            }
        }
        let Some(range) = found else {
            return Err(MemoryError::Full {
                wanted: len,
                outlived: self.outlived(&book, &looker)?,
            });
        };
        self.clear(range)?;
        let file = self.file()?;
        let lock = flock(libc::F_RDLCK, range);
        let locked = fcntl(file.as_fd(), FcntlArg::F_OFD_SETLK(&lock));
        locked.map_err(|errno| self.error(errno.into()))?;
        book.left.retain(|entry| entry.owner != owner && !entry.range.overlaps(range));
        book.held.push(Entry { owner, range, kept: true });
        Ok(Partition { range, file, memory: Arc::clone(self) })
    }

    /// A vGPU is gone for good: what it had is anybody's as soon as no VM has it.
    pub fn forget(&self, owner: VgpuId) {
        let mut book = self.book();
        book.left.retain(|entry| entry.owner != owner);
        for entry in book.held.iter_mut().filter(|entry| entry.owner == owner) {
            entry.kept = false;
        }
    }

    /// Makes a range zeros that is no part of any partition.
    pub fn blacken(&self, range: Range) -> Result<(), MemoryError> {
        self.clear(range)
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are not given out, and that a VM still has.
    fn outlived(&self, book: &Book, looker: &File) -> Result<u64, MemoryError> {
        let mut bytes = 0;
        let mut places = (0..self.len / MIB).map(|n| Range { offset: n * MIB, len: MIB });
        places.try_for_each(|range| {
            let given_out = book.held.iter().any(|other| range.overlaps(other.range));
            if !given_out && self.is_locked(looker, range)? {
                bytes += range.len;
            }
            Ok(())
        })?;
        Ok(bytes)
    }

    /// Whether somebody still has the memory of a vGPU that is gone.
    fn is_locked(&self, looker: &File, range: Range) -> Result<bool, MemoryError> {
        let mut lock = flock(libc::F_WRLCK, range);
        let asked = fcntl(looker.as_fd(), FcntlArg::F_OFD_GETLK(&mut lock));
        asked.map_err(|errno| self.error(errno.into()))?;
        Ok(i32::from(lock.l_type) != libc::F_UNLCK)
    }

    fn clear(&self, range: Range) -> Result<(), MemoryError> {
        static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];
        let mapping = self.map(range)?;
        for at in (0..range.len).step_by(ZEROS.len()) {
            let part = (range.len - at).min(ZEROS.len() as u64) as usize;
            if mapping.write(at, &ZEROS[..part]).is_none() || mapping.poisoned() {
                return Err(self.error(io::ErrorKind::UnexpectedEof.into()));
            }
        }
        Ok(())
    }

    fn map(&self, range: Range) -> Result<Arc<Mapping>, MemoryError> {
        let file = self.file()?;
        Mapping::new(file.as_fd(), range.offset, range.len, true).map_err(|error| self.error(error))
    }

    /// A new open file: locks of others show on it.
    fn file(&self) -> Result<File, MemoryError> {
        let opened = OpenOptions::new().read(true).write(true).open(&self.path);
        opened.map_err(|error| self.error(error))
    }

    fn error(&self, source: io::Error) -> MemoryError {
        MemoryError::Io { path: self.path.clone(), source }
    }
}

fn flock(kind: i32, range: Range) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: range.offset.cast_signed(),
        l_len: range.len.cast_signed(),
        l_pid: 0,
    }
}

/// One vGPU's part of it, until it is dropped.
#[derive(Debug)]
pub struct Partition {
    range: Range,
    file: File,
    memory: Arc<Memory>,
}

impl Partition {
    /// Where it is.
    pub fn range(&self) -> Range {
        self.range
    }

    /// The file to hand out.
    pub fn file(&self) -> io::Result<OwnedFd> {
        self.file.try_clone().map(OwnedFd::from)
    }

    /// It, mapped into this process.
    pub fn map(&self) -> Result<Arc<Mapping>, MemoryError> {
        self.memory.map(self.range)
    }

    /// Fills it with zeros.
    pub fn clear(&self) -> Result<(), MemoryError> {
        self.memory.clear(self.range)
    }
}

impl Drop for Partition {
    fn drop(&mut self) {
        // What was drawn is not to be seen any longer than its vGPU is there, whoever still has a mapping.
        if let Err(error) = self.clear() {
            log::warn!("Video memory is cleared only for the next vGPU: {error}");
        }
        let mut book = self.memory.book();
        if let Some(place) = book.held.iter().position(|entry| entry.range == self.range) {
            let entry = book.held.remove(place);
            if entry.kept {
                book.left.retain(|other| other.owner != entry.owner);
                book.left.push(entry);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;

    fn id(n: u128) -> VgpuId {
        VgpuId(uuid::Uuid::from_u128(n))
    }

    fn adapter(len: u64) -> (TempDir, Arc<Memory>) {
        let folder = tempfile::tempdir().unwrap();
        File::create(folder.path().join("resource0")).unwrap().set_len(len).unwrap();
        let memory = Memory::open(folder.path(), len).unwrap();
        (folder, memory)
    }

    #[test]
    fn partitions_are_clear_and_given_back() {
        let (folder, memory) = adapter(16 * MIB);
        let file = OpenOptions::new().read(true).write(true).open(folder.path().join("resource0"));
        let file = file.unwrap();
        file.write_all_at(&[7; 64], 8 * MIB).unwrap();
        let [a, b] = [1, 2].map(|n| memory.take(id(n), 8 * MIB).unwrap());
        assert_eq!((a.range().offset, b.range().offset), (0, 8 * MIB));
        let mut bytes = [1; 64];
        file.read_exact_at(&mut bytes, 8 * MIB).unwrap();
        assert_eq!(bytes, [0; 64], "what was there is gone");
        let error = memory.take(id(3), 4 * MIB).unwrap_err();
        assert_eq!(error.to_string(), "no 4 MiB of video memory are free in one piece");
        assert!(matches!(error, MemoryError::Full { outlived: 0, .. }), "{error:?}");
        file.write_all_at(&[7; 64], 0).unwrap();
        drop(a);
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [0; 64], "and what it drew goes with it");
        assert_eq!(memory.take(id(3), 4 * MIB).unwrap().range().offset, 0);
    }

    #[test]
    fn who_still_has_a_partition_keeps_it() {
        let (folder, memory) = adapter(16 * MIB);
        let a = memory.take(id(1), 8 * MIB).unwrap();
        let handed_out = a.file().unwrap();
        let mapping = Mapping::new(handed_out.as_fd(), 0, 4096, true).unwrap();
        drop((a, handed_out));
        // A mapping is enough, and it is the kernel that knows: not we, who may be gone as well.
        let again = Memory::open(folder.path(), 16 * MIB).unwrap();
        for memory in [&memory, &again] {
            let b = memory.take(id(2), 8 * MIB).unwrap();
            assert_eq!(b.range().offset, 8 * MIB);
            let error = memory.take(id(3), 4 * MIB).unwrap_err();
            assert!(matches!(error, MemoryError::Full { outlived, .. } if outlived == 8 * MIB));
        }
        drop(mapping);
        assert_eq!(memory.take(id(4), 8 * MIB).unwrap().range().offset, 0);
    }

    #[test]
    fn a_vgpu_whose_worker_died_gets_what_its_vm_still_has() {
        let (_folder, memory) = adapter(16 * MIB);
        let part = memory.take(id(1), 8 * MIB).unwrap();
        let vm = Mapping::new(part.file().unwrap().as_fd(), 0, 4096, true).unwrap();
        let neighbour = memory.take(id(2), 8 * MIB).unwrap();
        drop(part);
        assert!(memory.take(id(3), 8 * MIB).is_err(), "nobody else does");
        vm.write(0, &[7]).unwrap();
        let again = memory.take(id(1), 8 * MIB).unwrap();
        assert_eq!(again.range().offset, 0);
        let mut byte = [1];
        vm.read(0, &mut byte).unwrap();
        assert_eq!(byte, [0], "clear, like all that is new");
        // One that is stopped is a stranger when it is started again: another VM may come with it.
        memory.forget(id(1));
        drop(again);
        assert!(memory.take(id(1), 8 * MIB).is_err());
        drop(vm);
        let again = memory.take(id(1), 8 * MIB).unwrap();
        drop(again);
        memory.forget(id(1));
        // What somebody else has had since is no more its own, whoever has it now.
        drop(memory.take(id(1), 8 * MIB).unwrap());
        let other = memory.take(id(3), 4 * MIB).unwrap();
        let vm = Mapping::new(other.file().unwrap().as_fd(), 0, 4096, true).unwrap();
        drop(other);
        assert!(memory.take(id(1), 8 * MIB).is_err());
        drop((vm, neighbour));
    }

    #[test]
    fn memory_that_cannot_be_mapped_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = Memory::open(folder.path(), MIB).unwrap_err().to_string();
        assert!(error.contains("resource0: No such file"), "{error}");
        std::fs::create_dir(folder.path().join("resource0_wc")).unwrap();
        let error = Memory::open(folder.path(), MIB).unwrap_err().to_string();
        assert!(error.contains("resource0_wc: Is a directory"), "{error}");
    }

    proptest! {
        #[test]
        fn partitions_never_overlap(steps in prop::collection::vec((0..5_u32, any::<bool>(), 0..8_u128), 0..40)) {
            let (_folder, memory) = adapter(16 * MIB);
            let mut held: Vec<Partition> = Vec::new();
            for (power, take, owner) in steps {
                if !take && !held.is_empty() {
                    held.remove(power as usize % held.len());
                } else if let Ok(partition) = memory.take(id(owner), MIB << power) {
                    let range = partition.range();
                    prop_assert!(range.offset + range.len <= 16 * MIB);
                    prop_assert!(held.iter().all(|other| !other.range().overlaps(range)));
                    held.push(partition);
                }
            }
        }
    }
}
