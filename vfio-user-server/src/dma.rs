//! Memory that a client lets a device access, and takes back.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use crate::errno::Errno;

/// A range of the client's memory, for the device to access.
#[derive(Debug)]
pub struct DmaMap {
    /// Where the device sees it.
    pub address: u64,
    /// Length in bytes; `address + size` does not overflow.
    pub size: u64,
    /// Where it begins in the file.
    pub offset: u64,
    /// The device may read it.
    pub readable: bool,
    /// The device may write it.
    pub writable: bool,
    /// The file that holds it, where the client can share it.
    pub fd: Option<OwnedFd>,
}

/// Memory that is taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaUnmap {
    /// One map, exactly as it was made.
    Range {
        /// Where the device saw it.
        address: u64,
        /// Length in bytes.
        size: u64,
    },
    /// Every map.
    All,
}

/// Which ranges are mapped: none overlap, and there are not too many.
#[derive(Debug)]
pub struct DmaRanges {
    ranges: BTreeMap<u64, Mapped>,
    limit: usize,
}

#[derive(Clone, Copy, Debug)]
struct Mapped {
    size: u64,
    readable: bool,
    writable: bool,
}

impl DmaRanges {
    /// Nothing is mapped; `limit` ranges can be.
    pub fn new(limit: usize) -> Self {
        Self { ranges: BTreeMap::new(), limit }
    }

    /// Whether a range could be added.
    pub fn check(&self, address: u64, size: u64) -> Result<(), Errno> {
        let last = size.checked_sub(1).and_then(|span| address.checked_add(span));
        let last = last.ok_or(Errno::EINVAL)?;
        let before = self.ranges.range(..=last).next_back();
        if before.is_some_and(|(&start, map)| start + (map.size - 1) >= address) {
            return Err(Errno::EEXIST);
        }
        if self.ranges.len() >= self.limit {
            return Err(Errno::ENOSPC);
        }
        Ok(())
    }

    /// Adds a range that was [checked](Self::check).
    pub fn insert(&mut self, address: u64, size: u64, readable: bool, writable: bool) {
        self.ranges.insert(address, Mapped { size, readable, writable });
    }

    /// Whether exactly this range is mapped.
    pub fn contains(&self, address: u64, size: u64) -> bool {
        self.ranges.get(&address).is_some_and(|map| map.size == size)
    }

    /// Whether the device may read, or `write`, all of these bytes, in one range or in several that adjoin.
    pub fn allows(&self, address: u64, size: u64, write: bool) -> Result<(), Errno> {
        let last = size.checked_sub(1).and_then(|span| address.checked_add(span));
        let last = last.ok_or(Errno::EINVAL)?;
        let mut at = address;
        loop {
            let (&start, map) = self.ranges.range(..=at).next_back().ok_or(Errno::EFAULT)?;
            let end = start + (map.size - 1);
            if end < at {
                return Err(Errno::EFAULT);
            }
            if !(if write { map.writable } else { map.readable }) {
                return Err(Errno::EACCES);
            }
            if end >= last {
                return Ok(());
            }
            at = end + 1;
        }
    }

    /// Where some range begins that the device may read.
    pub fn readable(&self) -> Option<u64> {
        self.ranges.iter().find(|(_, map)| map.readable).map(|(&start, _)| start)
    }

    /// Removes what is taken back.
    pub fn remove(&mut self, unmap: DmaUnmap) {
        match unmap {
            DmaUnmap::Range { address, .. } => drop(self.ranges.remove(&address)),
            DmaUnmap::All => self.ranges.clear(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_do_not_overlap_and_are_limited() {
        let mut ranges = DmaRanges::new(2);
        ranges.insert(0x1000, 0x2000, true, true);
        for (address, size) in [(0x1000, 0x2000), (0, 0x1001), (0x2fff, 1), (0, u64::MAX)] {
            assert_eq!(ranges.check(address, size), Err(Errno::EEXIST), "{address:#x}+{size:#x}");
        }
        for (address, size) in [(0, 0), (u64::MAX, 2), (1, u64::MAX)] {
            let result = ranges.check(address, size);
            assert!(result.is_err(), "{address:#x}+{size:#x}");
        }
        assert_eq!(ranges.check(0, 0x1000), Ok(()));
        assert_eq!(ranges.check(u64::MAX, 1), Ok(()), "the last byte there is");
        ranges.insert(0x3000, 0x1000, true, false);
        assert_eq!(ranges.allows(0x1fff, 0x2001, false), Ok(()), "across two that adjoin");
        assert_eq!(ranges.allows(0x1fff, 0x2001, true), Err(Errno::EACCES));
        assert_eq!(ranges.allows(0x1000, 0x3001, false), Err(Errno::EFAULT));
        assert_eq!(ranges.allows(0xfff, 2, false), Err(Errno::EFAULT));
        assert_eq!(ranges.allows(0x1000, 0, false), Err(Errno::EINVAL));
        assert_eq!(ranges.readable(), Some(0x1000));
        assert_eq!(ranges.check(0x8000, 0x1000), Err(Errno::ENOSPC));
        assert!(!ranges.contains(0x1000, 0x1000), "only as it was made");
        ranges.remove(DmaUnmap::Range { address: 0x1000, size: 0x2000 });
        assert_eq!(ranges.check(0x1000, 0x2000), Ok(()));
        ranges.remove(DmaUnmap::All);
        assert!(!ranges.contains(0x3000, 0x1000));
    }
}
