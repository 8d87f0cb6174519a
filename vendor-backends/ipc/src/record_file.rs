//! Records by which a process adopts the work of one that died.
//!
//! The file has one writer, and outlives it. A record has two slots: a new one is written to the
//! slot that is not in force, and one store of its number to a word of the file, or to another
//! file, brings it into force. So the writer can end between any two instructions, and a whole
//! record is in force. The checksum is for writers that a guest has compromised.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::mem::{Mapping, sealed_memfd};

/// Offset of the word with the magic number and the version.
const MAGIC: u64 = 0;

/// Number, length and checksum before the contents of a slot.
const HEADER: u64 = 16;

/// Two slots of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    offset: u64,
    bytes: u64,
}

impl Slots {
    /// Places two slots of `bytes` bytes each at an offset. Both are multiples of 8.
    pub const fn new(offset: u64, bytes: u64) -> Self {
        Self { offset, bytes }
    }

    /// Returns the offset behind both slots.
    pub const fn end(self) -> u64 {
        self.offset + 2 * self.bytes
    }

    /// Returns the offset of the slot of the record with a number.
    pub const fn of(self, number: u64) -> u64 {
        self.offset + (number & 1) * self.bytes
    }
}

/// A file with records, and words that change by one store.
#[derive(Clone, Debug)]
pub struct RecordFile(Arc<Mapping>);

impl RecordFile {
    /// Creates a file of `bytes` bytes. Pages that are not written take no memory.
    ///
    /// # Errors
    ///
    /// Fails if the process has no room for a descriptor or a mapping.
    pub fn create(name: &CStr, magic: u64, bytes: u64) -> io::Result<(Self, OwnedFd)> {
        let fd = sealed_memfd(name, bytes)?;
        let file = Self::map(fd.as_fd(), bytes)?;
        file.begin(magic);
        Ok((file, fd))
    }

    /// Opens the file of an earlier process. `None` if it is of another version.
    ///
    /// # Errors
    ///
    /// As [`Self::create`].
    pub fn open(fd: BorrowedFd<'_>, magic: u64, bytes: u64) -> io::Result<Option<Self>> {
        let file = Self::map(fd, bytes)?;
        Ok((file.magic() == magic).then_some(file))
    }

    /// Maps a file that may have no magic number yet.
    ///
    /// # Errors
    ///
    /// As [`Self::create`].
    pub fn map(fd: BorrowedFd<'_>, bytes: u64) -> io::Result<Self> {
        Mapping::new(fd, 0, bytes, true).map(Self)
    }

    /// Returns the magic number, or 0.
    pub fn magic(&self) -> u64 {
        self.load(MAGIC)
    }

    /// Sets the magic number.
    pub fn begin(&self, magic: u64) {
        self.store(MAGIC, magic);
    }

    /// Returns the memory of the file.
    pub fn memory(&self) -> &Mapping {
        &self.0
    }

    /// Returns the word at an offset, a multiple of 8.
    pub fn load(&self, word: u64) -> u64 {
        self.0.load_u64(word).unwrap_or_default()
    }

    /// Sets the word at an offset, a multiple of 8.
    pub fn store(&self, word: u64, value: u64) {
        self.0.store_u64(word, value);
    }

    /// Writes a record that is not in force yet. Returns false, with the record before whole, if it
    /// is too long.
    #[must_use]
    pub fn write(&self, slots: Slots, number: u64, contents: &[u8]) -> bool {
        let Ok(len) = u32::try_from(contents.len()) else { return false };
        if u64::from(len) > slots.bytes - HEADER {
            return false;
        }
        let start = slots.of(number);
        self.0.store_u64(start, number);
        self.0.store_u32(start + 8, len);
        self.0.store_u32(start + 12, crc32fast::hash(contents));
        self.0.write(start + HEADER, contents).is_some()
    }

    /// Returns the record with a number, if it is whole.
    pub fn read(&self, slots: Slots, number: u64) -> Option<Vec<u8>> {
        let start = slots.of(number);
        if self.0.load_u64(start)? != number {
            return None;
        }
        let len = u64::from(self.0.load_u32(start + 8)?);
        let checksum = self.0.load_u32(start + 12)?;
        self.checked(start + HEADER, len, slots.bytes - HEADER, checksum)
    }

    /// Returns `len` bytes, which are `limit` at most and must have a CRC-32.
    pub fn checked(&self, start: u64, len: u64, limit: u64, checksum: u32) -> Option<Vec<u8>> {
        if len > limit {
            return None;
        }
        let mut contents = vec![0; usize::try_from(len).ok()?];
        self.0.read(start, &mut contents)?;
        (crc32fast::hash(&contents) == checksum).then_some(contents)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const VERSION: u64 = u64::from_le_bytes(*b"TSRTEST\x01");
    const SLOTS: Slots = Slots::new(64, 256);
    const OTHER: Slots = Slots::new(SLOTS.end(), 32);

    fn file() -> (RecordFile, OwnedFd) {
        RecordFile::create(c"test", VERSION, 4096).unwrap()
    }

    #[test]
    fn a_record_and_the_one_before_are_whole() {
        let (file, fd) = file();
        assert!(file.write(SLOTS, 4, b"four") && file.write(SLOTS, 5, b"five"));
        assert!(file.write(OTHER, 4, &[7; 16]) && !file.write(OTHER, 5, &[7; 17]), "too long");
        let next = RecordFile::open(fd.as_fd(), VERSION, 4096).unwrap().unwrap();
        assert_eq!(next.read(SLOTS, 4).as_deref(), Some(&b"four"[..]));
        assert_eq!(next.read(SLOTS, 5).as_deref(), Some(&b"five"[..]));
        assert_eq!(next.read(OTHER, 4).as_deref(), Some(&[7; 16][..]));
        assert_eq!((next.read(SLOTS, 6), next.read(OTHER, 5)), (None, None));
        assert!(!file.write(SLOTS, 6, &[0; 241]));
        assert_eq!(
            next.read(SLOTS, 4).as_deref(),
            Some(&b"four"[..]),
            "a long one changes nothing"
        );
        file.begin(VERSION + (1 << 56));
        assert!(RecordFile::open(fd.as_fd(), VERSION, 4096).unwrap().is_none(), "another version");
    }

    proptest! {
        /// A record that a compromised writer has damaged is not returned.
        #[test]
        fn damage_is_noticed(contents in proptest::collection::vec(any::<u8>(), 1..240), at in 0_u64..256, bit in 0_u32..8) {
            let (file, _fd) = file();
            prop_assert!(file.write(SLOTS, 1, &contents));
            let mut byte = [0];
            file.memory().read(SLOTS.of(1) + at, &mut byte).unwrap();
            file.memory().write(SLOTS.of(1) + at, &[byte[0] ^ 1_u8 << bit]).unwrap();
            if at < HEADER + contents.len() as u64 {
                prop_assert_eq!(file.read(SLOTS, 1), None);
            } else {
                prop_assert_eq!(file.read(SLOTS, 1), Some(contents));
            }
        }
    }
}
