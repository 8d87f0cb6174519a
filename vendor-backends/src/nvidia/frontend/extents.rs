//! Allocator of parts of a memory: of the vGPU's video memory, and of an arena.

use std::collections::BTreeMap;

use mdev_core::units::is_aligned;
use serde::{Deserialize, Serialize};

/// Part of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Offset in the memory, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Allocator of the extents of a memory.
#[derive(Debug)]
pub struct Extents {
    /// Unit of allocations, in bytes.
    granule: u64,
    total: u64,
    /// Free extents: length by offset. Neighbours are merged.
    free: BTreeMap<u64, u64>,
    free_bytes: u64,
}

impl Extents {
    /// Creates an allocator of `total` bytes in units of `granule` bytes, which is a power of two.
    pub fn new(total: u64, granule: u64) -> Self {
        let total = total / granule * granule;
        let free = (total > 0).then_some((0, total)).into_iter().collect();
        Self { granule, total, free, free_bytes: total }
    }

    /// Returns the size of the memory, in bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns whether nothing is allocated.
    pub fn is_unused(&self) -> bool {
        self.free_bytes == self.total
    }

    /// Allocates `len` bytes, a multiple of the granule, in one extent. Returns its offset, or
    /// `None` if no free extent is so long.
    pub fn allocate_one(&mut self, len: u64) -> Option<u64> {
        if len == 0 || !len.is_multiple_of(self.granule) || len > self.free_bytes {
            return None;
        }
        let extent = self.find(len, self.granule)?;
        self.take(extent);
        Some(extent.offset)
    }

    /// Allocates `len` bytes, a multiple of the granule, in extents that begin and end at multiples
    /// of `align` where possible. Fragmentation so does not use up memory. Returns `None` if less
    /// is free.
    pub fn allocate(&mut self, len: u64, align: u64) -> Option<Vec<Extent>> {
        if len == 0 || !len.is_multiple_of(self.granule) || len > self.free_bytes {
            return None;
        }
        let align = align.max(self.granule).checked_next_power_of_two()?;
        if let Some(extent) = self.find(len, align) {
            self.take(extent);
            return Some(vec![extent]);
        }
        let mut extents = Vec::new();
        let mut missing = len;
        while missing > 0 {
            let (&offset, &size) = self.free.iter().max_by_key(|(_, size)| **size)?;
            let extent = Extent { offset, len: size.min(missing) };
            self.take(extent);
            missing -= extent.len;
            extents.push(extent);
        }
        Some(extents)
    }

    /// Returns the first place for one extent.
    fn find(&self, len: u64, align: u64) -> Option<Extent> {
        self.free.iter().find_map(|(&offset, &size)| {
            let start = offset.checked_next_multiple_of(align)?;
            let end = start.checked_add(len)?;
            (end <= offset + size).then_some(Extent { offset: start, len })
        })
    }

    /// Takes an extent, which lies in one free extent.
    fn take(&mut self, Extent { offset, len }: Extent) {
        let Some((&start, &size)) = self.free.range(..=offset).next_back() else { return };
        self.free.remove(&start);
        if offset > start {
            self.free.insert(start, offset - start);
        }
        if start + size > offset + len {
            self.free.insert(offset + len, start + size - offset - len);
        }
        self.free_bytes -= len;
    }

    /// Takes an extent that another process has allocated. Returns false if it is not free.
    pub fn take_again(&mut self, extent: Extent) -> bool {
        let Extent { offset, len } = extent;
        let before = self.free.range(..=offset).next_back();
        let end =
            offset.checked_add(len).filter(|_| len > 0 && is_aligned(offset | len, self.granule));
        let is_free = before.zip(end).is_some_and(|((start, size), end)| end <= start + size);
        if is_free {
            self.take(extent);
        }
        is_free
    }

    /// Frees extents of an allocation.
    pub fn release(&mut self, extents: &[Extent]) {
        for Extent { offset, len } in extents {
            let (mut start, mut size) = (*offset, *len);
            if let Some((&before, &bytes)) = self.free.range(..start).next_back()
                && before + bytes == start
            {
                self.free.remove(&before);
                start = before;
                size += bytes;
            }
            if let Some(bytes) = self.free.remove(&(offset + len)) {
                size += bytes;
            }
            self.free.insert(start, size);
            self.free_bytes += len;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GRANULE: u64 = 64 << 10;

    #[test]
    fn fragmented_memory_is_used_up_completely() {
        let mut memory = Extents::new(8 * GRANULE, GRANULE);
        let parts: Vec<_> = (0..8).map(|_| memory.allocate(GRANULE, 0).unwrap()).collect();
        for part in parts.iter().step_by(2) {
            memory.release(part);
        }
        let extents = memory.allocate(4 * GRANULE, 0).unwrap();
        assert_eq!(extents.len(), 4);
        assert_eq!(memory.free_bytes, 0);
        assert_eq!(memory.allocate(GRANULE, 0), None);
    }

    #[test]
    fn memory_that_is_not_free_is_not_taken_again() {
        let mut memory = Extents::new(8 * GRANULE, GRANULE);
        let extent =
            |from: u64, count: u64| Extent { offset: from * GRANULE, len: count * GRANULE };
        assert!(memory.take_again(extent(2, 3)) && memory.take_again(extent(7, 1)));
        for bad in [
            extent(2, 3),
            extent(1, 2),
            extent(4, 2),
            extent(6, 2),
            extent(0, 0),
            extent(8, 1),
            Extent { offset: 1, len: GRANULE },
            Extent { offset: u64::MAX - GRANULE + 1, len: GRANULE },
        ] {
            assert!(!memory.take_again(bad), "{bad:x?}");
        }
        memory.release(&[extent(2, 3), extent(7, 1)]);
        assert_eq!(memory.allocate(8 * GRANULE, 0), Some(vec![extent(0, 8)]));
    }

    proptest! {
        #[test]
        fn extents_never_overlap_and_all_come_back(
            steps in proptest::collection::vec((0_u64..9, 0_u32..8, any::<bool>(), any::<usize>()), 1..80),
        ) {
            let total = 64 * GRANULE;
            let mut memory = Extents::new(total, GRANULE);
            let mut held: Vec<Vec<Extent>> = Vec::new();
            for (granules, align, release, which) in steps {
                if release && !held.is_empty() {
                    let extents = held.swap_remove(which % held.len());
                    memory.release(&extents);
                } else if let Some(extents) = memory.allocate(granules * GRANULE, GRANULE << align) {
                    held.push(extents);
                }
                let mut all: Vec<_> = held.iter().flatten().collect();
                all.sort_by_key(|extent| extent.offset);
                prop_assert!(all.windows(2).all(|pair| pair[0].offset + pair[0].len <= pair[1].offset));
                prop_assert!(all.iter().all(|extent| extent.offset + extent.len <= total));
                let used: u64 = all.iter().map(|extent| extent.len).sum();
                prop_assert_eq!(memory.free_bytes, total - used);
            }
            for extents in held {
                memory.release(&extents);
            }
            prop_assert_eq!(memory.allocate(total, 0), Some(vec![Extent { offset: 0, len: total }]));
        }
    }
}
