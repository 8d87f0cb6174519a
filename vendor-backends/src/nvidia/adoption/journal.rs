//! File with the records of a client, which outlives its process.
//!
//! Each record has two slots. A worker writes the one that is not in force, so it can end between any
//! two instructions. The state comes into force with the worker's own state, whose record has the
//! state's number ([`mdev_core::gpu::Client::position`]). The other records come into force by one
//! store.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::mem::{Mapping, sealed_memfd};

/// `"TSNVCLI"` and the version of the file and its records.
const MAGIC: u64 = u64::from_le_bytes(*b"TSNVCLI\x03");
/// Version with shorter slots.
const MAGIC_V2: u64 = u64::from_le_bytes(*b"TSNVCLI\x02");

/// Slots of the state, in bytes: some 150,000 mappings.
const STATE_BYTES: u64 = 4 << 20;
/// Slots of the state in a file of version 2: some 10,000 mappings.
const STATE_BYTES_V2: u64 = 256 << 10;
/// Slots of the other records.
const LIVE_BYTES: u64 = 16 << 10;
/// Offset of the word with the last handle. The words before are the magic number and the live
/// records' numbers.
const HANDLE: u64 = 24;
/// Offset of the first slot.
const SLOTS: u64 = 4096;
/// Number, length and checksum before the contents of a slot.
const HEADER: u64 = 16;

/// Record that is written when it changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Live {
    /// Gate, slices and errors of the channels.
    Channels,
    /// Engine time and activity.
    Accounting,
}

impl Live {
    /// Offset of the word with the number of the record in force.
    const fn word(self) -> u64 {
        8 + 8 * self as u64
    }
}

/// Where the slots of a file are.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// Length of a slot of the state.
    state_bytes: u64,
}

impl Layout {
    const CURRENT: Self = Self { state_bytes: STATE_BYTES };

    fn of(magic: u64) -> Option<Self> {
        match magic {
            MAGIC => Some(Self::CURRENT),
            MAGIC_V2 => Some(Self { state_bytes: STATE_BYTES_V2 }),
            _ => None,
        }
    }

    const fn state(self, number: u64) -> u64 {
        SLOTS + (number & 1) * self.state_bytes
    }

    const fn live(self, kind: Live, number: u64) -> u64 {
        SLOTS + 2 * self.state_bytes + (2 * kind as u64 + (number & 1)) * LIVE_BYTES
    }

    /// Length of the file. Pages that are not written take no memory.
    const fn bytes(self) -> u64 {
        SLOTS + 2 * self.state_bytes + 4 * LIVE_BYTES
    }
}

/// Records of a client.
#[derive(Debug)]
pub struct Journal {
    memory: Arc<Mapping>,
    layout: Layout,
    /// Last contents of the live records.
    live: [Mutex<Vec<u8>>; 2],
}

impl Journal {
    /// Creates the file.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let layout = Layout::CURRENT;
        let fd = sealed_memfd(c"nvidia-client", layout.bytes())?;
        let memory = Mapping::new(fd.as_fd(), 0, layout.bytes(), true)?;
        memory.store_u64(0, MAGIC);
        Ok((Self { memory, layout, live: Default::default() }, fd))
    }

    /// Opens the file of an earlier process, which keeps its layout. `None` if it is of another
    /// version.
    pub fn open(fd: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        let magic = Mapping::new(fd, 0, SLOTS, false)?.load_u64(0);
        let Some(layout) = magic.and_then(Layout::of) else { return Ok(None) };
        let memory = Mapping::new(fd, 0, layout.bytes(), true)?;
        Ok(Some(Self { memory, layout, live: Default::default() }))
    }

    /// Writes a state with a number, which is not in force yet. The one before stays. Returns false
    /// if the state is too long.
    #[must_use]
    pub fn write_state(&self, number: u64, contents: &[u8]) -> bool {
        self.write(self.layout.state(number), self.layout.state_bytes, number, contents)
    }

    /// Returns the state with a number, if it is whole, and what follows it.
    pub fn state<T: DeserializeOwned, U: DeserializeOwned + Default>(
        &self,
        number: u64,
    ) -> Option<(T, U)> {
        let contents = self.read(self.layout.state(number), self.layout.state_bytes, number)?;
        decode(&contents)
    }

    /// Notes that an object is about to be made with a handle.
    pub fn note_handle(&self, handle: u32) {
        self.memory.store_u32(HANDLE, handle);
    }

    /// Returns the last handle with which an object may have been made.
    pub fn last_handle(&self) -> u32 {
        self.memory.load_u32(HANDLE).unwrap_or_default()
    }

    /// Writes a live record and brings it into force, unless it is that already. One that is too long
    /// is left out, and logged.
    pub fn write_live(&self, kind: Live, record: &impl Serialize) {
        self.write_live_with(kind, record, None::<&()>);
    }

    /// As [`Self::write_live`], with something that follows the record.
    pub fn write_live_with(
        &self,
        kind: Live,
        record: &impl Serialize,
        more: Option<&impl Serialize>,
    ) {
        let mut last = self.live[kind as usize].lock().unwrap_or_else(PoisonError::into_inner);
        let contents = match encode(record, more) {
            Ok(contents) if contents == *last => return,
            Ok(contents) => contents,
            Err(error) => return log::warn!("Cannot record the state of the vGPU: {error}"),
        };
        let number = self.memory.load_u64(kind.word()).unwrap_or_default().wrapping_add(1);
        if self.write(self.layout.live(kind, number), LIVE_BYTES, number, &contents) {
            self.memory.store_u64(kind.word(), number);
            *last = contents;
        } else {
            log::warn!("The state of the vGPU is too long to be recorded");
        }
    }

    /// Returns a live record, if there is a whole one, and what follows it.
    pub fn live<T: DeserializeOwned, U: DeserializeOwned + Default>(
        &self,
        kind: Live,
    ) -> Option<(T, U)> {
        let number = self.memory.load_u64(kind.word()).filter(|number| *number != 0)?;
        let contents = self.read(self.layout.live(kind, number), LIVE_BYTES, number)?;
        decode(&contents)
    }

    fn write(&self, slot: u64, bytes: u64, number: u64, contents: &[u8]) -> bool {
        let Some(len) = u32::try_from(contents.len()).ok() else { return false };
        if u64::from(len) > bytes - HEADER {
            return false;
        }
        self.memory.store_u64(slot, number);
        self.memory.store_u32(slot + 8, len);
        self.memory.store_u32(slot + 12, crc32fast::hash(contents));
        self.memory.write(slot + HEADER, contents).is_some()
    }

    fn read(&self, slot: u64, bytes: u64, number: u64) -> Option<Vec<u8>> {
        if self.memory.load_u64(slot)? != number {
            return None;
        }
        let len = u64::from(self.memory.load_u32(slot + 8)?);
        if len > bytes - HEADER {
            return None;
        }
        let mut contents = vec![0; len as usize];
        self.memory.read(slot + HEADER, &mut contents)?;
        (self.memory.load_u32(slot + 12)? == crc32fast::hash(&contents)).then_some(contents)
    }
}

/// Encodes a record and what follows it. Without that, workers of earlier releases can read it.
pub fn encode(record: &impl Serialize, more: Option<&impl Serialize>) -> io::Result<Vec<u8>> {
    let mut contents = crate::seqpacket::encode(record)?;
    if let Some(more) = more {
        contents.extend(crate::seqpacket::encode(more)?);
    }
    Ok(contents)
}

fn decode<T: DeserializeOwned, U: DeserializeOwned + Default>(contents: &[u8]) -> Option<(T, U)> {
    let (record, rest) = postcard::take_from_bytes(contents).ok()?;
    let more = if rest.is_empty() { U::default() } else { crate::seqpacket::decode(rest).ok()? };
    Some((record, more))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_in_force_or_the_one_before() {
        let (journal, fd) = Journal::create().unwrap();
        assert!(journal.live::<u32, ()>(Live::Channels).is_none());
        let encoded = |value: u32| crate::seqpacket::encode(&value).unwrap();
        assert!(journal.write_state(4, &encoded(40)) && journal.write_state(5, &encoded(50)));
        journal.write_live(Live::Channels, &7_u32);
        journal.write_live(Live::Accounting, &8_u32);
        journal.write_live(Live::Channels, &9_u32);
        let next = Journal::open(fd.as_fd()).unwrap().unwrap();
        let state = |number| next.state::<u32, u64>(number);
        assert_eq!((state(4), state(5)), (Some((40, 0)), Some((50, 0))));
        assert_eq!(state(6), None, "the slot has an older one");
        let live = |kind| next.live::<u32, ()>(kind).map(|(record, ())| record);
        assert_eq!((live(Live::Channels), live(Live::Accounting)), (Some(9), Some(8)));
        // As if the worker had ended within the next record.
        let slot = Layout::CURRENT.live(Live::Channels, 3);
        next.memory.store_u64(slot, 3);
        next.memory.store_u32(slot + 8, u32::MAX);
        assert_eq!(live(Live::Channels), Some(9));
        assert!(!next.write_state(6, &vec![0; STATE_BYTES as usize]), "too long");
    }

    #[test]
    fn a_file_of_version_2_keeps_its_layout() {
        let layout = Layout { state_bytes: STATE_BYTES_V2 };
        let fd = sealed_memfd(c"nvidia-client", layout.bytes()).unwrap();
        let memory = Mapping::new(fd.as_fd(), 0, layout.bytes(), true).unwrap();
        memory.store_u64(0, MAGIC_V2);
        let journal = Journal { memory, layout, live: Default::default() };
        assert!(journal.write_state(1, &encode(&7_u32, None::<&()>).unwrap()));
        journal.write_live(Live::Accounting, &9_u32);
        let next = Journal::open(fd.as_fd()).unwrap().unwrap();
        assert_eq!(next.state::<u32, ()>(1), Some((7, ())));
        assert_eq!(next.live::<u32, ()>(Live::Accounting), Some((9, ())));
        assert!(!next.write_state(2, &vec![0; STATE_BYTES_V2 as usize]), "too long");
    }

    #[test]
    fn what_follows_a_record_may_be_missing() {
        let (journal, _fd) = Journal::create().unwrap();
        journal.write_live_with(Live::Channels, &7_u32, Some(&vec![8_u32]));
        assert_eq!(journal.live(Live::Channels), Some((7_u32, vec![8_u32])));
        journal.write_live(Live::Channels, &7_u32);
        assert_eq!(journal.live(Live::Channels), Some((7_u32, Vec::<u32>::new())));
        assert!(journal.write_state(1, &encode(&1_u32, Some(&2_u64)).unwrap()));
        assert_eq!(journal.state(1), Some((1_u32, 2_u64)));
    }

    #[test]
    fn damage_is_noticed() {
        let (journal, fd) = Journal::create().unwrap();
        journal.write_live(Live::Accounting, &[1_u64; 32]);
        // Length, checksum and contents.
        for at in 0..10 {
            let at = Layout::CURRENT.live(Live::Accounting, 1) + 8 + at * 4;
            let word = journal.memory.load_u32(at).unwrap();
            journal.memory.store_u32(at, word ^ 1 << 9);
            let damaged = journal.live::<[u64; 32], ()>(Live::Accounting);
            assert!(damaged.is_none(), "{at}");
            journal.memory.store_u32(at, word);
        }
        journal.memory.store_u64(0, MAGIC + (1 << 56));
        assert!(Journal::open(fd.as_fd()).unwrap().is_none(), "another version");
    }
}
