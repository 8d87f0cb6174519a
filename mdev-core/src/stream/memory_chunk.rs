//! Chunk of video memory with its checksum, which any thread can make.

use super::memory_reader::is_zero;
use super::{HEADER, MAX_CHUNK, encode_header, kind};

/// Video memory that is not zero, to be written into a stream
/// ([`StreamWriter::memory_chunk`](super::StreamWriter::memory_chunk)).
#[derive(Debug)]
pub struct MemoryChunk {
    offset: u64,
    header: [u8; HEADER],
    data: Vec<u8>,
}

impl MemoryChunk {
    /// Makes a chunk of the memory at an offset in bytes, or returns memory that is zero or longer
    /// than [`MAX_CHUNK`].
    ///
    /// # Errors
    ///
    /// Fails for memory that is not written.
    pub fn new(offset: u64, data: Vec<u8>) -> Result<Self, Vec<u8>> {
        if data.len() > MAX_CHUNK || is_zero(&data) {
            return Err(data);
        }
        Ok(Self { offset, header: encode_header(kind::MEMORY, offset, &data), data })
    }

    /// Returns the offset in video memory in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the contents.
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Returns the memory of the contents, to be used again.
    pub fn into_data(self) -> Vec<u8> {
        self.data
    }

    pub(super) fn encoded(&self) -> (&[u8; HEADER], &[u8]) {
        (&self.header, &self.data)
    }
}
