//! Video memory in partitions, one for each vGPU.
//!
//! Partitions are mapped through the sysfs file of the adapter's BAR 0, which contains no
//! registers, so the file gives access to video memory only. Each vGPU gets its own open file
//! description with a lock on the partition. The kernel drops the lock when the last copy and the
//! last mapping of the file are gone, in any process. A VM that outlives its vGPU keeps the lock,
//! and its memory is not allocated to other vGPUs until the VM ends. The exception is a vGPU that
//! restarts after its worker died: it gets its previous partition back, which only its own VM has
//! mapped.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ipc::mem::Mapping;
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;
use nix::fcntl::{FcntlArg, fcntl};

/// A range of video memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Range {
    pub(super) fn overlaps(self, other: Self) -> bool {
        self.offset < other.offset + other.len && other.offset < self.offset + self.len
    }
}

/// Error of allocating or mapping a partition.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// No contiguous range of this length is free.
    #[error("No {} MiB of contiguous video memory are free", .wanted / MIB)]
    Full {
        /// Requested bytes.
        wanted: u64,
        /// Bytes that VMs of removed vGPUs still have mapped.
        outlived: u64,
    },
    /// A system call failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Video memory of an adapter.
#[derive(Debug)]
pub struct Memory {
    path: PathBuf,
    len: u64,
    allocations: Mutex<Allocations>,
}

/// Allocated and reserved partitions.
#[derive(Debug, Default)]
struct Allocations {
    /// Partitions in use.
    in_use: Vec<Entry>,
    /// Partitions of vGPUs whose workers ended, reserved for a restart. No other vGPU has used them
    /// since.
    reserved: Vec<Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    vgpu: VgpuId,
    range: Range,
    /// Whether the partition is reserved for the vGPU after its worker ends.
    reserve_on_free: bool,
}

impl Memory {
    /// Opens the first `len` bytes of the BAR 0 of the adapter whose sysfs folder is `device`.
    pub fn open(device: &Path, len: u64) -> Result<Arc<Self>, MemoryError> {
        // Write-combined stores are many times faster, and nothing here depends on their order.
        let combined = device.join("resource0_wc");
        let path = if combined.exists() { combined } else { device.join("resource0") };
        let memory = Arc::new(Self { path, len, allocations: Mutex::default() });
        // Detect a kernel that refuses the mapping now instead of when a vGPU starts.
        memory.map(Range { offset: 0, len: len.min(MIB) })?;
        Ok(memory)
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns false: an adapter without memory is refused.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the path of the BAR's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Allocates a partition and fills it with zeros. Its offset is a multiple of its length, which
    /// limits fragmentation between partitions with lengths that are powers of two. A vGPU whose
    /// worker died gets its previous partition.
    pub fn take(self: &Arc<Self>, vgpu: VgpuId, len: u64) -> Result<Partition, MemoryError> {
        let mut allocations = self.allocations();
        let probe = self.file()?;
        let previous = |entry: &&Entry| entry.vgpu == vgpu && entry.range.len == len;
        let reserved = allocations.reserved.iter().find(previous).map(|entry| entry.range);
        let places = (0..self.len / len.max(1)).map(|n| Range { offset: n * len, len });
        let mut found = None;
        for range in reserved.into_iter().chain(places).filter(|_| len > 0) {
            let in_use = allocations.in_use.iter().any(|other| range.overlaps(other.range));
            if !in_use && (Some(range) == reserved || !self.is_locked(&probe, range)?) {
                found = Some(range);
                break;
            }
        }
        let Some(range) = found else {
            return Err(MemoryError::Full {
                wanted: len,
                outlived: self.outlived(&allocations, &probe)?,
            });
        };
        self.clear(range)?;
        let file = self.file()?;
        let lock = flock(libc::F_RDLCK, range);
        let locked = fcntl(file.as_fd(), FcntlArg::F_OFD_SETLK(&lock));
        locked.map_err(|errno| self.error(errno.into()))?;
        allocations.reserved.retain(|entry| entry.vgpu != vgpu && !entry.range.overlaps(range));
        allocations.in_use.push(Entry { vgpu, range, reserve_on_free: true });
        Ok(Partition { range, file, memory: Arc::clone(self) })
    }

    /// Ends the reservation of a removed vGPU. Its partition can be allocated once no VM has it
    /// mapped.
    pub fn forget(&self, vgpu: VgpuId) {
        let mut allocations = self.allocations();
        allocations.reserved.retain(|entry| entry.vgpu != vgpu);
        for entry in allocations.in_use.iter_mut().filter(|entry| entry.vgpu == vgpu) {
            entry.reserve_on_free = false;
        }
    }

    /// Fills a range outside all partitions with zeros.
    pub fn clear_unallocated(&self, range: Range) -> Result<(), MemoryError> {
        self.clear(range)
    }

    fn allocations(&self) -> MutexGuard<'_, Allocations> {
        self.allocations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of bytes that are not in use but that a VM still has mapped.
    fn outlived(&self, allocations: &Allocations, probe: &File) -> Result<u64, MemoryError> {
        let mut bytes = 0;
        let mut places = (0..self.len / MIB).map(|n| Range { offset: n * MIB, len: MIB });
        places.try_for_each(|range| {
            let in_use = allocations.in_use.iter().any(|other| range.overlaps(other.range));
            if !in_use && self.is_locked(probe, range)? {
                bytes += range.len;
            }
            Ok(())
        })?;
        Ok(bytes)
    }

    /// Returns whether a VM of a removed vGPU still has memory in the range mapped.
    fn is_locked(&self, probe: &File, range: Range) -> Result<bool, MemoryError> {
        let mut lock = flock(libc::F_WRLCK, range);
        let asked = fcntl(probe.as_fd(), FcntlArg::F_OFD_GETLK(&mut lock));
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

    /// Opens the file again. Locks of other open file descriptions conflict with locks of this one.
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

/// One vGPU's partition, freed when dropped.
#[derive(Debug)]
pub struct Partition {
    range: Range,
    file: File,
    memory: Arc<Memory>,
}

impl Partition {
    /// Returns the range.
    pub fn range(&self) -> Range {
        self.range
    }

    /// Returns a duplicate of the locked file.
    pub fn file(&self) -> io::Result<OwnedFd> {
        self.file.try_clone().map(OwnedFd::from)
    }

    /// Maps the partition.
    pub fn map(&self) -> Result<Arc<Mapping>, MemoryError> {
        self.memory.map(self.range)
    }

    /// Fills the partition with zeros.
    pub fn clear(&self) -> Result<(), MemoryError> {
        self.memory.clear(self.range)
    }
}

impl Drop for Partition {
    fn drop(&mut self) {
        // Clear now, because a VM may keep its mapping after the vGPU is gone.
        if let Err(error) = self.clear() {
            log::warn!(
                "Cannot clear freed video memory (it is cleared before its next use): {error}"
            );
        }
        let mut allocations = self.memory.allocations();
        if let Some(place) = allocations.in_use.iter().position(|entry| entry.range == self.range) {
            let entry = allocations.in_use.remove(place);
            if entry.reserve_on_free {
                allocations.reserved.retain(|other| other.vgpu != entry.vgpu);
                allocations.reserved.push(entry);
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
    fn partitions_are_cleared_when_allocated_and_freed() {
        let (folder, memory) = adapter(16 * MIB);
        let file = OpenOptions::new().read(true).write(true).open(folder.path().join("resource0"));
        let file = file.unwrap();
        file.write_all_at(&[7; 64], 8 * MIB).unwrap();
        let [a, b] = [1, 2].map(|n| memory.take(id(n), 8 * MIB).unwrap());
        assert_eq!((a.range().offset, b.range().offset), (0, 8 * MIB));
        let mut bytes = [1; 64];
        file.read_exact_at(&mut bytes, 8 * MIB).unwrap();
        assert_eq!(bytes, [0; 64], "cleared on allocation");
        let error = memory.take(id(3), 4 * MIB).unwrap_err();
        assert_eq!(error.to_string(), "No 4 MiB of contiguous video memory are free");
        assert!(matches!(error, MemoryError::Full { outlived: 0, .. }), "{error:?}");
        file.write_all_at(&[7; 64], 0).unwrap();
        drop(a);
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [0; 64], "cleared on free");
        assert_eq!(memory.take(id(3), 4 * MIB).unwrap().range().offset, 0);
    }

    #[test]
    fn a_mapped_partition_is_not_allocated_again() {
        let (folder, memory) = adapter(16 * MIB);
        let a = memory.take(id(1), 8 * MIB).unwrap();
        let handed_out = a.file().unwrap();
        let mapping = Mapping::new(handed_out.as_fd(), 0, 4096, true).unwrap();
        drop((a, handed_out));
        // A mapping alone keeps the lock, and a new process sees the lock too.
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
    fn a_vgpu_gets_its_partition_back_after_its_worker_died() {
        let (_folder, memory) = adapter(16 * MIB);
        let part = memory.take(id(1), 8 * MIB).unwrap();
        let vm = Mapping::new(part.file().unwrap().as_fd(), 0, 4096, true).unwrap();
        let neighbour = memory.take(id(2), 8 * MIB).unwrap();
        drop(part);
        assert!(memory.take(id(3), 8 * MIB).is_err(), "reserved for the first vGPU");
        vm.write(0, &[7]).unwrap();
        let again = memory.take(id(1), 8 * MIB).unwrap();
        assert_eq!(again.range().offset, 0);
        let mut byte = [1];
        vm.read(0, &mut byte).unwrap();
        assert_eq!(byte, [0], "cleared like every new partition");
        // A vGPU that was stopped may return with another VM.
        memory.forget(id(1));
        drop(again);
        assert!(memory.take(id(1), 8 * MIB).is_err());
        drop(vm);
        let again = memory.take(id(1), 8 * MIB).unwrap();
        drop(again);
        memory.forget(id(1));
        // A partition that another vGPU has used since is no longer reserved.
        drop(memory.take(id(1), 8 * MIB).unwrap());
        let other = memory.take(id(3), 4 * MIB).unwrap();
        let vm = Mapping::new(other.file().unwrap().as_fd(), 0, 4096, true).unwrap();
        drop(other);
        assert!(memory.take(id(1), 8 * MIB).is_err());
        drop((vm, neighbour));
    }

    #[test]
    fn an_unusable_file_is_named_in_the_error() {
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
            for (power, take, vgpu) in steps {
                if !take && !held.is_empty() {
                    held.remove(power as usize % held.len());
                } else if let Ok(partition) = memory.take(id(vgpu), MIB << power) {
                    let range = partition.range();
                    prop_assert!(range.offset + range.len <= 16 * MIB);
                    prop_assert!(held.iter().all(|other| !other.range().overlaps(range)));
                    held.push(partition);
                }
            }
        }
    }
}
