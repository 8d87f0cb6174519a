//! Guest memory, from DMA mappings of the client.

mod advice;
mod imports;
mod journal;
mod map;
mod shared;
mod written;

pub use advice::ImportLimits;
pub use journal::{JournaledMap, JournaledMemory, JournaledPart};
use map::{Map, SharedRegion};
pub use shared::SharedGuestMemory;
pub use written::NotRecorded;
use written::WriteLog;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use bitflags::bitflags;
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestRegionCollection};

use crate::gpu::Client;
use crate::ids::GuestPa;
use crate::memory_file::MemoryFile;
use crate::sigbus::Protection;
use crate::units::{PAGE_SIZE, is_aligned};

bitflags! {
    /// Access of the device to a range of guest memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    pub struct DmaAccess: u32 {
        /// Loads.
        const READ = 1 << 0;
        /// Stores.
        const WRITE = 1 << 1;
    }
}

/// Error of a map or unmap.
#[derive(Debug, thiserror::Error)]
pub enum MemError {
    /// The range is empty, not page-aligned, or beyond the address space.
    #[error("Invalid range: {size:#x} bytes at {:#x}", iova.0)]
    BadRange {
        /// Start of the range.
        iova: GuestPa,
        /// Length of the range in bytes.
        size: u64,
    },
    /// The range overlaps an existing mapping.
    #[error("{size:#x} bytes at {:#x} overlap an existing mapping", iova.0)]
    Overlap {
        /// Start of the range.
        iova: GuestPa,
        /// Length of the range in bytes.
        size: u64,
    },
    /// No mapping has exactly this range.
    #[error("No mapping of {size:#x} bytes at {:#x}", iova.0)]
    NotMapped {
        /// Start of the range.
        iova: GuestPa,
        /// Length of the range in bytes.
        size: u64,
    },
    /// Too many mappings.
    #[error("More than {0} mappings")]
    TooMany(usize),
}

/// Maximum number of mappings of a VM.
pub const MAX_MAPS: usize = 4096;

/// Guest memory as the client maps it.
///
/// A mapping with a file is mapped into the worker and can be imported into a GPU client; a mapping
/// without a file is only recorded. An import is made on first use, has the lifetime of the
/// mapping, and is released before the unmap returns. It is of all of the mapping, or of a part
/// where the GPU's driver pins memory ([`PINS`](crate::gpu::GpuCapabilities::PINS)).
#[derive(Debug, Default)]
pub struct GuestMemory {
    maps: BTreeMap<u64, Map>,
    shared: GuestRegionCollection<SharedRegion>,
    /// Size of the imports in bytes.
    imported: u64,
    /// Address of a guest's access to memory without a file.
    missed: Option<u64>,
    /// Number of changes of the mappings and their imports.
    generation: u64,
    /// Record of the device's writes, if there is one.
    log: Option<WriteLog>,
}

/// Part of one mapping.
#[derive(Clone, Copy, Debug)]
struct Segment {
    map: u64,
    offset: u64,
    len: u64,
}

impl GuestMemory {
    /// Adds a mapping. A file that cannot be mapped is not an error: the VM can run, and
    /// [`Self::advice`] reports the cause.
    pub fn map(
        &mut self,
        iova: GuestPa,
        size: u64,
        access: DmaAccess,
        file: Option<(OwnedFd, u64)>,
    ) -> Result<(), MemError> {
        let offset = file.as_ref().map_or(0, |(_, offset)| *offset);
        let (file, failure) = checked(file);
        let last = iova.0.checked_add(size.wrapping_sub(1));
        let aligned = [iova.0, size, offset].iter().all(|value| is_aligned(*value, PAGE_SIZE));
        let Some(last) =
            last.filter(|_| aligned && size != 0 && offset.checked_add(size).is_some())
        else {
            return Err(MemError::BadRange { iova, size });
        };
        let before = self.maps.range(..=last).next_back();
        if before.is_some_and(|(start, map)| iova.0 - start.min(&iova.0) < map.size) {
            return Err(MemError::Overlap { iova, size });
        }
        if self.maps.len() >= MAX_MAPS {
            return Err(MemError::TooMany(MAX_MAPS));
        }
        let imports = BTreeMap::new();
        let mut map = Map { size, access, file: None, imports, failure, truncated: false };
        if let Some((fd, offset)) = file {
            match self.map_file(iova, size, access, fd.as_fd(), offset) {
                Ok(()) => map.file = Some((fd, offset)),
                Err(error) => map.failure = Some(error),
            }
        }
        self.generation += 1;
        self.maps.insert(iova.0, map);
        Ok(())
    }

    fn map_file(
        &mut self,
        iova: GuestPa,
        size: u64,
        access: DmaAccess,
        fd: BorrowedFd<'_>,
        offset: u64,
    ) -> io::Result<()> {
        let protection = if access.contains(DmaAccess::WRITE) {
            Protection::ReadWrite
        } else {
            Protection::ReadOnly
        };
        let len = usize::try_from(size).map_err(io::Error::other)?;
        let mapping = MemoryFile::new(fd)?.map(offset, len, protection)?;
        let region = Arc::new(SharedRegion { start: iova.0, mapping });
        self.shared = self.shared.insert_region(region).map_err(io::Error::other)?;
        Ok(())
    }

    /// Removes the mapping with exactly this range. The GPU has released the memory on return.
    pub fn unmap(
        &mut self,
        client: &mut dyn Client,
        iova: GuestPa,
        size: u64,
    ) -> Result<(), MemError> {
        let Entry::Occupied(entry) = self.maps.entry(iova.0) else {
            return Err(MemError::NotMapped { iova, size });
        };
        if entry.get().size != size {
            return Err(MemError::NotMapped { iova, size });
        }
        let mut map = entry.remove();
        self.generation += 1;
        self.forget(client, iova.0, &mut map);
        Ok(())
    }

    /// Removes all mappings and returns their size in bytes.
    pub fn clear(&mut self, client: &mut dyn Client) -> u64 {
        let mut maps = mem::take(&mut self.maps);
        self.generation += 1;
        for (iova, map) in &mut maps {
            self.forget(client, *iova, map);
        }
        (self.missed, self.log) = (None, None);
        maps.values().fold(0, |sum, map| sum.saturating_add(map.size))
    }

    fn forget(&mut self, client: &mut dyn Client, iova: u64, map: &mut Map) {
        if let Some(log) = &mut self.log {
            log.note_removal(map);
        }
        self.imported = self.imported.saturating_sub(map.release(client, iova));
        if let Ok((rest, _)) = self.shared.remove_region(GuestAddress(iova), map.size) {
            self.shared = rest;
        }
    }

    /// Returns the number of mappings.
    pub fn maps(&self) -> usize {
        self.maps.len()
    }

    /// Reads guest memory completely or fails.
    pub fn read(&mut self, address: GuestPa, data: &mut [u8]) -> Result<(), Unreachable> {
        let segments = self.segments(address, data.len() as u64, DmaAccess::READ)?;
        let read = self.shared.read_slice(data, GuestAddress(address.0));
        self.withdraw_truncated(&segments)?;
        read.map_err(|_| Unreachable(address))
    }

    /// Writes guest memory completely or fails.
    pub fn write(&mut self, address: GuestPa, data: &[u8]) -> Result<(), Unreachable> {
        let segments = self.segments(address, data.len() as u64, DmaAccess::WRITE)?;
        self.note_written(address, data.len() as u64);
        let written = self.shared.write_slice(data, GuestAddress(address.0));
        self.withdraw_truncated(&segments)?;
        written.map_err(|_| Unreachable(address))
    }

    fn note_written(&mut self, address: GuestPa, len: u64) {
        if let Some(log) = &mut self.log {
            log.note_own(address.0, len);
        }
    }

    /// Unmaps files that were found truncated. Their mappings stay recorded, and imported.
    fn withdraw_truncated(&mut self, segments: &[Segment]) -> Result<(), Unreachable> {
        let mut result = Ok(());
        for Segment { map: start, offset, .. } in segments {
            let region = self.shared.find_region(GuestAddress(*start));
            if !region.is_some_and(|region| region.mapping.poisoned()) {
                continue;
            }
            if let Some(map) = self.maps.get_mut(start) {
                self.generation += 1;
                map.truncated = true;
                map.file = None;
                if let Ok((rest, _)) = self.shared.remove_region(GuestAddress(*start), map.size) {
                    self.shared = rest;
                }
            }
            result = Err(Unreachable(GuestPa(start + offset)));
        }
        result
    }

    /// Checks that a range is accessible.
    pub fn check(
        &mut self,
        address: GuestPa,
        len: u64,
        access: DmaAccess,
    ) -> Result<(), Unreachable> {
        self.segments(address, len, access).map(drop)
    }

    /// Splits a range into parts of mappings with a file and this access.
    fn segments(
        &mut self,
        address: GuestPa,
        len: u64,
        access: DmaAccess,
    ) -> Result<Vec<Segment>, Unreachable> {
        let mut segments = Vec::new();
        let (mut at, mut left) = (address.0, len);
        while left > 0 {
            let found = self.maps.range(..=at).next_back();
            let Some((start, map)) = found.filter(|(start, map)| at - *start < map.size) else {
                return Err(Unreachable(GuestPa(at)));
            };
            if map.file.is_none() {
                if !map.truncated {
                    self.missed = Some(at);
                }
                return Err(Unreachable(GuestPa(at)));
            }
            if !map.access.contains(access) {
                return Err(Unreachable(GuestPa(at)));
            }
            let offset = at - start;
            let part = left.min(map.size - offset);
            segments.push(Segment { map: *start, offset, len: part });
            left -= part;
            at = match at.checked_add(part) {
                Some(next) => next,
                None if left == 0 => break,
                None => return Err(Unreachable(GuestPa(at))),
            };
        }
        Ok(segments)
    }
}

/// Returns a file that can hold guest memory. Closes any other, and returns the error.
fn checked(file: Option<(OwnedFd, u64)>) -> (Option<(OwnedFd, u64)>, Option<io::Error>) {
    let Some((fd, offset)) = file else { return (None, None) };
    let error = MemoryFile::new(fd.as_fd()).err();
    if error.is_some() {
        foreign_fds::close(fd);
        return (None, error);
    }
    (Some((fd, offset)), None)
}

/// Guest memory that the device cannot access at all, or not with this access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("No guest memory at {:#x} that the device can access", .0.0)]
pub struct Unreachable(pub GuestPa);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::gpu::Backing;
    use crate::testing::{Recorder, guest_ram, shared_ram};

    const RW: DmaAccess = DmaAccess::READ.union(DmaAccess::WRITE);

    #[test]
    fn invalid_ranges_are_refused() {
        let mut memory = GuestMemory::default();
        let mut map = |iova, size| memory.map(GuestPa(iova), size, RW, None);
        map(0x1000, 0x3000).unwrap();
        for (iova, size) in [(0, 0), (1, 0x1000), (0x10_0000, 0x123), (u64::MAX - 0xfff, 0x2000)] {
            assert!(matches!(map(iova, size), Err(MemError::BadRange { .. })), "{iova:#x}");
        }
        for (iova, size) in [(0, 0x2000), (0x2000, 0x1000), (0x3000, 0x2000), (0, 0x8000)] {
            assert!(matches!(map(iova, size), Err(MemError::Overlap { .. })), "{iova:#x}");
        }
        map(0, 0x1000).unwrap();
        map(0x4000, 0x1000).unwrap();
        map(u64::MAX - 0xfff, 0x1000).unwrap();
    }

    #[test]
    fn the_number_of_mappings_is_limited() {
        let mut memory = GuestMemory::default();
        let mut map = |index: usize| memory.map(GuestPa(index as u64 * 0x1000), 0x1000, RW, None);
        (0..MAX_MAPS).for_each(|index| map(index).unwrap());
        assert!(matches!(map(MAX_MAPS), Err(MemError::TooMany(_))));
    }

    #[test]
    fn unmaps_are_exact_and_release_the_import_first() {
        let (mut client, record) = Recorder::new();
        let mut memory = GuestMemory::default();
        shared_ram(&mut memory, 0x10_0000, 0x4000);
        let found = memory.import(&mut *client, GuestPa(0x10_1000), 0x1000, RW).unwrap();
        memory.import(&mut *client, GuestPa(0x10_3000), 0x1000, RW).unwrap();
        assert!(matches!(found[..], [(Backing::Guest { offset: 0x1000, .. }, 0x1000)]));
        assert_eq!(record.lock().unwrap().calls, ["import 0x4000 true"], "one import per mapping");

        for (iova, size) in [(0x10_0000, 0x1000), (0x10_1000, 0x3000), (0, 0x4000)] {
            assert!(memory.unmap(&mut *client, GuestPa(iova), size).is_err());
        }
        memory.unmap(&mut *client, GuestPa(0x10_0000), 0x4000).unwrap();
        assert!(record.lock().unwrap().imports.is_empty());
        assert_eq!(memory.read(GuestPa(0x10_0000), &mut [0]), Err(Unreachable(GuestPa(0x10_0000))));
        shared_ram(&mut memory, 0x10_0000, 0x4000);
        assert_eq!(memory.clear(&mut *client), 0x4000);
        assert_eq!(memory.maps(), 0);
    }

    #[test]
    fn accesses_span_mappings_but_no_holes() {
        let mut memory = GuestMemory::default();
        let low = shared_ram(&mut memory, 0x1000, 0x1000);
        shared_ram(&mut memory, 0x2000, 0x1000);
        memory.write(GuestPa(0x1ffe), b"abcd").unwrap();
        let mut bytes = [0; 4];
        memory.read(GuestPa(0x1ffe), &mut bytes).unwrap();
        assert_eq!(&bytes, b"abcd");
        low.read_exact_at(&mut bytes[..2], 0xffe).unwrap();
        assert_eq!(&bytes[..2], b"ab", "shared with the file's owner");
        assert!(memory.read(GuestPa(0x2ffe), &mut bytes).is_err());
        assert!(memory.read(GuestPa(u64::MAX - 1), &mut bytes).is_err());
    }

    #[test]
    fn read_only_memory_is_not_written() {
        let mut memory = GuestMemory::default();
        let (_file, fd) = guest_ram(0x1000);
        memory.map(GuestPa(0), 0x1000, DmaAccess::READ, Some((fd, 0))).unwrap();
        memory.read(GuestPa(0), &mut [0; 8]).unwrap();
        assert!(memory.write(GuestPa(0), &[0; 8]).is_err());
        let (mut client, _) = Recorder::new();
        assert!(memory.import(&mut *client, GuestPa(0), 0x1000, RW).is_err());
    }
}
