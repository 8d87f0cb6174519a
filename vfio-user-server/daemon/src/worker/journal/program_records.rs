//! Records of programs, in a file of their own.
//!
//! A record has what changes with each request, and the length of a log with the state of the
//! programs. The log has the changes of each request. When it has become long, all of the state
//! begins another one, in the other of two areas.
//!
//! A record or a log that is not in force is written, and one store brings it into force. For
//! programs of a VM, whose queue has a thread that records apart from the event loop, it is a store
//! in this file. For those of the host it is the store in the journal.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use ipc::record_file::{RecordFile, Slots};
use serde::{Deserialize, Serialize};

/// `"TSRAQUE"` and the version of the file and its records.
const MAGIC: u64 = u64::from_le_bytes(*b"TSRAQUE\x04");

/// Words at the start of the file: offsets in bytes.
mod word {
    /// Number of the record in force.
    pub const NUMBER: u64 = 8;
    /// 1 if the last record could not be written.
    pub const LOST: u64 = 16;
    /// 1 while the event loop changes what the record has.
    pub const HELD: u64 = 24;
    /// What is being served of the host's programs.
    pub const SERVED: u64 = 32;
    /// Number of workers that tried to continue with the same request.
    pub const ATTEMPTS: u64 = 40;
}

/// A record has a reply of up to 128 KiB, and completions for which there was no room.
const SLOTS: Slots = Slots::new(4096, 1 << 20);
const AREAS: u64 = SLOTS.end();
const AREA_BYTES: u64 = 32 << 20;
/// Length and checksum before each part of a log.
const PART_HEADER: u64 = 8;
/// Length of the file. Pages that are not written take no memory.
const BYTES: u64 = AREAS + 2 * AREA_BYTES;

/// A log is begun anew when it has this length, and four times that of its beginning.
const LONG: u64 = 256 << 10;

/// Log of a record: its area and length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Log {
    area: u8,
    len: u64,
    /// Length of its first part, which has all of the state.
    first: u64,
}

/// File with the records.
#[derive(Debug)]
pub struct ProgramRecords {
    file: RecordFile,
    log: Log,
}

impl ProgramRecords {
    /// Creates the file. Its first record has the number 1.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let (file, fd) = RecordFile::create(c"vgpu-queue", MAGIC, BYTES)?;
        Ok((Self { file, log: Log::default() }, fd))
    }

    /// Opens the file of an earlier worker. `None` if it is of another version.
    pub fn open(fd: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        let file = RecordFile::open(fd, MAGIC, BYTES)?;
        Ok(file.map(|file| Self { file, log: Log::default() }))
    }

    /// Returns the number of the record in force, or 0.
    pub fn number(&self) -> u64 {
        self.file.load(word::NUMBER)
    }

    /// Returns whether the last record could not be written.
    pub fn is_lost(&self) -> bool {
        self.file.load(word::LOST) == 1
    }

    /// Sets whether the last record could not be written.
    pub fn set_lost(&self, lost: bool) {
        if self.is_lost() != lost {
            self.file.store(word::LOST, lost.into());
        }
    }

    /// Returns whether the event loop was changing what the record has.
    pub fn is_held(&self) -> bool {
        self.file.load(word::HELD) == 1
    }

    /// Sets whether the event loop is changing what the record has.
    pub fn set_held(&self, held: bool) {
        self.file.store(word::HELD, held.into());
    }

    /// Returns what was last to be served of the host's programs, or 0.
    pub fn served(&self) -> u64 {
        self.file.load(word::SERVED)
    }

    /// Notes what is going to be served of the host's programs.
    pub fn set_served(&self, served: u64) {
        self.file.store(word::SERVED, served);
    }

    /// Counts an attempt to continue with a request. Returns the number of attempts.
    pub fn count_attempt(&self) -> u64 {
        let attempts = self.file.load(word::ATTEMPTS).saturating_add(1);
        self.file.store(word::ATTEMPTS, attempts);
        attempts
    }

    /// Notes that the request at which workers have died is finished.
    pub fn end_attempts(&self) {
        self.file.store(word::ATTEMPTS, 0);
    }

    /// Brings a record into force. Returns false, and leaves the one before in force, if it is too
    /// long.
    #[must_use]
    pub fn commit(&self, number: u64, contents: &[u8]) -> bool {
        let written = self.file.write(SLOTS, number, contents);
        if written {
            self.file.store(word::NUMBER, number);
        }
        written
    }

    /// Returns a record, if it is whole.
    pub fn record(&self, number: u64) -> Option<Vec<u8>> {
        self.file.read(SLOTS, number)
    }

    /// Adds a part to the log. `all` returns the beginning of another log, if this one is long.
    /// Returns the log that the next record is to have, or `None` if it would be too long.
    #[must_use]
    pub fn append(&mut self, part: &[u8], all: impl FnOnce() -> Vec<u8>) -> Option<Log> {
        let Log { area, len, first } = self.log;
        let is_long = len + part.len() as u64 + PART_HEADER > LONG.max(4 * first);
        let log = if first == 0 || is_long {
            let next = Log { area: area ^ 1, len: 0, first: 0 };
            let log = self.write(next, &all())?;
            Log { first: log.len, ..log }
        } else {
            self.write(self.log, part)?
        };
        self.log = log;
        Some(log)
    }

    /// Begins another log with the next part.
    pub fn begin_log(&mut self) {
        self.log.first = 0;
    }

    fn write(&self, log: Log, part: &[u8]) -> Option<Log> {
        let bytes = u32::try_from(part.len()).ok()?;
        let end = log.len + PART_HEADER + u64::from(bytes);
        if end > AREA_BYTES {
            return None;
        }
        let start = AREAS + u64::from(log.area & 1) * AREA_BYTES + log.len;
        self.file.memory().write(start, &bytes.to_le_bytes())?;
        self.file.memory().write(start + 4, &crc32fast::hash(part).to_le_bytes())?;
        self.file.memory().write(start + PART_HEADER, part)?;
        Some(Log { len: end, ..log })
    }

    /// Returns the parts of a log, if all are whole, and continues with it.
    pub fn parts(&mut self, log: Log) -> Option<Vec<Vec<u8>>> {
        let start = AREAS + u64::from(log.area & 1) * AREA_BYTES;
        let (mut parts, mut at) = (Vec::new(), 0);
        if log.len > AREA_BYTES || log.first > log.len {
            return None;
        }
        while at < log.len {
            let mut header = [0; PART_HEADER as usize];
            self.file.memory().read(start + at, &mut header)?;
            let (len, checksum) = header.split_first_chunk::<4>()?;
            let (len, checksum) =
                (u32::from_le_bytes(*len), u32::from_le_bytes(*checksum.first_chunk()?));
            at += PART_HEADER;
            let limit = log.len.checked_sub(at)?;
            parts.push(self.file.checked(start + at, len.into(), limit, checksum)?);
            at += u64::from(len);
        }
        self.log = log;
        Some(parts)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn none() -> Vec<u8> {
        unreachable!("the log is short")
    }

    #[test]
    fn a_record_is_in_force_or_the_one_before() {
        let (file, fd) = ProgramRecords::create().unwrap();
        assert_eq!((file.number(), file.record(1)), (0, None));
        assert!(file.commit(1, b"one") && file.commit(2, b"two"));
        let next = ProgramRecords::open(fd.as_fd()).unwrap().unwrap();
        assert_eq!(next.number(), 2);
        assert_eq!(next.record(1).as_deref(), Some(&b"one"[..]));
        assert!(!file.commit(3, &vec![0; 1 << 20]), "too long");
        assert_eq!(next.record(next.number()).as_deref(), Some(&b"two"[..]));
        file.file.begin(MAGIC + (1 << 56));
        assert!(ProgramRecords::open(fd.as_fd()).unwrap().is_none(), "another version");
    }

    #[test]
    fn a_log_has_its_parts_until_it_begins_anew() {
        let (mut file, fd) = ProgramRecords::create().unwrap();
        let begun = file.append(b"ignored", || b"all".to_vec()).unwrap();
        let longer = file.append(b"change", none).unwrap();
        let parts = |log| ProgramRecords::open(fd.as_fd()).unwrap().unwrap().parts(log);
        assert_eq!(parts(begun).unwrap(), [b"all"]);
        assert_eq!(parts(longer).unwrap(), [&b"all"[..], b"change"]);
        // What a worker wrote that then died is written over.
        let mut next = ProgramRecords::open(fd.as_fd()).unwrap().unwrap();
        next.parts(begun).unwrap();
        let other = next.append(b"other", none).unwrap();
        assert_eq!(parts(other).unwrap(), [&b"all"[..], b"other"]);
        let part = vec![7; LONG as usize / 2];
        let mut log = next.append(&part, none).unwrap();
        let mut kept = other;
        for round in 0..8 {
            let before = log;
            log = next.append(&part, || vec![round]).unwrap();
            if log.area != before.area {
                kept = before;
                assert_eq!(parts(log).unwrap(), [[round]]);
            }
            // The log of the record before stays until the next but one begins.
            assert!(parts(kept).is_some() && parts(before).is_some());
        }
        assert!(next.append(&[], || vec![0; AREA_BYTES as usize]).is_some());
        next.begin_log();
        assert_eq!(next.append(&[], || vec![0; AREA_BYTES as usize]), None, "too long");
    }

    #[test]
    fn damaged_logs_are_refused() {
        let (mut file, _fd) = ProgramRecords::create().unwrap();
        let log = file.append(&[], || b"all".to_vec()).unwrap();
        let start = AREAS + u64::from(log.area) * AREA_BYTES;
        for bad in [Log { len: log.len - 1, ..log }, Log { len: u64::MAX, ..log }] {
            assert_eq!(file.parts(bad), None);
        }
        for at in 0..log.len {
            let mut byte = [0];
            file.file.memory().read(start + at, &mut byte).unwrap();
            file.file.memory().write(start + at, &[byte[0] ^ 1]).unwrap();
            assert_eq!(file.parts(log), None, "{at}");
            file.file.memory().write(start + at, &byte).unwrap();
        }
        assert!(file.parts(log).is_some());
    }
}
