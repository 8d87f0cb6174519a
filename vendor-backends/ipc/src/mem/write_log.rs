//! Record of the pages of a mapping that a process writes, in memory that another process reads.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use mdev_core::gpu::WrittenPages;
use mdev_core::units::PAGE_SIZE;

use super::{Mapping, sealed_memfd};

/// Bits in a word of the record.
const BITS: u64 = 32;

/// A bit for each page of a mapping.
#[derive(Debug)]
pub struct WriteLog {
    bits: Arc<Mapping>,
    pages: u64,
}

impl WriteLog {
    /// Creates the record of a mapping of `len` bytes, and returns its file.
    pub fn create(len: u64) -> io::Result<(Self, OwnedFd)> {
        let file = sealed_memfd(c"written", Self::bytes(len))?;
        Ok((Self::open(file.as_fd(), len)?, file))
    }

    /// Opens the record of a mapping of `len` bytes.
    pub fn open(file: BorrowedFd<'_>, len: u64) -> io::Result<Self> {
        let bits = Mapping::new(file, 0, Self::bytes(len), true)?;
        Ok(Self { bits, pages: len.div_ceil(PAGE_SIZE) })
    }

    fn bytes(len: u64) -> u64 {
        len.div_ceil(PAGE_SIZE).div_ceil(8).next_multiple_of(PAGE_SIZE).max(PAGE_SIZE)
    }

    /// Records a write of `len` bytes at `offset`.
    pub(super) fn note(&self, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        let last = (offset + len - 1) / PAGE_SIZE;
        let mut page = offset / PAGE_SIZE;
        while page <= last {
            // Bits from `page` to the end of the word or to the last page.
            let (word, first) = (page / BITS, page % BITS);
            let count = (BITS - first).min(last - page + 1);
            let mask = (u32::MAX >> (BITS - count)) << first;
            if self.bits.load_u32(word * 4).is_some_and(|bits| bits & mask != mask) {
                self.bits.or_u32(word * 4, mask);
            }
            page += count;
        }
    }
}

impl WrittenPages for WriteLog {
    fn ranges(&self) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for word in 0..self.pages.div_ceil(BITS) {
            let bits = self.bits.load_u32(word * 4).unwrap_or_default();
            if bits == 0 {
                continue;
            }
            let pages = (0..BITS).filter(|bit| bits >> bit & 1 == 1).map(|bit| word * BITS + bit);
            for page in pages.take_while(|page| *page < self.pages) {
                let start = page * PAGE_SIZE;
                match ranges.last_mut() {
                    Some(range) if range.end == start => range.end += PAGE_SIZE,
                    _ => ranges.push(start..start + PAGE_SIZE),
                }
            }
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use mdev_core::units::MIB;
    use proptest::prelude::*;

    use super::*;
    use crate::mem::SharedMemory;

    #[test]
    fn writes_of_each_kind_are_recorded() {
        let memory = SharedMemory::new(c"test", 256 * PAGE_SIZE).unwrap().mapping;
        memory.write(0, &[1]).unwrap();
        let (log, file) = WriteLog::create(memory.len()).unwrap();
        let reader = WriteLog::open(file.as_fd(), memory.len()).unwrap();
        memory.set_log(Some(log));
        assert_eq!(reader.ranges(), []);
        memory.write(3 * PAGE_SIZE - 1, &[1; 2]).unwrap();
        memory.store_u32(31 * PAGE_SIZE, 1).unwrap();
        memory.store_u64(32 * PAGE_SIZE + 8, 1).unwrap();
        memory.copy(0, &memory, 100 * PAGE_SIZE, 2 * PAGE_SIZE as usize, true).unwrap();
        memory.update_u32(255 * PAGE_SIZE, |word| word + 1).unwrap();
        memory.read(200 * PAGE_SIZE, &mut [0]).unwrap();
        let pages = |range: Range<u64>| range.start * PAGE_SIZE..range.end * PAGE_SIZE;
        let written = [pages(2..4), pages(31..33), pages(100..102), pages(255..256)];
        assert_eq!(reader.ranges(), written);
        memory.set_log(None);
        memory.write(7 * PAGE_SIZE, &[1]).unwrap();
        assert_eq!(reader.ranges(), written, "only while it records");
    }

    proptest! {
        #[test]
        fn each_written_page_and_no_other_is_recorded(
            writes in prop::collection::vec((0..MIB, 0..100_000_u64), 0..20),
        ) {
            let len = 2 * MIB;
            let (log, file) = WriteLog::create(len).unwrap();
            let mut expected = vec![false; (len / PAGE_SIZE) as usize];
            for (offset, len) in writes {
                log.note(offset, len);
                for at in offset..offset + len {
                    expected[(at / PAGE_SIZE) as usize] = true;
                }
            }
            let mut found = vec![false; expected.len()];
            let reader = WriteLog::open(file.as_fd(), len).unwrap();
            for page in reader.ranges().into_iter().flat_map(|range| range.step_by(4096)) {
                found[(page / PAGE_SIZE) as usize] = true;
            }
            prop_assert_eq!(found, expected);
        }
    }
}
