//! Stream with the state of a vGPU, or of a VM with its vGPU: for a file, a pipe, or the migration messages of vfio-user.
//!
//! ```text
//! "TSRVGPU\n"  version u32
//! chunk: kind u32, length u32, offset u64, CRC-32 u32 of these and the data, data
//! ```
//!
//! All numbers are little-endian. The chunks are one [`Head`], the state in pieces, video memory in
//! ascending order without the parts that are zero, in a saved VM the machine's state in pieces, and
//! an end with the number of all bytes before it. A reader checks each chunk before it returns the chunk, and the order of the chunks; what it
//! returned is valid as a whole only after the end.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use crate::ids::VgpuId;

/// First bytes of a stream.
const MAGIC: [u8; 8] = *b"TSRVGPU\n";
/// Version of the format. Incremented with every change that an older version cannot read.
pub const VERSION: u32 = 1;
/// Longest data of a chunk, in bytes.
pub const MAX_CHUNK: usize = 1 << 20;
/// Longest state, in bytes.
pub const MAX_STATE: u64 = 256 << 20;
/// Length of a chunk's header in bytes.
const HEADER: usize = 20;

/// Damage of a stream whose parts come in an impossible order.
const DISORDER: &str = "its parts are not in order";

mod kind {
    pub const HEAD: u32 = 1;
    pub const STATE: u32 = 2;
    pub const MEMORY: u32 = 3;
    pub const END: u32 = 4;
    pub const MACHINE: u32 = 5;
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
    #[error("The saved vGPU has format {0}; this version of Tessera reads format {VERSION}")]
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
    machine_bytes: u64,
}

impl<W: Write> StreamWriter<W> {
    /// Begins a stream.
    pub fn new(to: W, head: &Head) -> io::Result<Self> {
        let mut writer = Self { to, bytes: 0, state_bytes: 0, machine_bytes: 0 };
        writer.write(&MAGIC)?;
        writer.write(&VERSION.to_le_bytes())?;
        writer.chunk(kind::HEAD, 0, &serde_json::to_vec(head)?)?;
        Ok(writer)
    }

    /// Writes the state. Called once, before the video memory.
    pub fn state(&mut self, state: &[u8]) -> io::Result<()> {
        state.chunks(MAX_CHUNK).try_for_each(|piece| self.copy(&Part::State(piece)))
    }

    /// Writes at most [`MAX_CHUNK`] bytes of video memory, beyond what was written before.
    pub fn memory(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.chunk(kind::MEMORY, offset, data)
    }

    /// Writes at most [`MAX_CHUNK`] next bytes of the VM's state, after the vGPU.
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
            Part::Machine(data) => self.machine(data),
            Part::End => Ok(()),
        }
    }

    /// Ends the stream.
    pub fn finish(mut self) -> io::Result<W> {
        self.chunk(kind::END, self.bytes, &[])?;
        self.to.flush()?;
        Ok(self.to)
    }

    fn chunk(&mut self, kind: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        if data.len() > MAX_CHUNK {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut header = Vec::with_capacity(HEADER);
        header.extend(kind.to_le_bytes());
        header.extend((data.len() as u32).to_le_bytes());
        header.extend(offset.to_le_bytes());
        let sum = checksum(&header, data);
        header.extend(sum.to_le_bytes());
        self.write(&header)?;
        self.write(data)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.to.write_all(bytes)?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}

fn checksum(header: &[u8], data: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(header);
    hasher.update(data);
    hasher.finalize()
}

/// Reader of a stream, which is untrusted input.
#[derive(Debug)]
pub struct StreamReader<R> {
    from: R,
    bytes: u64,
    data: Vec<u8>,
    state_bytes: u64,
    /// Bytes of the VM's state. `None` before the first.
    machine_bytes: Option<u64>,
    /// End of the video memory that was read. `None` before the first.
    memory_end: Option<u64>,
    vram_bytes: u64,
    ended: bool,
}

impl<R: Read> StreamReader<R> {
    /// Reads the beginning of a stream.
    pub fn new(from: R) -> Result<(Self, Head), StreamError> {
        let mut reader = Self {
            from,
            bytes: 0,
            data: Vec::new(),
            state_bytes: 0,
            machine_bytes: None,
            memory_end: None,
            vram_bytes: 0,
            ended: false,
        };
        let mut start = [0; 12];
        match reader.fill(&mut start) {
            Err(StreamError::Cut) => return Err(StreamError::Foreign),
            other => other?,
        }
        let (magic, version) = start.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(StreamError::Foreign);
        }
        let version = number(version);
        if version != u64::from(VERSION) {
            return Err(StreamError::Version(version as u32));
        }
        let (kind::HEAD, 0) = reader.chunk()? else {
            return Err(StreamError::Damaged("it does not begin with a description"));
        };
        let head: Head = serde_json::from_slice(&reader.data)
            .map_err(|_| StreamError::Damaged("its description cannot be read"))?;
        reader.vram_bytes = head.vram_bytes;
        Ok((reader, head))
    }

    /// Reads the next part.
    pub fn next_part(&mut self) -> Result<Part<'_>, StreamError> {
        if self.ended {
            return Ok(Part::End);
        }
        let before = self.bytes;
        let (kind, offset) = self.chunk()?;
        let len = self.data.len() as u64;
        match kind {
            kind::MACHINE if len > 0 && offset == self.machine_bytes.unwrap_or(0) => {
                self.machine_bytes = Some(offset.saturating_add(len));
                Ok(Part::Machine(&self.data))
            }
            kind::END if len == 0 && offset == before => {
                self.ended = true;
                Ok(Part::End)
            }
            _ if self.machine_bytes.is_some() => Err(StreamError::Damaged(DISORDER)),
            kind::STATE if self.memory_end.is_none() && offset == self.state_bytes => {
                self.state_bytes += len;
                if self.state_bytes > MAX_STATE {
                    return Err(StreamError::Damaged("its state is too long"));
                }
                Ok(Part::State(&self.data))
            }
            kind::MEMORY if len > 0 && offset >= self.memory_end.unwrap_or(0) => {
                let end = offset.checked_add(len).filter(|end| *end <= self.vram_bytes);
                let outside = StreamError::Damaged("it has more video memory than its vGPU");
                self.memory_end = Some(end.ok_or(outside)?);
                Ok(Part::Memory { offset, data: &self.data })
            }
            _ => Err(StreamError::Damaged(DISORDER)),
        }
    }

    /// Reads a chunk into `data`. Returns its kind and offset.
    fn chunk(&mut self) -> Result<(u32, u64), StreamError> {
        let mut header = [0; HEADER];
        self.fill(&mut header)?;
        let (described, sum) = header.split_at(HEADER - 4);
        let len = number(&described[4..8]) as usize;
        if len > MAX_CHUNK {
            return Err(StreamError::Damaged("a part is too long"));
        }
        let mut data = std::mem::take(&mut self.data);
        data.resize(len, 0);
        let filled = self.fill(&mut data);
        self.data = data;
        filled?;
        if number(sum) != u64::from(checksum(described, &self.data)) {
            return Err(StreamError::Damaged("a checksum is wrong"));
        }
        Ok((number(&described[..4]) as u32, number(&described[8..])))
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), StreamError> {
        self.from.read_exact(bytes)?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}

/// Returns the little-endian number in at most eight bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::MIB;

    fn head() -> Head {
        Head {
            tessera: "0.1.0".into(),
            vgpu: VgpuId(uuid::Uuid::from_u128(7)),
            mdev_type: "SOFT-256MQ".into(),
            vram_bytes: 4 * MIB,
        }
    }

    fn sample() -> Vec<u8> {
        let mut writer = StreamWriter::new(Vec::new(), &head()).unwrap();
        writer.state(&vec![b's'; MAX_CHUNK + 5]).unwrap();
        writer.memory(0x1000, &[1; 0x1000]).unwrap();
        writer.memory(2 * MIB, &vec![2; MAX_CHUNK]).unwrap();
        writer.finish().unwrap()
    }

    /// Reads a stream to its end. Returns the state and the video memory.
    fn read(bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>), StreamError> {
        let (mut reader, found) = StreamReader::new(bytes)?;
        let (mut state, mut memory) = (Vec::new(), vec![0; found.vram_bytes.min(4 * MIB) as usize]);
        loop {
            match reader.next_part()? {
                Part::State(piece) => state.extend_from_slice(piece),
                Part::Machine(data) => state.extend_from_slice(data),
                Part::Memory { offset, data } => {
                    memory[offset as usize..][..data.len()].copy_from_slice(data);
                }
                Part::End => return Ok((state, memory)),
            }
        }
    }

    #[test]
    fn what_was_written_is_read() {
        let (state, memory) = read(&sample()).unwrap();
        assert_eq!(state, vec![b's'; MAX_CHUNK + 5]);
        assert_eq!((memory[0xfff], memory[0x1000], memory[0x1fff], memory[0x2000]), (0, 1, 1, 0));
        assert!(memory[2 << 20..3 << 20].iter().all(|byte| *byte == 2));
        let (_, found) = StreamReader::new(&sample()[..]).unwrap();
        assert_eq!(found, head());
    }

    #[test]
    fn foreign_newer_and_cut_streams_are_told_apart() {
        assert!(matches!(read(b""), Err(StreamError::Foreign)));
        assert!(matches!(read(b"QEVM\0\0\0\x03 and more"), Err(StreamError::Foreign)));
        let mut newer = sample();
        newer[8] = 9;
        assert!(matches!(read(&newer), Err(StreamError::Version(9))));
        let whole = sample();
        for len in [12, 40, 200, whole.len() - 20, whole.len() - 1] {
            assert!(matches!(read(&whole[..len]), Err(StreamError::Cut)), "{len}");
        }
    }

    #[test]
    fn parts_in_another_order_are_refused() {
        let write = |parts: &[(u32, u64, usize)]| {
            let mut writer = StreamWriter::new(Vec::new(), &head()).unwrap();
            for (kind, offset, len) in parts {
                writer.chunk(*kind, *offset, &vec![0; *len]).unwrap();
            }
            writer.finish().unwrap()
        };
        let vgpu = [(kind::STATE, 0, 4), (kind::STATE, 4, 4), (kind::MEMORY, 0, 4)];
        read(&write(&vgpu)).unwrap();
        let machine = [(kind::MACHINE, 0, 9), (kind::MACHINE, 9, 4)];
        read(&write(&[&vgpu[..], &machine].concat())).unwrap();
        for parts in [
            &[(kind::STATE, 4, 4)][..],
            &[(kind::MEMORY, 0, 4), (kind::STATE, 0, 4)],
            &[(kind::MEMORY, 4, 4), (kind::MEMORY, 7, 4)],
            &[(kind::MEMORY, 4 * MIB - 1, 2)],
            &[(kind::MEMORY, u64::MAX, 2)],
            &[(kind::MEMORY, 0, 0)],
            &[(kind::MACHINE, 0, 4), (kind::MACHINE, 3, 4)],
            &[(kind::MACHINE, 0, 4), (kind::MEMORY, 0, 4)],
            &[(kind::HEAD, 0, 4)],
            &[(kind::END, 3, 0)],
            &[(9, 0, 4)],
        ] {
            assert!(matches!(read(&write(parts)), Err(StreamError::Damaged(_))), "{parts:?}");
        }
    }

    proptest! {
        #[test]
        fn no_damage_goes_unnoticed(at in any::<prop::sample::Index>(), byte in 1_u8..) {
            let mut bytes = sample();
            let at = at.index(bytes.len());
            bytes[at] ^= byte;
            prop_assert!(read(&bytes).is_err());
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut stream = sample()[..12].to_vec();
            stream.extend(bytes);
            let _ = read(&stream);
        }
    }
}
