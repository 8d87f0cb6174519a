//! Guest memory that comes and goes with DMA maps.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use bitflags::bitflags;
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestMemoryRegionBytes,
    GuestRegionCollection, MemoryRegionAddress, VolatileSlice, guest_memory,
};

use crate::gpu::{Backing, Client, GpuError, GuestRam};
use crate::ids::{GuestPa, MemoryId};
use crate::sigbus::{GuardedMapping, Protection};
use crate::units::{KIB, MIB, PAGE_SIZE, is_aligned};

bitflags! {
    /// What the device may do with a range of guest memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct DmaAccess: u32 {
        /// Loads.
        const READ = 1 << 0;
        /// Stores.
        const WRITE = 1 << 1;
    }
}

/// Why a map or unmap was refused.
#[derive(Debug, thiserror::Error)]
pub enum MemError {
    /// Empty, not page-aligned, or beyond the address space.
    #[error("Bad range: {size:#x} bytes at {:#x}", iova.0)]
    BadRange {
        /// Start.
        iova: GuestPa,
        /// Bytes.
        size: u64,
    },
    /// It overlaps a map that is there.
    #[error("{size:#x} bytes at {:#x} overlap an existing map", iova.0)]
    Overlap {
        /// Start.
        iova: GuestPa,
        /// Bytes.
        size: u64,
    },
    /// No map has exactly this range.
    #[error("Nothing is mapped as {size:#x} bytes at {:#x}", iova.0)]
    NotMapped {
        /// Start.
        iova: GuestPa,
        /// Bytes.
        size: u64,
    },
    /// Too many maps.
    #[error("More than {0} maps")]
    TooMany(usize),
}

/// Maps that one VM may have at a time.
pub const MAX_MAPS: usize = 4096;
/// A range without a file that is at least this long is taken for the guest's RAM.
const LARGE: u64 = 32 * MIB;
/// How much of the lowest RAM is looked at for signs of life: what a PC has below the VGA hole.
const SAMPLE: u64 = 640 * KIB;

/// Guest memory, as a client has mapped it.
///
/// What has a file is mapped here, on vm-memory, and can be imported into a GPU client; what has none is only recorded.
/// An import is made on first use, lives as long as the map, and is released before the unmap returns.
#[derive(Debug, Default)]
pub struct GuestMemory {
    maps: BTreeMap<u64, Map>,
    shared: GuestRegionCollection<SharedRegion>,
    /// Bytes imported into the GPU client.
    imported: u64,
    /// A guest asked for memory that has no file, at this address.
    missed: Option<u64>,
}

#[derive(Debug)]
struct Map {
    size: u64,
    access: DmaAccess,
    /// The file and the offset, where the range can be reached.
    file: Option<(OwnedFd, u64)>,
    import: Option<MemoryId>,
    /// Why the file could not be mapped.
    failure: Option<io::Error>,
}

/// A map with a file, as vm-memory sees it.
#[derive(Debug)]
struct SharedRegion {
    start: u64,
    mapping: GuardedMapping,
}

impl GuestMemoryRegion for SharedRegion {
    type B = ();

    fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    fn start_addr(&self) -> GuestAddress {
        GuestAddress(self.start)
    }

    fn bitmap(&self) {}

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> guest_memory::Result<VolatileSlice<'_>> {
        Ok(self.mapping.slice().subslice(offset.0 as usize, count)?)
    }
}

impl GuestMemoryRegionBytes for SharedRegion {}

/// A part of one map.
#[derive(Clone, Copy, Debug)]
struct Segment {
    map: u64,
    offset: u64,
    len: u64,
}

impl GuestMemory {
    /// Records a range, and maps it where it has a file. A file that cannot be mapped is no error: the VM can run, and
    /// [`Self::advice`] says what is wrong.
    pub fn map(
        &mut self,
        iova: GuestPa,
        size: u64,
        access: DmaAccess,
        file: Option<(OwnedFd, u64)>,
    ) -> Result<(), MemError> {
        let offset = file.as_ref().map_or(0, |(_, offset)| *offset);
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
        let mut map = Map { size, access, file: None, import: None, failure: None };
        if let Some((fd, offset)) = file {
            match self.map_file(iova, size, access, fd.as_fd(), offset) {
                Ok(()) => map.file = Some((fd, offset)),
                Err(error) => map.failure = Some(error),
            }
        }
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
        let mapping = GuardedMapping::map(fd, offset, len, protection)?;
        let region = Arc::new(SharedRegion { start: iova.0, mapping });
        self.shared = self.shared.insert_region(region).map_err(io::Error::other)?;
        Ok(())
    }

    /// Takes away the map with exactly this range. The GPU has let go of it when this returns.
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
        let map = entry.remove();
        self.forget(client, iova.0, &map);
        Ok(())
    }

    /// Takes all maps away; returns how many bytes they were.
    pub fn clear(&mut self, client: &mut dyn Client) -> u64 {
        let maps = mem::take(&mut self.maps);
        for (iova, map) in &maps {
            self.forget(client, *iova, map);
        }
        self.missed = None;
        maps.values().fold(0, |sum, map| sum.saturating_add(map.size))
    }

    fn forget(&mut self, client: &mut dyn Client, iova: u64, map: &Map) {
        if let Some(memory) = map.import {
            self.imported -= map.size;
            if let Err(error) = client.release(memory) {
                log::warn!("Cannot release guest memory at {iova:#x}: {error}");
            }
        }
        if let Ok((rest, _)) = self.shared.remove_region(GuestAddress(iova), map.size) {
            self.shared = rest;
        }
    }

    /// Number of maps.
    pub fn maps(&self) -> usize {
        self.maps.len()
    }

    /// Reads guest memory. All of it, or an error.
    pub fn read(&mut self, address: GuestPa, data: &mut [u8]) -> Result<(), Unreachable> {
        self.segments(address, data.len() as u64, DmaAccess::READ)?;
        let read = self.shared.read_slice(data, GuestAddress(address.0));
        read.map_err(|_| Unreachable(address))
    }

    /// Writes guest memory. All of it, or an error.
    pub fn write(&mut self, address: GuestPa, data: &[u8]) -> Result<(), Unreachable> {
        self.segments(address, data.len() as u64, DmaAccess::WRITE)?;
        let written = self.shared.write_slice(data, GuestAddress(address.0));
        written.map_err(|_| Unreachable(address))
    }

    /// Says whether a range can be read, or read and written.
    pub fn check(
        &mut self,
        address: GuestPa,
        len: u64,
        access: DmaAccess,
    ) -> Result<(), Unreachable> {
        self.segments(address, len, access).map(drop)
    }

    /// Finds a range in the GPU client's imports, importing what is used for the first time. In ascending order.
    pub fn import(
        &mut self,
        client: &mut dyn Client,
        address: GuestPa,
        len: u64,
        access: DmaAccess,
    ) -> Result<Vec<(Backing, u64)>, GpuError> {
        let segments = self
            .segments(address, len, access)
            .map_err(|_| GpuError::OutOfRange("not in guest memory that the device can reach"))?;
        let mut found = Vec::with_capacity(segments.len());
        for segment in segments {
            let memory = self.import_map(client, segment.map)?;
            found.push((Backing::Guest { memory, offset: segment.offset }, segment.len));
        }
        Ok(found)
    }

    fn import_map(&mut self, client: &mut dyn Client, iova: u64) -> Result<MemoryId, GpuError> {
        let gone = GpuError::OutOfRange("not in guest memory");
        let Some(map) = self.maps.get_mut(&iova) else { return Err(gone) };
        if let Some(memory) = map.import {
            return Ok(memory);
        }
        let Some((fd, offset)) = &map.file else { return Err(gone) };
        if map.size > client.spec().max_import_bytes.saturating_sub(self.imported) {
            return Err(GpuError::Limit("guest memory that may be imported"));
        }
        let memory = client.import(GuestRam {
            fd: fd.as_fd(),
            offset: *offset,
            len: map.size,
            writable: map.access.contains(DmaAccess::WRITE),
        })?;
        map.import = Some(memory);
        self.imported += map.size;
        Ok(memory)
    }

    /// Cuts a range into parts of maps that have a file and allow the access.
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
                self.missed = Some(at);
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

    /// What an operator should know about the VM's memory, one line each.
    ///
    /// `own` are the device's own BARs, which a client may map back without a file. `active` says that the guest's
    /// driver runs, so that its RAM cannot be empty.
    pub fn advice(&self, own: &[(u64, u64)], active: bool) -> Vec<String> {
        let mut lines = Vec::new();
        let is_own =
            |start: u64| own.iter().any(|(bar, len)| start.wrapping_sub(*bar) < *len && *len > 0);
        let ram = |map: &Map| map.size >= LARGE && map.access.contains(DmaAccess::WRITE);
        let has_shared = self.maps.values().any(|map| map.file.is_some() && ram(map));
        let fileless = self
            .maps
            .iter()
            .find(|(start, map)| map.file.is_none() && ram(map) && !is_own(**start));
        if let Some((start, map)) = fileless.filter(|_| !has_shared) {
            lines.push(match &map.failure {
                None => format!(
                    "Guest RAM at {start:#x} ({} MiB) is not shared with the device, so channels \
                     cannot use it: start the VM with a shared memory backend, for QEMU -object \
                     memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem",
                    map.size / MIB
                ),
                Some(error) => format!(
                    "Guest RAM at {start:#x} ({} MiB) cannot be mapped: {error}",
                    map.size / MIB
                ),
            });
        } else if let Some(address) = self.missed {
            lines.push(format!(
                "The guest's driver used memory at {address:#x} that the VMM does not share with \
                 the device: give every memory backend of the VM share=on"
            ));
        }
        if active && self.looks_private() {
            lines.push(
                "Guest RAM reads as zeros although the guest runs, so the VMM keeps its own copy of \
                 it: give the VM's memory backend share=on instead of share=off"
                    .to_owned(),
            );
        }
        if self.shared.iter().any(|region| region.mapping.poisoned()) {
            lines.push(
                "The file behind the guest's RAM was shortened while the VM runs: restart the VM"
                    .to_owned(),
            );
        }
        lines
    }

    /// True where the lowest shared RAM is all zeros. A client that maps its file privately hands us the file, and the
    /// guest's stores never reach it.
    fn looks_private(&self) -> bool {
        let Some(region) = self.shared.iter().next() else { return false };
        let len = region.len().min(SAMPLE);
        let mut page = [0; PAGE_SIZE as usize];
        (0..len / PAGE_SIZE).all(|index| {
            let read = region.read_slice(&mut page, MemoryRegionAddress(index * PAGE_SIZE));
            read.is_ok() && page.iter().all(|byte| *byte == 0)
        })
    }
}

/// Guest memory that the device cannot reach, or not in this way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("No guest memory at {:#x} that the device can reach", .0.0)]
pub struct Unreachable(pub GuestPa);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::testing::{Recorder, guest_ram};

    const RW: DmaAccess = DmaAccess::READ.union(DmaAccess::WRITE);

    fn shared(memory: &mut GuestMemory, iova: u64, size: u64) -> std::fs::File {
        let (file, fd) = guest_ram(size);
        memory.map(GuestPa(iova), size, RW, Some((fd, 0))).unwrap();
        file
    }

    #[test]
    fn ranges_are_checked() {
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
    fn maps_are_bounded() {
        let mut memory = GuestMemory::default();
        let mut map = |index: usize| memory.map(GuestPa(index as u64 * 0x1000), 0x1000, RW, None);
        (0..MAX_MAPS).for_each(|index| map(index).unwrap());
        assert!(matches!(map(MAX_MAPS), Err(MemError::TooMany(_))));
    }

    #[test]
    fn unmaps_are_exact_and_release_the_import_first() {
        let (mut client, record) = Recorder::new();
        let mut memory = GuestMemory::default();
        shared(&mut memory, 0x10_0000, 0x4000);
        let found = memory.import(&mut *client, GuestPa(0x10_1000), 0x1000, RW).unwrap();
        memory.import(&mut *client, GuestPa(0x10_3000), 0x1000, RW).unwrap();
        assert!(matches!(found[..], [(Backing::Guest { offset: 0x1000, .. }, 0x1000)]));
        assert_eq!(record.lock().unwrap().calls, ["import 0x4000 true"], "once per map");

        for (iova, size) in [(0x10_0000, 0x1000), (0x10_1000, 0x3000), (0, 0x4000)] {
            assert!(memory.unmap(&mut *client, GuestPa(iova), size).is_err());
        }
        memory.unmap(&mut *client, GuestPa(0x10_0000), 0x4000).unwrap();
        assert!(record.lock().unwrap().imports.is_empty());
        assert_eq!(memory.read(GuestPa(0x10_0000), &mut [0]), Err(Unreachable(GuestPa(0x10_0000))));
        shared(&mut memory, 0x10_0000, 0x4000);
        assert_eq!(memory.clear(&mut *client), 0x4000);
        assert_eq!(memory.maps(), 0);
    }

    #[test]
    fn accesses_span_maps_but_no_holes() {
        let mut memory = GuestMemory::default();
        let low = shared(&mut memory, 0x1000, 0x1000);
        shared(&mut memory, 0x2000, 0x1000);
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
    fn what_is_read_only_stays_so() {
        let mut memory = GuestMemory::default();
        let (_file, fd) = guest_ram(0x1000);
        memory.map(GuestPa(0), 0x1000, DmaAccess::READ, Some((fd, 0))).unwrap();
        memory.read(GuestPa(0), &mut [0; 8]).unwrap();
        assert!(memory.write(GuestPa(0), &[0; 8]).is_err());
        let (mut client, _) = Recorder::new();
        assert!(memory.import(&mut *client, GuestPa(0), 0x1000, RW).is_err());
    }

    #[test]
    fn imports_are_limited() {
        let (mut client, _) = Recorder::new();
        let mut memory = GuestMemory::default();
        shared(&mut memory, 0, 48 * MIB);
        shared(&mut memory, 64 * MIB, 48 * MIB);
        memory.import(&mut *client, GuestPa(0), 0x1000, RW).unwrap();
        let second = memory.import(&mut *client, GuestPa(64 * MIB), 0x1000, RW);
        assert!(matches!(second, Err(GpuError::Limit(_))));
    }

    #[test]
    fn memory_that_is_not_shared_is_explained() {
        let mut memory = GuestMemory::default();
        memory.map(GuestPa(0xf000_0000), 256 * MIB, RW, None).unwrap();
        assert!(memory.advice(&[(0xf000_0000, 256 * MIB)], true).is_empty(), "our own BAR");
        memory.map(GuestPa(0), 512 * MIB, RW, None).unwrap();
        let advice = memory.advice(&[(0xf000_0000, 256 * MIB)], false);
        assert!(advice[0].contains("share=on") && advice[0].contains("512 MiB"), "{advice:?}");
    }

    #[test]
    fn another_devices_bar_is_no_concern_while_ram_is_shared() {
        let mut memory = GuestMemory::default();
        let ram = shared(&mut memory, 0, 64 * MIB);
        ram.write_all_at(&[1], 0x400).unwrap();
        memory.map(GuestPa(0x1_0000_0000), 512 * MIB, RW, None).unwrap();
        assert!(memory.advice(&[], true).is_empty());
        assert!(memory.read(GuestPa(0x1_0000_0000), &mut [0]).is_err());
        assert!(memory.advice(&[], true)[0].contains("0x100000000"), "unless a driver asks for it");
    }

    #[test]
    fn memory_mapped_privately_is_explained() {
        let mut memory = GuestMemory::default();
        let ram = shared(&mut memory, 0, 64 * MIB);
        assert!(memory.advice(&[], false).is_empty(), "nothing has run yet");
        assert!(memory.advice(&[], true)[0].contains("share=off"));
        ram.write_all_at(&[1], 0x9_0000).unwrap();
        assert!(memory.advice(&[], true).is_empty());
    }

    #[test]
    fn a_shortened_file_is_survived_and_explained() {
        let mut memory = GuestMemory::default();
        let ram = shared(&mut memory, 0, 0x4000);
        ram.set_len(0).unwrap();
        memory.read(GuestPa(0x1000), &mut [0; 64]).unwrap();
        memory.write(GuestPa(0x2000), &[0; 64]).unwrap();
        assert!(memory.advice(&[], false)[0].contains("shortened"));
    }

    #[test]
    fn a_file_that_cannot_be_mapped_does_not_stop_the_vm() {
        let mut memory = GuestMemory::default();
        let fd = OwnedFd::from(std::fs::File::open("/proc/self/status").unwrap());
        memory.map(GuestPa(0), 64 * MIB, RW, Some((fd, 0))).unwrap();
        assert!(memory.advice(&[], false)[0].contains("cannot be mapped"));
    }
}
