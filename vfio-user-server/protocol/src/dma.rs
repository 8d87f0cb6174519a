//! Mappings of the client's memory for the device.

use std::collections::BTreeMap;

use foreign_fds::ForeignFd;

use crate::errno::Errno;

/// A range of the client's memory that the device may access.
#[derive(Debug)]
pub struct DmaMap {
    /// DMA address.
    pub address: u64,
    /// Length in bytes; `address + size - 1` does not overflow.
    pub size: u64,
    /// Offset in the file.
    pub offset: u64,
    /// True if the device may read the range.
    pub readable: bool,
    /// True if the device may write the range.
    pub writable: bool,
    /// File with the memory, if the client shares it.
    pub fd: Option<ForeignFd>,
}

/// Mappings to remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaUnmap {
    /// One mapping, with the address and size of its [`DmaMap`].
    Range {
        /// DMA address.
        address: u64,
        /// Length in bytes.
        size: u64,
    },
    /// All mappings.
    All,
}

/// Mapped ranges of a session. Ranges do not overlap, and their number is limited.
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
    /// Returns an empty set for up to `limit` ranges.
    pub fn new(limit: usize) -> Self {
        Self { ranges: BTreeMap::new(), limit }
    }

    /// Checks that a range can be added.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is empty or overflows, `EEXIST` if it overlaps a mapped range,
    /// `ENOSPC` at the limit.
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

    /// Adds a [checked](Self::check) range.
    pub fn insert(&mut self, address: u64, size: u64, readable: bool, writable: bool) {
        self.ranges.insert(address, Mapped { size, readable, writable });
    }

    /// Returns true if exactly this range is mapped.
    pub fn contains(&self, address: u64, size: u64) -> bool {
        self.ranges.get(&address).is_some_and(|map| map.size == size)
    }

    /// Checks that the device may read, or with `write` write, a range of bytes in one or several
    /// adjacent mappings.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is empty or overflows, `EFAULT` if it is not mapped, `EACCES` if a
    /// mapping does not allow the access.
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

    /// Returns the address of the first range that the device may read.
    pub fn first_readable(&self) -> Option<u64> {
        self.ranges.iter().find(|(_, map)| map.readable).map(|(&start, _)| start)
    }

    /// Removes mappings.
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
        assert_eq!(ranges.check(u64::MAX, 1), Ok(()), "the last byte of the address space");
        ranges.insert(0x3000, 0x1000, true, false);
        assert_eq!(ranges.allows(0x1fff, 0x2001, false), Ok(()), "across two adjacent ranges");
        assert_eq!(ranges.allows(0x1fff, 0x2001, true), Err(Errno::EACCES));
        assert_eq!(ranges.allows(0x1000, 0x3001, false), Err(Errno::EFAULT));
        assert_eq!(ranges.allows(0xfff, 2, false), Err(Errno::EFAULT));
        assert_eq!(ranges.allows(0x1000, 0, false), Err(Errno::EINVAL));
        assert_eq!(ranges.first_readable(), Some(0x1000));
        assert_eq!(ranges.check(0x8000, 0x1000), Err(Errno::ENOSPC));
        assert!(!ranges.contains(0x1000, 0x1000), "a part of a mapping");
        ranges.remove(DmaUnmap::Range { address: 0x1000, size: 0x2000 });
        assert_eq!(ranges.check(0x1000, 0x2000), Ok(()));
        ranges.remove(DmaUnmap::All);
        assert!(!ranges.contains(0x3000, 0x1000));
    }
}
