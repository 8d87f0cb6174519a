//! One mapping of guest memory.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;

use vm_memory::{
    GuestAddress, GuestMemoryRegion, GuestMemoryRegionBytes, MemoryRegionAddress, VolatileSlice,
    guest_memory,
};

use super::DmaAccess;
use crate::gpu::Client;
use crate::ids::MemoryId;
use crate::sigbus::GuardedMapping;
use crate::units::MIB;

/// Minimum length of a part that is imported by itself, in bytes. A driver pins it in some 12 ms.
const MIN_PART: u64 = 64 * MIB;
/// Maximum number of parts of a mapping. Each takes descriptors and an object of the driver.
const MAX_PARTS: u64 = 128;

/// Mapping as the client has made it.
#[derive(Debug)]
pub(super) struct Map {
    pub size: u64,
    pub access: DmaAccess,
    /// The file and the offset, if the range is accessible.
    pub file: Option<(OwnedFd, u64)>,
    /// Imports, by their offsets in the mapping. They do not overlap.
    pub imports: BTreeMap<u64, Import>,
    /// Error of mapping the file.
    pub failure: Option<io::Error>,
    /// Whether the client has truncated the file. The range is no longer accessible.
    pub truncated: bool,
}

/// Import of a mapping, or of a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Import {
    pub memory: MemoryId,
    /// Length in bytes.
    pub len: u64,
}

impl Map {
    /// Returns the import with an offset, and the offset at which it begins.
    pub fn import_at(&self, offset: u64) -> Option<(u64, Import)> {
        let (start, import) = self.imports.range(..=offset).next_back()?;
        (offset - start < import.len).then_some((*start, *import))
    }

    /// Returns the range without an import around an offset that has none.
    pub fn gap(&self, offset: u64) -> Range<u64> {
        let before = self.imports.range(..=offset).next_back();
        let start = before.map_or(0, |(start, import)| start.saturating_add(import.len));
        let after = self.imports.range(offset..).next();
        start..after.map_or(self.size, |(start, _)| *start)
    }

    /// Returns the part to import for an offset that has no import.
    pub fn part(&self, offset: u64) -> Range<u64> {
        let len = self.size.div_ceil(MAX_PARTS).next_power_of_two().max(MIN_PART);
        let start = offset - offset % len;
        // A worker of another release may have made other parts.
        let gap = self.gap(offset);
        gap.start.max(start)..gap.end.min(start.saturating_add(len))
    }

    /// Releases the imports. Returns their size in bytes.
    pub fn release(&mut self, client: &mut dyn Client, iova: u64) -> u64 {
        let mut bytes = 0_u64;
        for (offset, Import { memory, len }) in std::mem::take(&mut self.imports) {
            if let Err(error) = client.release(memory) {
                log::warn!("Cannot release guest memory at {:#x}: {error}", iova + offset);
            }
            bytes = bytes.saturating_add(len);
        }
        bytes
    }
}

/// Mapping with a file, for vm-memory.
#[derive(Debug)]
pub(super) struct SharedRegion {
    pub start: u64,
    pub mapping: GuardedMapping,
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::{GIB, PAGE_SIZE};

    fn map(size: u64) -> Map {
        let access = DmaAccess::READ;
        let imports = BTreeMap::new();
        Map { size, access, file: None, imports, failure: None, truncated: false }
    }

    #[test]
    fn large_mappings_have_parts_of_a_power_of_two() {
        for (size, part) in [(GIB, 64 * MIB), (16 * GIB, 128 * MIB), (65 * GIB, GIB)] {
            assert_eq!(map(size).part(part + PAGE_SIZE), part..2 * part, "{size:#x}");
            assert_eq!(map(size).gap(part), 0..size);
        }
        assert_eq!(map(MIB).part(0), 0..MIB);
        assert_eq!(map(65 * MIB).part(64 * MIB), 64 * MIB..65 * MIB);
    }

    proptest! {
        /// Parts of any lengths that an earlier worker has left are neither imported twice nor left
        /// out.
        #[test]
        fn parts_fill_the_gaps_between_imports(
            pages in 1..(3 * GIB / PAGE_SIZE),
            left in prop::collection::vec((0..3 * GIB / PAGE_SIZE, 1..GIB / PAGE_SIZE), 0..6),
            at in prop::collection::vec(0..3 * GIB / PAGE_SIZE, 1..40),
        ) {
            let mut map = map(pages * PAGE_SIZE);
            let add = |map: &mut Map, start: u64, end: u64| {
                let memory = MemoryId(map.imports.len() as u32);
                map.imports.insert(start, Import { memory, len: end - start });
            };
            for (start, len) in left {
                let start = (start % pages) * PAGE_SIZE;
                if map.import_at(start).is_none() {
                    let range = map.gap(start);
                    let end = range.end.min(start + len * PAGE_SIZE);
                    add(&mut map, start, end);
                }
            }
            for offset in at.into_iter().map(|at| at % pages * PAGE_SIZE) {
                if map.import_at(offset).is_none() {
                    let range = map.part(offset);
                    prop_assert!(range.contains(&offset));
                    add(&mut map, range.start, range.end);
                }
                prop_assert!(map.import_at(offset).is_some());
            }
            let mut end = 0;
            for (start, import) in &map.imports {
                prop_assert!(*start >= end && import.len > 0);
                end = start + import.len;
            }
            prop_assert!(end <= map.size);
        }
    }
}
