//! Video memory that is no file, as chunks of a stream: it is copied through staging memory, piece
//! by piece.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::memory_reader::is_zero;
use super::{MAX_CHUNK, StreamError};
use crate::gpu::StagedCopy;

/// Damage of a stream with more memory than its vGPU.
const TOO_MUCH: &str = "it has more video memory than its vGPU";

/// Reader of video memory without what is zero.
#[derive(Debug)]
pub struct StagedReader {
    /// Staging memory, and its length.
    file: File,
    len: u64,
    /// Length of the video memory.
    end: u64,
    /// Start and end in video memory of the piece that is staged.
    piece: (u64, u64),
    /// Offset in video memory that is read next.
    next: u64,
    chunk: Vec<u8>,
}

impl StagedReader {
    /// Reads `bytes` of video memory through the first `len` bytes of a file.
    pub fn new(file: File, len: u64, bytes: u64) -> io::Result<Self> {
        if len == 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let chunk = vec![0; MAX_CHUNK];
        Ok(Self { file, len, end: bytes, piece: (0, 0), next: 0, chunk })
    }

    /// Returns the next chunk and its offset in video memory; `None` at the end. `copy` makes
    /// copies to staging memory.
    pub fn next_chunk(
        &mut self,
        mut copy: impl FnMut(StagedCopy) -> io::Result<()>,
    ) -> io::Result<Option<(u64, &[u8])>> {
        loop {
            if self.next >= self.end {
                return Ok(None);
            }
            if self.next >= self.piece.1 {
                let len = self.len.min(self.end - self.next);
                copy(StagedCopy { offset: self.next, len, at: 0, fills: false })?;
                self.piece = (self.next, self.next + len);
            }
            let (at, (start, end)) = (self.next, self.piece);
            let len = (end - at).min(MAX_CHUNK as u64) as usize;
            self.file.read_exact_at(&mut self.chunk[..len], at - start)?;
            self.next += len as u64;
            if !is_zero(&self.chunk[..len]) {
                return Ok(Some((at, &self.chunk[..len])));
            }
        }
    }
}

/// Writer of the chunks of a stream to cleared video memory.
#[derive(Debug)]
pub struct StagedWriter {
    /// Staging memory, and its length.
    file: File,
    len: u64,
    /// Length of the video memory.
    end: u64,
    /// Offset in video memory of what is staged, and its length.
    staged: (u64, u64),
}

impl StagedWriter {
    /// Writes `bytes` of video memory through the first `len` bytes of a file.
    pub fn new(file: File, len: u64, bytes: u64) -> io::Result<Self> {
        if len < MAX_CHUNK as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self { file, len, end: bytes, staged: (0, 0) })
    }

    /// Writes a chunk, which is untrusted. `copy` makes copies from staging memory.
    pub fn write(
        &mut self,
        offset: u64,
        data: &[u8],
        copy: impl FnMut(StagedCopy) -> io::Result<()>,
    ) -> Result<(), StreamError> {
        let len = data.len() as u64;
        let end = offset.checked_add(len).filter(|end| *end <= self.end);
        end.ok_or(StreamError::Damaged(TOO_MUCH))?;
        let (start, staged) = self.staged;
        if start + staged != offset || staged + len > self.len {
            self.flush(copy)?;
            self.staged.0 = offset;
        }
        self.file.write_all_at(data, self.staged.1)?;
        self.staged.1 += len;
        Ok(())
    }

    /// Copies what is staged to video memory.
    pub fn flush(&mut self, mut copy: impl FnMut(StagedCopy) -> io::Result<()>) -> io::Result<()> {
        let (offset, len) = std::mem::take(&mut self.staged);
        if len > 0 {
            copy(StagedCopy { offset, len, at: 0, fills: true })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use proptest::prelude::*;

    use super::*;
    use crate::testing::memory;

    const STAGING: u64 = MAX_CHUNK as u64 + 4096;
    const BYTES: u64 = 3 * MAX_CHUNK as u64;

    /// Video memory that is copied to and from a file.
    struct Gpu {
        staging: File,
        vram: RefCell<Vec<u8>>,
        copies: RefCell<Vec<StagedCopy>>,
    }

    impl Gpu {
        fn new(vram: Vec<u8>) -> Self {
            let (vram, copies) = (RefCell::new(vram), RefCell::default());
            Self { staging: memory(STAGING), vram, copies }
        }

        fn copy(&self, copy: StagedCopy) -> io::Result<()> {
            let StagedCopy { offset, len, at, fills } = copy;
            assert!(at + len <= STAGING && offset + len <= BYTES && len > 0, "{copy:?}");
            let mut vram = self.vram.borrow_mut();
            let part = &mut vram[offset as usize..(offset + len) as usize];
            self.copies.borrow_mut().push(copy);
            if fills {
                self.staging.read_exact_at(part, at)
            } else {
                self.staging.write_all_at(part, at)
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn what_is_read_is_what_is_written(
            parts in prop::collection::vec((0..BYTES - 70_000, 1_usize..70_000, 1_u8..), 0..6),
        ) {
            let mut contents = vec![0; BYTES as usize];
            for (at, len, byte) in parts {
                contents[at as usize..at as usize + len].fill(byte);
            }
            let from = Gpu::new(contents.clone());
            let to = Gpu::new(vec![0; BYTES as usize]);
            let file = from.staging.try_clone().unwrap();
            let mut reader = StagedReader::new(file, STAGING, BYTES).unwrap();
            let file = to.staging.try_clone().unwrap();
            let mut writer = StagedWriter::new(file, STAGING, BYTES).unwrap();
            let mut chunks = 0;
            while let Some((at, data)) = reader.next_chunk(|copy| from.copy(copy)).unwrap() {
                writer.write(at, data, |copy| to.copy(copy)).unwrap();
                chunks += 1;
            }
            writer.flush(|copy| to.copy(copy)).unwrap();
            prop_assert!(*to.vram.borrow() == contents);
            prop_assert!(to.copies.borrow().len() <= chunks, "adjacent chunks are copied together");
            prop_assert_eq!(from.copies.borrow().len(), 3);
        }
    }

    #[test]
    fn chunks_beyond_the_memory_are_refused() {
        let gpu = Gpu::new(vec![0; BYTES as usize]);
        let file = gpu.staging.try_clone().unwrap();
        let mut writer = StagedWriter::new(file, STAGING, BYTES).unwrap();
        for offset in [BYTES, BYTES - 4, u64::MAX - 4, u64::MAX] {
            let refused = writer.write(offset, &[1; 8], |copy| gpu.copy(copy));
            assert!(matches!(refused, Err(StreamError::Damaged(_))), "{offset}");
        }
        assert!(StagedWriter::new(memory(4096), 4096, BYTES).is_err(), "shorter than a chunk");
        assert!(StagedReader::new(memory(4096), 0, BYTES).is_err());
        assert!(gpu.copies.borrow().is_empty());
    }
}
