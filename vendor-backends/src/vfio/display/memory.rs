//! Video memory, cut into one partition for each vGPU.
//!
//! It is reached through the file that the kernel has for the adapter's BAR 0, which has no registers behind it: whoever
//! holds it can map video memory and do nothing else. Each vGPU gets an open file of its own with a lock on its
//! partition. The lock ends when the last copy and the last mapping of that file are gone, wherever they are: a VM that
//! outlived its vGPU still holds it, and its memory is not given to anybody else before it is gone too.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

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
    fn overlaps(self, other: Self) -> bool {
        self.offset < other.offset + other.len && other.offset < self.offset + self.len
    }
}

/// Why there is no partition.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// Nowhere is so much of it together.
    #[error(
        "no {} MiB of video memory are free in one piece: stop a vGPU, or a VM that still has the memory of one \
         that was stopped",
        .0 / MIB
    )]
    Full(u64),
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
    held: Mutex<Vec<Range>>,
}

impl Memory {
    /// That of an adapter, whose folder in sysfs is named: the first `len` bytes of its BAR 0.
    pub fn open(device: &Path, len: u64) -> Result<Arc<Self>, MemoryError> {
        // Stores that may be combined are many times faster, and nothing here depends on their order.
        let combined = device.join("resource0_wc");
        let path = if combined.exists() { combined } else { device.join("resource0") };
        let memory = Arc::new(Self { path, len, held: Mutex::default() });
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
    /// leave as few gaps as can be.
    pub fn take(self: &Arc<Self>, len: u64) -> Result<Partition, MemoryError> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let looker = self.file()?;
        let places = (0..self.len / len.max(1)).map(|n| Range { offset: n * len, len });
        for range in
            places.filter(|range| len > 0 && !held.iter().any(|other| range.overlaps(*other)))
        {
            if self.is_locked(&looker, range)? {
                continue;
            }
            self.clear(range)?;
            let file = self.file()?;
            let lock = flock(libc::F_RDLCK, range);
            let locked = fcntl(file.as_fd(), FcntlArg::F_OFD_SETLK(&lock));
            locked.map_err(|errno| self.error(errno.into()))?;
            held.push(range);
            return Ok(Partition { range, file, memory: Arc::clone(self) });
        }
        Err(MemoryError::Full(len))
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
        let mut held = self.memory.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.retain(|range| *range != self.range);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;

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
        let (a, b) = (memory.take(8 * MIB).unwrap(), memory.take(8 * MIB).unwrap());
        assert_eq!((a.range().offset, b.range().offset), (0, 8 * MIB));
        let mut bytes = [1; 64];
        file.read_exact_at(&mut bytes, 8 * MIB).unwrap();
        assert_eq!(bytes, [0; 64], "what was there is gone");
        let error = memory.take(4 * MIB).unwrap_err().to_string();
        assert!(error.starts_with("no 4 MiB of video memory are free in one piece"), "{error}");
        file.write_all_at(&[7; 64], 0).unwrap();
        drop(a);
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [0; 64], "and what it drew goes with it");
        assert_eq!(memory.take(4 * MIB).unwrap().range().offset, 0);
    }

    #[test]
    fn who_still_has_a_partition_keeps_it() {
        let (folder, memory) = adapter(16 * MIB);
        let a = memory.take(8 * MIB).unwrap();
        let handed_out = a.file().unwrap();
        let mapping = Mapping::new(handed_out.as_fd(), 0, 4096, true).unwrap();
        drop((a, handed_out));
        // A mapping is enough, and it is the kernel that knows: not we, who may be gone as well.
        let again = Memory::open(folder.path(), 16 * MIB).unwrap();
        for memory in [&memory, &again] {
            let b = memory.take(8 * MIB).unwrap();
            assert_eq!(b.range().offset, 8 * MIB);
            assert!(memory.take(4 * MIB).is_err());
        }
        drop(mapping);
        assert_eq!(memory.take(8 * MIB).unwrap().range().offset, 0);
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
        fn partitions_never_overlap(steps in prop::collection::vec((0..5_u32, any::<bool>()), 0..40)) {
            let (_folder, memory) = adapter(16 * MIB);
            let mut held: Vec<Partition> = Vec::new();
            for (power, take) in steps {
                if !take && !held.is_empty() {
                    held.remove(power as usize % held.len());
                } else if let Ok(partition) = memory.take(MIB << power) {
                    let range = partition.range();
                    prop_assert!(range.offset + range.len <= 16 * MIB);
                    prop_assert!(held.iter().all(|other| !other.range().overlaps(range)));
                    held.push(partition);
                }
            }
        }
    }
}
