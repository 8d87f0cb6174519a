//! Places of a vGPU's memory in a file with a stream, so that several threads can read it.
//!
//! An index reads what is small, and the headers of all other chunks. The order and the
//! completeness of the chunks are checked then; the checksum of memory is checked where it is read
//! ([`ChunkPlace::checksum`]).

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::order::{Order, PartKind};
use super::{ChunkHeader, HEADER, Head, MORE, Part, START, StreamError, check_start};

/// Limit of the chunks with memory of one vGPU.
const MAX_CHUNKS: usize = 4 << 20;

/// Place of a chunk with memory in a file.
#[derive(Clone, Copy, Debug)]
pub struct ChunkPlace {
    /// Offset of the data in the file in bytes.
    pub at: u64,
    /// Offset in video memory in bytes, or guest-physical address.
    pub offset: u64,
    /// Length of the data in bytes, at most [`MAX_CHUNK`](super::MAX_CHUNK).
    pub len: usize,
    kind: u32,
    sum: u32,
}

impl ChunkPlace {
    /// Returns the checksum of the header, to which the data are to be added.
    pub fn checksum(&self) -> ChunkChecksum {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&self.kind.to_le_bytes());
        hasher.update(&(self.len as u32).to_le_bytes());
        hasher.update(&self.offset.to_le_bytes());
        ChunkChecksum { hasher, sum: self.sum }
    }

    /// Reads the data from the file, and checks them.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, or the data are not those that were written.
    pub fn load(&self, file: &File, data: &mut Vec<u8>) -> Result<(), StreamError> {
        data.resize(self.len, 0);
        file.read_exact_at(data, self.at)?;
        let mut sum = self.checksum();
        sum.update(data);
        sum.check()
    }
}

/// Checksum of a chunk whose data are read in pieces.
#[derive(Debug)]
pub struct ChunkChecksum {
    hasher: crc32fast::Hasher,
    sum: u32,
}

impl ChunkChecksum {
    /// Adds the next bytes of the data.
    pub fn update(&mut self, data: &[u8]) {
        self.hasher.update(data);
    }

    /// Compares the checksum with that of the stream.
    ///
    /// # Errors
    ///
    /// Fails if the data are not those that were written.
    pub fn check(self) -> Result<(), StreamError> {
        if self.hasher.finalize() == self.sum {
            return Ok(());
        }
        Err(StreamError::Damaged(super::WRONG_SUM))
    }
}

/// One vGPU of a file, with the places of its memory.
#[derive(Debug)]
pub struct IndexedVgpu {
    /// Description.
    pub head: Head,
    /// State, whose checksum is right.
    pub state: Vec<u8>,
    /// Guest memory in ascending order.
    pub guest: Vec<ChunkPlace>,
    /// Video memory in ascending order, within that of the description.
    pub memory: Vec<ChunkPlace>,
    /// The file has a VM, too.
    pub machine: bool,
}

impl IndexedVgpu {
    fn new(head: Head) -> Self {
        let (state, guest, memory) = (Vec::new(), Vec::new(), Vec::new());
        Self { head, state, guest, memory, machine: false }
    }

    /// Finds the vGPU of this index in a file, which is untrusted input. The file must not change
    /// until its memory is read.
    ///
    /// # Errors
    ///
    /// Fails if the file is no complete stream, or has fewer vGPUs.
    pub fn find(file: &File, index: usize) -> Result<Self, StreamError> {
        let end = file.metadata()?.len();
        let mut start = [0; START];
        match file.read_exact_at(&mut start, 0).map_err(StreamError::from) {
            Err(StreamError::Cut) => return Err(StreamError::Foreign),
            other => other?,
        }
        check_start(&start)?;
        let mut chunks = Chunks { file, next: START as u64, end, data: Vec::new() };
        let mut order = Order::default();
        let (_, place, chunk) = chunks.next_chunk()?;
        chunks.load(place)?;
        let mut vgpu = Self::new(order.begin(chunk, &chunks.data)?);
        let mut number = 0;
        loop {
            let (begin, place, chunk) = chunks.next_chunk()?;
            let part = order.admit(chunk, begin)?;
            match part {
                PartKind::Guest { .. } if number == index => add(&mut vgpu.guest, place)?,
                PartKind::Memory { .. } if number == index => add(&mut vgpu.memory, place)?,
                PartKind::Machine => vgpu.machine = true,
                // Checked by what reads them.
                PartKind::Guest { .. } | PartKind::Memory { .. } => {}
                PartKind::State | PartKind::Next | PartKind::Domain | PartKind::End => {
                    chunks.load(place)?;
                    match part.with(&mut order, &chunks.data)? {
                        Part::State(data) if number == index => vgpu.state.extend_from_slice(data),
                        Part::Next(head) => {
                            if number < index {
                                vgpu = Self::new(head);
                            }
                            number += 1;
                        }
                        Part::End if number < index => return Err(StreamError::Cut),
                        Part::End if chunks.next < end => return Err(StreamError::Damaged(MORE)),
                        Part::End => return Ok(vgpu),
                        _ => {}
                    }
                }
            }
        }
    }
}

fn add(places: &mut Vec<ChunkPlace>, place: ChunkPlace) -> Result<(), StreamError> {
    if places.len() >= MAX_CHUNKS {
        return Err(StreamError::Damaged("it has too many parts"));
    }
    places.push(place);
    Ok(())
}

/// Chunks of a file.
struct Chunks<'a> {
    file: &'a File,
    next: u64,
    end: u64,
    data: Vec<u8>,
}

impl Chunks<'_> {
    /// Returns the offset of the next chunk, its place and its header.
    fn next_chunk(&mut self) -> Result<(u64, ChunkPlace, ChunkHeader), StreamError> {
        let begin = self.next;
        let mut header = [0; HEADER];
        self.file.read_exact_at(&mut header, begin)?;
        let chunk = ChunkHeader::decode(&header)?;
        let at = begin + HEADER as u64;
        self.next = at + chunk.len as u64;
        if self.next > self.end {
            return Err(StreamError::Cut);
        }
        let ChunkHeader { kind, len, offset, sum } = chunk;
        Ok((begin, ChunkPlace { at, offset, len, kind, sum }, chunk))
    }

    /// Reads and checks the data of a chunk.
    fn load(&mut self, place: ChunkPlace) -> Result<(), StreamError> {
        place.load(self.file, &mut self.data)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;
    use crate::ids::{GuestPa, VgpuId};
    use crate::stream::{MAX_CHUNK, StreamReader, StreamWriter};
    use crate::testing::memory;
    use crate::units::MIB;

    fn head(number: u16) -> Head {
        Head {
            tessera: "0.1.0".into(),
            vgpu: VgpuId(uuid::Uuid::from_u128(number.into())),
            mdev_type: "SOFT-256MQ".into(),
            vram_bytes: 4 * MIB,
            place: Some(number),
        }
    }

    /// A VM with two vGPUs.
    fn sample() -> Vec<u8> {
        let mut writer = StreamWriter::new(Vec::new(), &head(0)).unwrap();
        writer.state(&vec![b's'; MAX_CHUNK + 5]).unwrap();
        writer.memory(0x1000, &[1; 0x1000]).unwrap();
        writer.memory(2 * MIB, &vec![2; MAX_CHUNK]).unwrap();
        writer.next(&head(1)).unwrap();
        writer.state(b"other").unwrap();
        writer.guest(GuestPa(0x7000), &[7; 100]).unwrap();
        writer.memory(0, &[3; 0x2000]).unwrap();
        writer.domain(b"<domain/>").unwrap();
        writer.machine(&[9; 5000]).unwrap();
        writer.finish().unwrap()
    }

    fn file(bytes: &[u8]) -> File {
        let mut file = memory(0);
        file.write_all(bytes).unwrap();
        file
    }

    /// Returns the state of a vGPU, and its memory by offsets.
    type Contents = (Head, Vec<u8>, Vec<(u64, Vec<u8>)>);

    fn indexed(bytes: &[u8], index: usize) -> Result<Contents, StreamError> {
        let file = file(bytes);
        let vgpu = IndexedVgpu::find(&file, index)?;
        assert!(vgpu.machine);
        let mut memory = Vec::new();
        for place in vgpu.guest.iter().chain(&vgpu.memory) {
            let mut data = vec![0; place.len];
            file.read_exact_at(&mut data, place.at)?;
            let mut sum = place.checksum();
            data.chunks(1000).for_each(|piece| sum.update(piece));
            sum.check()?;
            memory.push((place.offset, data));
        }
        Ok((vgpu.head, vgpu.state, memory))
    }

    /// The same by a reader of the whole stream.
    fn read(bytes: &[u8]) -> Result<Vec<Contents>, StreamError> {
        let (mut reader, head) = StreamReader::new(bytes)?;
        let mut vgpus = vec![(head, Vec::new(), Vec::new())];
        loop {
            let part = reader.next_part()?;
            if let Part::Next(head) = part {
                vgpus.push((head, Vec::new(), Vec::new()));
                continue;
            }
            let (_, state, memory) = vgpus.last_mut().unwrap();
            match part {
                Part::State(data) => state.extend_from_slice(data),
                Part::Guest { address, data } => memory.push((address.0, data.to_vec())),
                Part::Memory { offset, data } => memory.push((offset, data.to_vec())),
                Part::End => return Ok(vgpus),
                _ => {}
            }
        }
    }

    #[test]
    fn each_vgpu_of_a_file_is_found_as_a_reader_finds_it() {
        let bytes = sample();
        let vgpus = read(&bytes).unwrap();
        assert_eq!(vgpus.len(), 2);
        for (index, expected) in vgpus.iter().enumerate() {
            assert!(indexed(&bytes, index).unwrap() == *expected, "{index}");
        }
        assert!(indexed(&bytes, 2).is_err(), "there is no third one");
        let more = [&bytes[..], &[0; 20]].concat();
        assert!(indexed(&more, 0).is_err(), "more after the end");
        assert!(matches!(indexed(b"TSR", 0), Err(StreamError::Foreign)));
        for len in [12, 200, bytes.len() - 6000, bytes.len() - 1] {
            assert!(matches!(indexed(&bytes[..len], 0), Err(StreamError::Cut)), "{len}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// Changes in the VM's own state are left to its reader.
        #[test]
        fn any_change_is_noticed_or_is_none_of_the_vgpu(
            at in any::<prop::sample::Index>(), bits in 1_u8.., index in 0..2_usize,
        ) {
            let bytes = sample();
            let mut changed = bytes.clone();
            // Most bytes are data; every other change is in the last headers.
            let at = if bits % 2 == 0 { at.index(bytes.len()) } else { bytes.len() - 1 - at.index(14_000) };
            changed[at] ^= bits;
            match (indexed(&changed, index), read(&changed)) {
                (Ok(found), _) => prop_assert!(found == indexed(&bytes, index).unwrap()),
                (Err(_), read) => prop_assert!(read.is_err(), "a reader accepts it"),
            }
        }
    }
}
