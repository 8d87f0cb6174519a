//! Stream with the state of a vGPU, or of a VM with its vGPUs: for a file, a pipe, or the migration
//! messages of vfio-user.
//!
//! ```text
//! "TSRVGPU\n"  version u32
//! chunk: kind u32, length u32, offset u64, CRC-32 u32 of these and the data, data
//! ```
//!
//! All numbers are little-endian. The chunks are one [`Head`], the state in pieces, video memory in
//! ascending order without the parts that are zero, and an end with the number of all bytes before
//! it. Before video memory there can be guest memory, in ascending order, if the VM's memory was
//! copied before the vGPU was paused. A saved VM has the same for each further vGPU, a libvirt
//! domain's XML in pieces, and the machine's state in pieces before the end. A reader checks each
//! chunk before it returns the chunk, and the order of the chunks; what it returned is valid as a
//! whole only after the end.

use std::io::{self, Read, Write};
use std::ops::Range;

use serde::{Deserialize, Serialize};

mod index;
mod memory_chunk;
mod memory_reader;
mod order;
mod staged;
#[cfg(test)]
mod tests;

pub use self::index::{ChunkChecksum, ChunkPlace, IndexedVgpu};
pub use self::memory_chunk::MemoryChunk;
pub use self::memory_reader::MemoryReader;
use self::order::Order;
pub use self::staged::{StagedReader, StagedWriter};
use crate::ids::{GuestPa, VgpuId};

/// First bytes of a stream.
const MAGIC: [u8; 8] = *b"TSRVGPU\n";
/// Version of the format. Incremented with every change that an older version cannot read.
pub const VERSION: u32 = 1;
/// Oldest version that is read.
const OLDEST: u32 = 1;
/// Longest data of a chunk, in bytes.
pub const MAX_CHUNK: usize = 1 << 20;
/// Longest state, in bytes.
pub const MAX_STATE: u64 = 256 << 20;
/// Longest description of a libvirt domain, in bytes.
pub const MAX_DOMAIN: u64 = 8 << 20;
/// Largest number of vGPUs in a saved VM.
pub const MAX_VGPUS: usize = 32;
/// Length of the magic number and the version in bytes.
const START: usize = 12;
/// Length of a chunk's header in bytes.
const HEADER: usize = 20;

/// Damage of a stream with bytes after its end.
const MORE: &str = "it goes on after its end";
/// Damage of a chunk.
const WRONG_SUM: &str = "a checksum is wrong";

mod kind {
    pub const HEAD: u32 = 1;
    pub const STATE: u32 = 2;
    pub const MEMORY: u32 = 3;
    pub const END: u32 = 4;
    pub const MACHINE: u32 = 5;
    pub const NEXT: u32 = 6;
    pub const DOMAIN: u32 = 7;
    pub const GUEST: u32 = 8;
}

/// Description of the vGPU that was saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// Version of Tessera, for people.
    pub tessera: String,
    /// The vGPU.
    pub vgpu: VgpuId,
    /// Type, which the vGPU that is restored must have.
    pub mdev_type: String,
    /// Length of the video memory in bytes.
    pub vram_bytes: u64,
    /// In a saved VM: bus in the upper byte, slot and function in the lower byte.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<u16>,
}

/// Part of a stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Part<'a> {
    /// Next bytes of the state.
    State(&'a [u8]),
    /// Video memory. What is left out is zero.
    Memory {
        /// Offset in the vGPU's video memory in bytes.
        offset: u64,
        /// Contents.
        data: &'a [u8],
    },
    /// Guest memory that the vGPU has written while the VM's memory was copied.
    Guest {
        /// Guest-physical address.
        address: GuestPa,
        /// Contents.
        data: &'a [u8],
    },
    /// The next vGPU of a VM.
    Next(Head),
    /// Next bytes of the XML of the VM's libvirt domain.
    Domain(&'a [u8]),
    /// Next bytes of the VM's state, in the VMM's own format.
    Machine(&'a [u8]),
    /// The stream is complete.
    End,
}

/// Error of a stream.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The stream begins with something else.
    #[error("This is no saved vGPU")]
    Foreign,
    /// A version that this version of Tessera does not read.
    #[error("The saved vGPU has format {0}; this version of Tessera reads {OLDEST} to {VERSION}")]
    Version(u32),
    /// The stream ends early.
    #[error("The saved vGPU is not complete: it was cut off")]
    Cut,
    /// A chunk is not what was written.
    #[error("The saved vGPU is damaged: {0}")]
    Damaged(&'static str),
    /// Error of reading.
    #[error("{0}")]
    Io(io::Error),
}

impl From<io::Error> for StreamError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::UnexpectedEof { Self::Cut } else { Self::Io(error) }
    }
}

/// Writer of a stream.
#[derive(Debug)]
pub struct StreamWriter<W> {
    to: W,
    bytes: u64,
    state_bytes: u64,
    domain_bytes: u64,
    machine_bytes: u64,
}

impl<W: Write> StreamWriter<W> {
    /// Begins a stream.
    pub fn new(to: W, head: &Head) -> io::Result<Self> {
        let mut writer = Self { to, bytes: 0, state_bytes: 0, domain_bytes: 0, machine_bytes: 0 };
        writer.write(&MAGIC)?;
        writer.write(&VERSION.to_le_bytes())?;
        writer.chunk(kind::HEAD, 0, &serde_json::to_vec(head)?)?;
        Ok(writer)
    }

    /// Begins the next vGPU of a VM.
    pub fn next(&mut self, head: &Head) -> io::Result<()> {
        self.state_bytes = 0;
        self.chunk(kind::NEXT, 0, &serde_json::to_vec(head)?)
    }

    /// Writes the XML of the VM's libvirt domain. Called once, after the vGPUs.
    pub fn domain(&mut self, xml: &[u8]) -> io::Result<()> {
        xml.chunks(MAX_CHUNK).try_for_each(|piece| self.copy(&Part::Domain(piece)))
    }

    /// Writes the state. Called once, before the video memory.
    pub fn state(&mut self, state: &[u8]) -> io::Result<()> {
        state.chunks(MAX_CHUNK).try_for_each(|piece| self.copy(&Part::State(piece)))
    }

    /// Writes at most [`MAX_CHUNK`] bytes of guest memory, after the state and beyond what was
    /// written before.
    pub fn guest(&mut self, address: GuestPa, data: &[u8]) -> io::Result<()> {
        self.chunk(kind::GUEST, address.0, data)
    }

    /// Writes at most [`MAX_CHUNK`] bytes of video memory, beyond what was written before.
    pub fn memory(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.chunk(kind::MEMORY, offset, data)
    }

    /// Writes a chunk of video memory, beyond what was written before.
    pub fn memory_chunk(&mut self, chunk: &MemoryChunk) -> io::Result<()> {
        let (header, data) = chunk.encoded();
        self.write(header)?;
        self.write(data)
    }

    /// Writes at most [`MAX_CHUNK`] next bytes of the VM's state, after everything else.
    pub fn machine(&mut self, data: &[u8]) -> io::Result<()> {
        self.chunk(kind::MACHINE, self.machine_bytes, data)?;
        self.machine_bytes += data.len() as u64;
        Ok(())
    }

    /// Writes a part of another stream. The end is written by [`Self::finish`].
    pub fn copy(&mut self, part: &Part<'_>) -> io::Result<()> {
        match part {
            Part::State(data) => {
                self.chunk(kind::STATE, self.state_bytes, data)?;
                self.state_bytes += data.len() as u64;
                Ok(())
            }
            Part::Memory { offset, data } => self.memory(*offset, data),
            Part::Guest { address, data } => self.guest(*address, data),
            Part::Next(head) => self.next(head),
            Part::Domain(data) => {
                self.chunk(kind::DOMAIN, self.domain_bytes, data)?;
                self.domain_bytes += data.len() as u64;
                Ok(())
            }
            Part::Machine(data) => self.machine(data),
            Part::End => Ok(()),
        }
    }

    /// Returns what the stream is written to.
    pub fn get_mut(&mut self) -> &mut W {
        &mut self.to
    }

    /// Ends the stream.
    pub fn finish(mut self) -> io::Result<W> {
        self.end()?;
        self.to.flush()?;
        Ok(self.to)
    }

    /// Writes the end. Called once, after everything else.
    pub fn end(&mut self) -> io::Result<()> {
        self.chunk(kind::END, self.bytes, &[])
    }

    fn chunk(&mut self, kind: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        if data.len() > MAX_CHUNK {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.write(&encode_header(kind, offset, data))?;
        self.write(data)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.to.write_all(bytes)?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}

/// Returns the header of a chunk.
fn encode_header(kind: u32, offset: u64, data: &[u8]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[4..8].copy_from_slice(&(data.len() as u32).to_le_bytes());
    header[8..16].copy_from_slice(&offset.to_le_bytes());
    let sum = checksum(&header[..HEADER - 4], data);
    header[HEADER - 4..].copy_from_slice(&sum.to_le_bytes());
    header
}

fn checksum(header: &[u8], data: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(header);
    hasher.update(data);
    hasher.finalize()
}

/// Header of a chunk.
#[derive(Clone, Copy, Debug)]
struct ChunkHeader {
    kind: u32,
    len: usize,
    offset: u64,
    sum: u32,
}

impl ChunkHeader {
    fn decode(bytes: &[u8; HEADER]) -> Result<Self, StreamError> {
        let len = number(&bytes[4..8]) as usize;
        if len > MAX_CHUNK {
            return Err(StreamError::Damaged("a part is too long"));
        }
        let (kind, offset) = (number(&bytes[..4]) as u32, number(&bytes[8..16]));
        Ok(Self { kind, len, offset, sum: number(&bytes[16..]) as u32 })
    }

    fn check(self, bytes: &[u8; HEADER], data: &[u8]) -> Result<(), StreamError> {
        if checksum(&bytes[..HEADER - 4], data) != self.sum {
            return Err(StreamError::Damaged(WRONG_SUM));
        }
        Ok(())
    }
}

/// Checks the magic number and the version.
fn check_start(start: &[u8; START]) -> Result<(), StreamError> {
    let (magic, version) = start.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(StreamError::Foreign);
    }
    match number(version) as u32 {
        OLDEST..=VERSION => Ok(()),
        version => Err(StreamError::Version(version)),
    }
}

/// Reader of a stream, which is untrusted input.
#[derive(Debug)]
pub struct StreamReader<R> {
    from: R,
    bytes: u64,
    data: Vec<u8>,
    order: Order,
}

impl<R: Read> StreamReader<R> {
    /// Reads the beginning of a stream.
    pub fn new(from: R) -> Result<(Self, Head), StreamError> {
        let mut reader = Self { from, bytes: 0, data: Vec::new(), order: Order::default() };
        let mut start = [0; START];
        match reader.fill(&mut start) {
            Err(StreamError::Cut) => return Err(StreamError::Foreign),
            other => other?,
        }
        check_start(&start)?;
        let chunk = reader.chunk()?;
        let head = reader.order.begin(chunk, &reader.data)?;
        Ok((reader, head))
    }

    /// Reads the next part. After the end, returns the end.
    pub fn next_part(&mut self) -> Result<Part<'_>, StreamError> {
        if self.order.ended {
            return Ok(Part::End);
        }
        let at = self.bytes;
        let chunk = self.chunk()?;
        let part = self.order.admit(chunk, at)?;
        if self.order.ended && self.from.read(&mut [0])? > 0 {
            return Err(StreamError::Damaged(MORE));
        }
        part.with(&mut self.order, &self.data)
    }

    /// Reads a chunk into `data`.
    fn chunk(&mut self) -> Result<ChunkHeader, StreamError> {
        let mut header = [0; HEADER];
        self.fill(&mut header)?;
        let chunk = ChunkHeader::decode(&header)?;
        let mut data = std::mem::take(&mut self.data);
        data.resize(chunk.len, 0);
        let filled = self.fill(&mut data);
        self.data = data;
        filled?;
        chunk.check(&header, &self.data)?;
        Ok(chunk)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), StreamError> {
        self.from.read_exact(bytes)?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}

/// Reader of a stream that arrives in pieces, which is untrusted input.
#[derive(Debug, Default)]
pub struct StreamParser {
    /// Bytes that were not read yet, from `next` on.
    buffer: Vec<u8>,
    next: usize,
    /// Bytes of the stream before `next`.
    bytes: u64,
    head: Option<Head>,
    order: Order,
}

impl StreamParser {
    /// Adds the next bytes. [`Self::next_part`] should be called until it returns `None` before
    /// more are added.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.next);
        self.next = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the description; `None` until more bytes have arrived.
    pub fn head(&mut self) -> Result<Option<&Head>, StreamError> {
        if self.bytes == 0 {
            let Some(start) = self.buffer.first_chunk::<START>() else { return Ok(None) };
            check_start(start)?;
            self.consume(START);
        }
        if self.head.is_none() {
            let Some((chunk, data)) = self.chunk()? else { return Ok(None) };
            self.head = Some(self.order.begin(chunk, &self.buffer[data])?);
        }
        Ok(self.head.as_ref())
    }

    /// Returns whether the end has arrived.
    pub fn has_ended(&self) -> bool {
        self.order.ended
    }

    /// Returns the next part; `None` until more bytes have arrived.
    pub fn next_part(&mut self) -> Result<Option<Part<'_>>, StreamError> {
        if self.head()?.is_none() {
            return Ok(None);
        }
        if self.order.ended && self.next < self.buffer.len() {
            return Err(StreamError::Damaged(MORE));
        }
        let at = self.bytes;
        let Some((chunk, data)) = self.chunk()? else { return Ok(None) };
        let part = self.order.admit(chunk, at)?;
        part.with(&mut self.order, &self.buffer[data]).map(Some)
    }

    /// Takes a chunk, if all of it has arrived. Returns the place of its data in the buffer.
    fn chunk(&mut self) -> Result<Option<(ChunkHeader, Range<usize>)>, StreamError> {
        let left = &self.buffer[self.next..];
        let Some(header) = left.first_chunk::<HEADER>() else { return Ok(None) };
        let chunk = ChunkHeader::decode(header)?;
        let Some(data) = left.get(HEADER..HEADER + chunk.len) else { return Ok(None) };
        chunk.check(header, data)?;
        let start = self.next + HEADER;
        self.consume(HEADER + chunk.len);
        Ok(Some((chunk, start..start + chunk.len)))
    }

    fn consume(&mut self, len: usize) {
        self.next += len;
        self.bytes += len as u64;
    }
}

/// Returns the little-endian number in at most eight bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
