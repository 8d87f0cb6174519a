//! Memory that a program has registered: parts of a file of the program.
//!
//! A program's own pages are in several parts where the program had some of them shared before,
//! such as those of an earlier registration.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;

use mdev_core::gpu::{Backing, Client, GpuError, GuestRam};
use mdev_core::ids::MemoryId;
use mdev_core::memory_file::MemoryFile;
use mdev_core::units::{PAGE_SIZE, is_aligned};
use serde::{Deserialize, Serialize};

/// Maximum number of parts. Each needs an import.
const MAX_PARTS: usize = 256;

/// Parts of a file, in the order of the memory. The caller has the file.
#[derive(Debug)]
pub struct FileMemory {
    parts: Vec<Part>,
}

/// Contiguous part of the file.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// Offset in the memory, in bytes.
    at: u64,
    /// Offset in the file, in bytes.
    start: u64,
    len: u64,
    /// Its import into the GPU, once it was needed.
    import: Option<MemoryId>,
}

/// Offset in the file and length of a part, in bytes, and its import.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePart(u64, u64, Option<MemoryId>);

impl FileMemory {
    /// Returns parts of a program's file: offsets and lengths, in order. `None` if the file is no
    /// memory file, or if a part is not in it.
    pub fn of_program(
        file: BorrowedFd<'_>,
        ranges: impl IntoIterator<Item = (u64, u64)>,
    ) -> Option<Self> {
        // Only memory: another file could make this process wait.
        let size = MemoryFile::new(file).and_then(|memory| memory.len()).ok()?;
        let (mut parts, mut at) = (Vec::<Part>::new(), 0_u64);
        for (start, len) in ranges {
            let end = start.checked_add(len)?;
            if len == 0 || !is_aligned(start | len, PAGE_SIZE) || end > size {
                return None;
            }
            let full = parts.len() == MAX_PARTS;
            match parts.last_mut() {
                Some(last) if last.start + last.len == start => last.len += len,
                _ if full => return None,
                _ => parts.push(Part { at, start, len, import: None }),
            }
            at = at.checked_add(len)?;
        }
        Some(Self { parts })
    }

    /// Returns the parts, for [`Self::adopt`].
    pub fn parts(&self) -> Vec<FilePart> {
        let parts = self.parts.iter();
        parts.map(|Part { start, len, import, .. }| FilePart(*start, *len, *import)).collect()
    }

    /// Adopts the memory of another process. `None` if it cannot be.
    pub fn adopt(file: BorrowedFd<'_>, parts: &[FilePart]) -> Option<Self> {
        let mut memory = Self::of_program(file, parts.iter().map(|part| (part.0, part.1)))?;
        // Neighbours were joined then.
        if memory.parts.len() != parts.len() {
            return None;
        }
        for (part, FilePart(_, _, import)) in memory.parts.iter_mut().zip(parts) {
            part.import = *import;
        }
        Some(memory)
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> u64 {
        self.parts.last().map_or(0, |part| part.at + part.len)
    }

    /// Returns the offset in the file, if the memory is in one part.
    pub fn start(&self) -> Option<u64> {
        let [part] = self.parts.as_slice() else { return None };
        Some(part.start)
    }

    /// Writes bytes, up to the end of the memory.
    pub fn write(&self, file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let (mut from, mut rest) = (offset, bytes);
        for part in &self.parts {
            let Some(skip) = from.checked_sub(part.at).filter(|skip| *skip < part.len) else {
                continue;
            };
            let count = (part.len - skip).min(rest.len() as u64);
            let (now, later) = rest.split_at(count as usize);
            file.write_all_at(now, part.start + skip)?;
            (from, rest) = (from + count, later);
        }
        Ok(())
    }

    /// Returns where `len` bytes are for the GPU, in pieces.
    pub fn import(
        &mut self,
        file: BorrowedFd<'_>,
        gpu: &mut dyn Client,
        offset: u64,
        len: u64,
    ) -> Result<Vec<(Backing, u64)>, GpuError> {
        let (mut pieces, mut from, mut missing) = (Vec::new(), offset, len);
        for part in &mut self.parts {
            let Some(skip) = from.checked_sub(part.at).filter(|skip| *skip < part.len) else {
                continue;
            };
            if missing == 0 {
                break;
            }
            let memory = if let Some(memory) = part.import {
                memory
            } else {
                let (offset, len) = (part.start, part.len);
                let ram = GuestRam { fd: file, offset, len, writable: true };
                *part.import.insert(gpu.import(ram)?)
            };
            let piece = (part.len - skip).min(missing);
            pieces.push((Backing::Guest { memory, offset: skip }, piece));
            (from, missing) = (from + piece, missing - piece);
        }
        Ok(pieces)
    }

    /// Returns the imports, which the caller releases.
    pub fn into_imports(self) -> impl Iterator<Item = MemoryId> {
        self.parts.into_iter().filter_map(|part| part.import)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use ipc::mem::SharedMemory;
    use proptest::prelude::*;

    use super::*;

    const PAGES: u64 = 16;

    #[test]
    fn parts_that_are_not_in_the_file_are_refused() {
        let file = SharedMemory::new(c"test", PAGES * PAGE_SIZE).unwrap().fd;
        let parts = |ranges: &[(u64, u64)]| FileMemory::of_program(file.as_fd(), ranges.to_vec());
        let page = PAGE_SIZE;
        assert_eq!(parts(&[(0, page), (page, page)]).unwrap().parts.len(), 1, "neighbours");
        assert_eq!(parts(&[(page, page), (0, page)]).unwrap().parts.len(), 2);
        for bad in [(PAGES * page, page), (0, 0), (1, page), (0, page + 1), (u64::MAX - 1, page)] {
            assert!(parts(&[(0, page), bad]).is_none(), "{bad:x?}");
        }
        let many = |count: u64| (0..count).map(|n| (n % 2 * 4 * page, page)).collect::<Vec<_>>();
        assert!(parts(&many(MAX_PARTS as u64)).is_some());
        assert!(parts(&many(MAX_PARTS as u64 + 1)).is_none());
    }

    proptest! {
        #[test]
        fn each_byte_has_its_place(
            pages in proptest::collection::vec(0..PAGES, 1..6),
            (from, len) in (0_u64..6 * PAGE_SIZE, 0_usize..3 * PAGE_SIZE as usize),
        ) {
            // A page of the file is in the memory once.
            let mut pages = pages;
            let mut seen = std::collections::BTreeSet::new();
            pages.retain(|page| seen.insert(*page));
            let file = SharedMemory::new(c"test", PAGES * PAGE_SIZE).unwrap();
            let ranges = pages.iter().map(|page| (page * PAGE_SIZE, PAGE_SIZE));
            let memory = FileMemory::of_program(file.fd.as_fd(), ranges).unwrap();
            prop_assert_eq!(memory.bytes(), pages.len() as u64 * PAGE_SIZE);
            let bytes: Vec<u8> = (0..len).map(|n| (n % 251) as u8 + 1).collect();
            memory.write(&File::from(file.fd), from, &bytes).unwrap();
            for (index, page) in pages.iter().enumerate() {
                let mut found = vec![0; PAGE_SIZE as usize];
                file.mapping.read(page * PAGE_SIZE, &mut found).unwrap();
                let start = index as u64 * PAGE_SIZE;
                for (at, byte) in (start..).zip(found) {
                    let expected = at.checked_sub(from).and_then(|n| bytes.get(n as usize));
                    prop_assert_eq!(byte, expected.copied().unwrap_or(0), "{}", at);
                }
            }
        }
    }
}
