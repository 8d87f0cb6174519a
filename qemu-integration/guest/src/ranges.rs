//! Allocator of address ranges, for GPU virtual addresses and video memory.

use std::collections::BTreeMap;

/// Free ranges of an address space, ordered by start; allocated first fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranges {
    free: BTreeMap<u64, u64>,
}

impl Ranges {
    /// Creates an allocator with `start..end` free.
    pub fn new(start: u64, end: u64) -> Self {
        Self { free: (start < end).then_some((start, end)).into_iter().collect() }
    }

    /// Allocates `len` bytes at a multiple of `align` (a power of two).
    pub fn take(&mut self, len: u64, align: u64) -> Option<u64> {
        let (start, end, at) = self.free.iter().find_map(|(&start, &end)| {
            let at = start.checked_next_multiple_of(align)?;
            (len > 0 && at.checked_add(len)? <= end).then_some((start, end, at))
        })?;
        self.free.remove(&start);
        if start < at {
            self.free.insert(start, at);
        }
        if at + len < end {
            self.free.insert(at + len, end);
        }
        Some(at)
    }

    /// Frees a range allocated by [`Self::take`].
    pub fn give(&mut self, at: u64, len: u64) {
        let (mut start, mut end) = (at, at + len);
        if let Some((&before, &until)) = self.free.range(..=at).next_back()
            && until == at
        {
            start = before;
        }
        if let Some(until) = self.free.remove(&end) {
            end = until;
        }
        self.free.insert(start, end);
    }

    /// Returns the number of free bytes.
    pub fn free_bytes(&self) -> u64 {
        self.free.iter().map(|(start, end)| end - start).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn never_overlaps_and_gets_everything_back(
            steps in prop::collection::vec((1u64..0x8000, 0u32..14, any::<bool>()), 1..200)
        ) {
            let whole = Ranges::new(0x1000, 0x10_0000);
            let mut ranges = whole.clone();
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (len, align, give) in steps {
                if give && !taken.is_empty() {
                    let (at, len) = taken.swap_remove(len as usize % taken.len());
                    ranges.give(at, len);
                } else if let Some(at) = ranges.take(len, 1 << align) {
                    prop_assert!(at % (1 << align) == 0 && at >= 0x1000 && at + len <= 0x10_0000);
                    prop_assert!(taken.iter().all(|&(a, l)| at + len <= a || a + l <= at));
                    taken.push((at, len));
                }
                let used: u64 = taken.iter().map(|(_, len)| len).sum();
                prop_assert_eq!(ranges.free_bytes() + used, whole.free_bytes());
            }
            for (at, len) in taken {
                ranges.give(at, len);
            }
            prop_assert_eq!(ranges, whole);
        }
    }
}
