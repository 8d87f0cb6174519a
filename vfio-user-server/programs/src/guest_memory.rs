//! Memory of a VM for the programs there.
//!
//! The driver in the guest allocates or pins pages, gives them with an ioctl, and keeps them until
//! the device has told that it does not use them.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use cuda_socket::Range;
use mdev_core::gpu::{Backing, Client, GpuError};
use mdev_core::ids::GuestPa;
use mdev_core::mem::{DmaAccess, GuestMemory};
use mdev_core::units::{PAGE_SIZE, is_aligned};

/// Ids of pages that are no longer used.
#[derive(Clone, Debug, Default)]
pub struct FreedPages(Arc<Mutex<Vec<u64>>>);

impl FreedPages {
    /// Returns the ids, once.
    pub fn take(&self) -> Vec<u64> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Pages of a VM. Their id is in [`FreedPages`] when they are dropped.
#[derive(Debug)]
pub struct GuestPages {
    id: u64,
    len: u64,
    /// Start in these pages and guest-physical range, in ascending order.
    parts: Vec<Part>,
    freed: FreedPages,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    at: u64,
    address: u64,
    len: u64,
}

/// Memory that the guest's driver has given with an ioctl.
#[derive(Debug)]
pub struct GivenMemory {
    /// The pages.
    pub pages: GuestPages,
    /// Range of the program that they are. `None` for new pages.
    pub range: Option<Range>,
}

impl GuestPages {
    /// Returns pages that consist of page-aligned guest-physical ranges. `None` if a range is
    /// impossible. The ranges may not be in the VM's memory.
    pub fn new(
        id: u64,
        ranges: impl IntoIterator<Item = (u64, u64)>,
        freed: &FreedPages,
    ) -> Option<Self> {
        let (mut parts, mut at) = (Vec::<Part>::new(), 0_u64);
        for (address, len) in ranges {
            address.checked_add(len)?;
            if len == 0 || !is_aligned(address | len, PAGE_SIZE) {
                return None;
            }
            match parts.last_mut() {
                Some(last) if last.address + last.len == address => last.len += len,
                _ => parts.push(Part { at, address, len }),
            }
            at = at.checked_add(len)?;
        }
        Some(Self { id, len: at, parts, freed: freed.clone() })
    }

    /// Returns the id that the guest's driver has chosen.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> u64 {
        self.len
    }

    /// Returns the number of ranges, after neighbours were joined.
    pub fn ranges_count(&self) -> usize {
        self.parts.len()
    }

    /// Returns all guest-physical ranges.
    pub fn all_ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.parts.iter().map(|part| (part.address, part.len))
    }

    /// Returns the guest-physical ranges of `len` bytes from an offset.
    fn ranges(&self, offset: u64, len: u64) -> impl Iterator<Item = (u64, u64)> {
        let first = self.parts.partition_point(|part| part.at + part.len <= offset);
        let (mut from, mut left) = (offset, len);
        self.parts[first..].iter().map_while(move |part| {
            let skip = from.checked_sub(part.at).filter(|_| left > 0)?;
            let len = (part.len - skip).min(left);
            (from, left) = (from + len, left - len);
            Some((part.address + skip, len))
        })
    }

    /// Returns where `len` bytes are for the GPU.
    pub fn import(
        &self,
        memory: &mut GuestMemory,
        gpu: &mut dyn Client,
        offset: u64,
        len: u64,
    ) -> Result<Vec<(Backing, u64)>, GpuError> {
        let access = DmaAccess::READ | DmaAccess::WRITE;
        let mut pieces = Vec::new();
        for (address, len) in self.ranges(offset, len) {
            pieces.extend(memory.import(gpu, GuestPa(address), len, access)?);
        }
        Ok(pieces)
    }

    /// Writes bytes.
    pub fn write(&self, memory: &mut GuestMemory, offset: u64, mut bytes: &[u8]) -> io::Result<()> {
        for (address, len) in self.ranges(offset, bytes.len() as u64) {
            let (part, rest) = bytes.split_at(len as usize);
            memory.write(GuestPa(address), part).map_err(io::Error::other)?;
            bytes = rest;
        }
        Ok(())
    }
}

impl Drop for GuestPages {
    fn drop(&mut self) {
        self.freed.0.lock().unwrap_or_else(PoisonError::into_inner).push(self.id);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn neighbours_are_one_range() {
        let freed = FreedPages::default();
        let ranges = [(0x1000, 0x1000), (0x2000, 0x1000), (0x1000, 0x1000)];
        let pages = GuestPages::new(7, ranges, &freed).unwrap();
        assert_eq!(
            pages.ranges(0, 0x3000).collect::<Vec<_>>(),
            [(0x1000, 0x2000), (0x1000, 0x1000)]
        );
        drop(pages);
        assert_eq!((freed.take(), freed.take()), (vec![7], vec![]));
        for bad in [(1, 0x1000), (0x1000, 0), (0x1000, 1), (u64::MAX - 0xfff, 0x1000)] {
            assert!(GuestPages::new(1, [bad], &freed).is_none(), "{bad:x?}");
        }
    }

    proptest! {
        #[test]
        fn each_byte_has_its_place(
            lens in proptest::collection::vec((0_u64..64, 1_u64..4), 1..12),
            (from, len) in (0_u64..40, 0_u64..40),
        ) {
            let freed = FreedPages::default();
            let ranges: Vec<_> =
                lens.iter().map(|(page, pages)| (page * PAGE_SIZE, pages * PAGE_SIZE)).collect();
            let of = |ranges: &[(u64, u64)]| -> Vec<u64> {
                let bytes = ranges.iter().flat_map(|(at, len)| (*at..at + len).step_by(1024));
                bytes.collect()
            };
            let pages = GuestPages::new(1, ranges.iter().copied(), &freed).unwrap();
            let total = pages.bytes() / 1024;
            prop_assert_eq!(total as usize, of(&ranges).len());
            let (from, len) = (from.min(total), len.min(total - from.min(total)));
            let found: Vec<_> = pages.ranges(from * 1024, len * 1024).collect();
            prop_assert_eq!(of(&found), &of(&ranges)[from as usize..(from + len) as usize]);
        }
    }
}
