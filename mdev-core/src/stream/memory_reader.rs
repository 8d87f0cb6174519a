//! Video memory, as chunks of a stream.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use vmm_sys_util::seek_hole::SeekHole;

use super::MAX_CHUNK;
use crate::units::PAGE_SIZE;

/// Reader of the video memory in a file, without the file's holes and without what is zero.
///
/// The VM may write the memory and make holes in it meanwhile.
#[derive(Debug)]
pub struct MemoryReader {
    file: File,
    /// Start of the video memory in the file.
    start: u64,
    /// What is read next.
    next: u64,
    /// End of the data there.
    hole: u64,
    /// End of the video memory.
    end: u64,
    chunk: Vec<u8>,
}

impl MemoryReader {
    /// Reads `len` bytes from `start` of a file.
    pub fn new(file: File, start: u64, len: u64) -> io::Result<Self> {
        let end = start.checked_add(len).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { file, start, next: start, hole: start, end, chunk: vec![0; MAX_CHUNK] })
    }

    /// Returns the next chunk and its offset in the video memory; `None` at the end.
    pub fn next_chunk(&mut self) -> io::Result<Option<(u64, &[u8])>> {
        loop {
            if self.next >= self.hole && !self.seek_data()? {
                return Ok(None);
            }
            let at = self.next;
            let len = (self.hole - at).min(MAX_CHUNK as u64) as usize;
            self.file.read_exact_at(&mut self.chunk[..len], at)?;
            self.next += len as u64;
            if !is_zero(&self.chunk[..len]) {
                return Ok(Some((at - self.start, &self.chunk[..len])));
            }
        }
    }

    /// Goes on to the next data. Returns false if there is none.
    fn seek_data(&mut self) -> io::Result<bool> {
        let Some(data) = self.file.seek_data(self.next)?.filter(|data| *data < self.end) else {
            return Ok(false);
        };
        let hole = self.file.seek_hole(data)?.unwrap_or(self.end);
        self.next = data;
        // At least a page, even if the data is gone again.
        self.hole = hole.max(data.saturating_add(PAGE_SIZE)).min(self.end);
        Ok(true)
    }
}

/// Returns whether all bytes are zero, by a comparison of memory.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    match bytes {
        [] => true,
        [first, rest @ ..] => *first == 0 && *rest == bytes[..rest.len()],
    }
}
