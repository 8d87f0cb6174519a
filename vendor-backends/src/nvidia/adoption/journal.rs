//! File with the records of a client, which outlives its process.
//!
//! The state comes into force with the worker's own state, whose record has the state's number
//! ([`mdev_core::gpu::Adoption::position`]). The other records come into force by one store.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use ipc::record_file::{RecordFile, Slots};
use ipc::seqpacket::{decode, encode};
use nvidia_rm::rm_client::HandleRecord;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// `"TSNVCLI"` and the version of the file and its records.
const MAGIC: u64 = u64::from_le_bytes(*b"TSNVCLI\x01");

/// Slots of the state: room for some 150,000 mappings.
const STATES: Slots = Slots::new(4096, 4 << 20);
/// Length of a slot of the other records, in bytes.
const LIVE_BYTES: u64 = 16 << 10;
/// Offset of the word with the last handle. The words before are the magic number and the live
/// records' numbers.
const HANDLE: u64 = 24;
/// Length of the file. Pages that are not written take no memory.
const BYTES: u64 = Live::Accounting.slots().end();

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

    const fn slots(self) -> Slots {
        Slots::new(STATES.end() + 2 * LIVE_BYTES * self as u64, LIVE_BYTES)
    }
}

/// Records of a client.
#[derive(Debug)]
pub struct Journal {
    file: RecordFile,
    /// Last contents of the live records.
    live: [Mutex<Vec<u8>>; 2],
}

impl Journal {
    /// Creates the file.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let (file, fd) = RecordFile::create(c"nvidia-client", MAGIC, BYTES)?;
        Ok((Self { file, live: Default::default() }, fd))
    }

    /// Opens the file of an earlier process. `None` if it is of another version.
    pub fn open(fd: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        let file = RecordFile::open(fd, MAGIC, BYTES)?;
        Ok(file.map(|file| Self { file, live: Default::default() }))
    }

    /// Writes a state with a number, which is not in force yet. The one before stays. Returns false
    /// if the state is too long.
    #[must_use]
    pub fn write_state(&self, number: u64, state: &impl Serialize) -> bool {
        encode(state).is_ok_and(|contents| self.file.write(STATES, number, &contents))
    }

    /// Returns the state with a number, if it is whole.
    pub fn state<T: DeserializeOwned>(&self, number: u64) -> Option<T> {
        decode(&self.file.read(STATES, number)?).ok()
    }

    /// Returns the last handle with which an object may have been made.
    pub fn last_handle(&self) -> u32 {
        // Another value is that of a compromised worker, and as good as any.
        self.file.load(HANDLE) as u32
    }

    /// Writes a live record and brings it into force, unless it is that already. One that is too
    /// long is left out, and logged.
    pub fn write_live(&self, kind: Live, record: &impl Serialize) {
        let mut last = self.live[kind as usize].lock().unwrap_or_else(PoisonError::into_inner);
        let contents = match encode(record) {
            Ok(contents) if contents == *last => return,
            Ok(contents) => contents,
            Err(error) => return log::warn!("Cannot record the state of the vGPU: {error}"),
        };
        let number = self.file.load(kind.word()).wrapping_add(1);
        if self.file.write(kind.slots(), number, &contents) {
            self.file.store(kind.word(), number);
            *last = contents;
        } else {
            log::warn!("The state of the vGPU is too long to be recorded");
        }
    }

    /// Returns a live record, if there is a whole one.
    pub fn live<T: DeserializeOwned>(&self, kind: Live) -> Option<T> {
        let number = Some(self.file.load(kind.word())).filter(|number| *number != 0)?;
        decode(&self.file.read(kind.slots(), number)?).ok()
    }
}

impl HandleRecord for Journal {
    fn note_handle(&self, handle: u32) {
        self.file.store(HANDLE, handle.into());
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_record_is_in_force_or_the_one_before() {
        let (journal, fd) = Journal::create().unwrap();
        assert_eq!(journal.live::<u32>(Live::Channels), None);
        assert!(journal.write_state(4, &40_u32) && journal.write_state(5, &50_u32));
        journal.write_live(Live::Channels, &7_u32);
        journal.write_live(Live::Accounting, &8_u32);
        journal.write_live(Live::Channels, &9_u32);
        journal.note_handle(u32::MAX);
        let next = Journal::open(fd.as_fd()).unwrap().unwrap();
        assert_eq!((next.state::<u32>(4), next.state::<u32>(5)), (Some(40), Some(50)));
        assert_eq!(next.state::<u32>(6), None, "the slot has an older one");
        assert_eq!(next.last_handle(), u32::MAX);
        // As if the worker had ended within the next record.
        assert!(next.file.write(Live::Channels.slots(), 3, &[1]));
        let live = |kind| next.live::<u32>(kind);
        assert_eq!((live(Live::Channels), live(Live::Accounting)), (Some(9), Some(8)));
        assert!(!next.write_state(6, &vec![0_u8; 4 << 20]), "too long");
    }
}
