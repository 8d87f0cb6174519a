//! Records in the journal's file.
//!
//! The file has one writer, the worker. Each kind of record has two slots: a new record is written
//! to the slot that is not in force, and one store of its number brings it into force. A worker can
//! end between any two instructions: the slot in force is whole. The checksum is for a worker that a
//! guest has taken over.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use vendor_backends::mem::Mapping;
use vfio_user_server::journal::{MAX_FINISHED, ReplyPhase};

use super::progress::Progress;

/// Length of the file in bytes. Pages that are not written take no memory.
pub const BYTES: u64 = SCRATCH + SCRATCH_BYTES as u64;

/// `"TSRAJRN"` and the version of the file.
const MAGIC: u64 = u64::from_le_bytes(*b"TSRAJRN\x05");
/// Versions without parts of mappings (4), programs of the host (3) and a control queue (2).
const EARLIER: [u64; 3] = [MAGIC - (1 << 56), MAGIC - (2 << 56), MAGIC - (3 << 56)];
/// Version whose [`word::v1`] tell how far the session has come. [`Journal::convert`] reads them.
const MAGIC_V1: u64 = u64::from_le_bytes(*b"TSRAJRN\x01");

/// Words at the start of the file: offsets in bytes.
mod word {
    pub const MAGIC: u64 = 0;
    /// Number of the state in force.
    pub const STATE: u64 = 8;
    /// 1 if another worker can continue.
    pub const CONTINUABLE: u64 = 40;
    /// Number of workers that tried to continue with the same message.
    pub const ATTEMPTS: u64 = 48;
    /// [`Progress`](super::super::progress::Progress) of the session.
    pub const PROGRESS: u64 = 64;
    /// Bytes that are being removed from the socket.
    pub const REMOVING: u64 = 72;

    /// Words of the version before.
    pub mod v1 {
        /// Number of messages of the session that are finished.
        pub const FINISHED: u64 = 16;
        /// How far the reply to the message at hand has come: 1 for a begun one, 2 for a sent one.
        pub const REPLY: u64 = 24;
        /// Bytes of the message at hand that are being removed from the socket.
        pub const REMOVING: u64 = 32;
        /// Number of finished messages once the one at hand has been removed.
        pub const NEXT: u64 = 56;
    }
}

const STATES: u64 = 4096;
const STATE_BYTES: u64 = 64 << 10;
const MEMORIES: u64 = STATES + 2 * STATE_BYTES;
/// A mapping takes up to 45 bytes.
const MEMORY_BYTES: u64 = 256 << 10;
/// Where bytes go that are removed from the socket.
const SCRATCH: u64 = MEMORIES + 2 * MEMORY_BYTES;
const SCRATCH_BYTES: usize = MAX_FINISHED;
/// Number, length and checksum before the contents of a slot.
const SLOT_HEADER: u64 = 16;

/// Kind of a record.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Device, session and position of the client.
    State,
    /// Mappings of guest memory.
    Memory,
}

impl Kind {
    fn slot(self, number: u64) -> (u64, u64) {
        let (start, bytes) = match self {
            Self::State => (STATES, STATE_BYTES),
            Self::Memory => (MEMORIES, MEMORY_BYTES),
        };
        (start + (number & 1) * bytes, bytes)
    }
}

/// Journal of a worker.
#[derive(Debug)]
pub struct Journal {
    memory: Arc<Mapping>,
    /// Number of the state in force.
    state: u64,
    is_continuable: bool,
    progress: Progress,
    /// Whether [`word::ATTEMPTS`] may not be 0.
    has_attempts: bool,
}

impl Journal {
    /// Opens the journal that the anchor keeps. Its file has [`BYTES`] bytes.
    pub fn open(file: BorrowedFd<'_>) -> io::Result<Self> {
        let memory = Mapping::new(file, 0, BYTES, true)?;
        let progress = Progress::default();
        let mut journal =
            Self { memory, state: 0, is_continuable: false, progress, has_attempts: true };
        let magic = journal.load(word::MAGIC);
        let has_progress = magic == MAGIC || EARLIER.contains(&magic);
        if has_progress || magic == MAGIC_V1 {
            journal.state = journal.load(word::STATE);
            journal.is_continuable = journal.load(word::CONTINUABLE) == 1;
        }
        if has_progress {
            journal.progress = Progress::decode(journal.load(word::PROGRESS));
        }
        Ok(journal)
    }

    /// Converts a journal of a version before. A worker of that version cannot continue then.
    pub fn convert(&mut self) {
        match self.load(word::MAGIC) {
            MAGIC_V1 => {}
            // The next state is of this version.
            magic if EARLIER.contains(&magic) => return self.store(word::MAGIC, MAGIC),
            _ => return,
        }
        let removing = self.load(word::v1::REMOVING);
        let progress = if removing == 0 {
            let finished = self.load(word::v1::FINISHED);
            Progress { finished, in_socket: 0, replying: self.load(word::v1::REPLY) != 0 }
        } else {
            let in_socket = removing as usize;
            Progress { finished: self.load(word::v1::NEXT), in_socket, replying: false }
        };
        self.set_progress(progress);
        self.store(word::REMOVING, removing);
        // All before is of no use until here, and can be repeated.
        self.store(word::MAGIC, MAGIC);
    }

    fn load(&self, word: u64) -> u64 {
        self.memory.load_u64(word).unwrap_or_default()
    }

    fn store(&self, word: u64, value: u64) {
        self.memory.store_u64(word, value);
    }

    /// Returns true if an earlier worker has written a state.
    pub fn is_used(&self) -> bool {
        self.state != 0
    }

    /// Returns true if another worker can continue.
    pub fn is_continuable(&self) -> bool {
        self.is_continuable
    }

    /// Sets whether another worker can continue.
    pub fn set_continuable(&mut self, continuable: bool) {
        if self.is_continuable != continuable {
            self.is_continuable = continuable;
            self.store(word::CONTINUABLE, continuable.into());
        }
    }

    /// Writes a record that is not in force yet. Returns false if it is too long.
    #[must_use]
    pub fn write(&self, kind: Kind, number: u64, contents: &[u8]) -> bool {
        let (start, bytes) = kind.slot(number);
        let Some(len) = u32::try_from(contents.len()).ok() else { return false };
        if u64::from(len) > bytes - SLOT_HEADER {
            return false;
        }
        self.memory.store_u64(start, number);
        self.memory.store_u32(start + 8, len);
        self.memory.store_u32(start + 12, crc32fast::hash(contents));
        self.memory.write(start + SLOT_HEADER, contents).is_some()
    }

    /// Returns a record, if it is whole.
    pub fn read(&self, kind: Kind, number: u64) -> Option<Vec<u8>> {
        let (start, bytes) = kind.slot(number);
        if self.memory.load_u64(start)? != number {
            return None;
        }
        let len = u64::from(self.memory.load_u32(start + 8)?);
        if len > bytes - SLOT_HEADER {
            return None;
        }
        let mut contents = vec![0; len as usize];
        self.memory.read(start + SLOT_HEADER, &mut contents)?;
        (self.memory.load_u32(start + 12)? == crc32fast::hash(&contents)).then_some(contents)
    }

    /// Brings the next state into force. Returns false, and leaves the one before in force, if it is
    /// too long.
    #[must_use]
    pub fn commit(&mut self, contents: &[u8]) -> bool {
        // A worker that was taken over may have left any number.
        let number = self.state.wrapping_add(1);
        if !self.write(Kind::State, number, contents) {
            return false;
        }
        self.store(word::STATE, number);
        if self.state == 0 {
            self.store(word::MAGIC, MAGIC);
        }
        self.state = number;
        true
    }

    /// Returns the state in force.
    pub fn committed(&self) -> Option<Vec<u8>> {
        self.read(Kind::State, self.state)
    }

    /// Returns the number of messages of the session that are finished.
    pub fn finished(&self) -> u64 {
        self.progress.finished
    }

    fn set_progress(&mut self, progress: Progress) {
        self.progress = progress;
        self.store(word::PROGRESS, progress.encode());
    }

    /// Begins with the message after `finished` messages, of which `in_socket` bytes are still in the
    /// session's socket.
    pub fn begin_session(&mut self, finished: u64, in_socket: usize) {
        self.set_progress(Progress { finished, in_socket, replying: false });
        self.store(word::REMOVING, 0);
        self.store(word::ATTEMPTS, 0);
    }

    /// Returns how far the reply to the message at hand has come.
    pub fn reply(&self) -> ReplyPhase {
        if self.progress.replying { ReplyPhase::Sending } else { ReplyPhase::None }
    }

    /// Records that the reply to the message at hand is sent, or about to be.
    pub fn begin_reply(&mut self) {
        self.set_progress(Progress { replying: true, ..self.progress });
    }

    /// Counts an attempt to carry out the message at hand by a worker that continues. Returns the
    /// number of attempts.
    pub fn count_attempt(&mut self) -> u64 {
        let attempts = self.load(word::ATTEMPTS).saturating_add(1);
        self.store(word::ATTEMPTS, attempts);
        self.has_attempts = true;
        attempts
    }

    /// Finishes the message at hand, whose `bytes` bytes follow those of the finished messages in the
    /// socket.
    pub fn finish(&mut self, bytes: usize) {
        let Progress { finished, in_socket, .. } = self.progress;
        let in_socket = in_socket + bytes;
        let finished = finished.wrapping_add(1);
        self.set_progress(Progress { finished, in_socket, replying: false });
        if std::mem::take(&mut self.has_attempts) {
            self.store(word::ATTEMPTS, 0);
        }
    }

    /// Removes the finished messages from the socket.
    ///
    /// # Errors
    ///
    /// Fails if the socket has fewer bytes. The session cannot go on then.
    pub fn remove(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        if self.progress.in_socket == 0 {
            return Ok(());
        }
        self.store(SCRATCH, EMPTY);
        self.store(word::REMOVING, self.progress.in_socket as u64);
        self.receive(socket)
    }

    /// Receives the finished messages.
    fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        // The messages were there as a whole, and descriptors are with the last one only, so one
        // call removes all of them.
        let bytes = self.progress.in_socket;
        let removed = self.memory.receive(SCRATCH, bytes.min(SCRATCH_BYTES), socket)?;
        if removed != bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.end_removal();
        Ok(())
    }

    /// Records that the finished messages have left the socket. Can be repeated.
    fn end_removal(&mut self) {
        self.set_progress(Progress { in_socket: 0, ..self.progress });
        self.store(word::REMOVING, 0);
    }

    /// Removes the messages that an earlier worker has finished, if they are still in the socket.
    pub fn complete(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        match self.load(word::REMOVING) {
            0 => self.remove(socket),
            _ if self.load(SCRATCH) == EMPTY => self.receive(socket),
            _ => {
                self.end_removal();
                Ok(())
            }
        }
    }
}

/// First word of the scratch area while no message was removed to it. A message has its size in the
/// upper half of its first word, which is at most a MiB.
const EMPTY: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::{AsFd, AsRawFd, OwnedFd};
    use std::os::unix::net::UnixStream;

    use nix::sys::socket::{MsgFlags, recv};
    use vendor_backends::mem::sealed_memfd;

    use super::*;

    fn journal() -> (OwnedFd, Journal) {
        let file = sealed_memfd(c"journal", BYTES).unwrap();
        let journal = Journal::open(file.as_fd()).unwrap();
        (file, journal)
    }

    #[test]
    fn a_state_that_is_not_in_force_changes_nothing() {
        let (file, mut journal) = journal();
        assert!(!journal.is_used());
        assert!(journal.commit(b"first"));
        assert!(journal.write(Kind::State, 2, b"second"), "a worker that dies before the store");
        let mut journal = Journal::open(file.as_fd()).unwrap();
        assert!(journal.is_used() && !journal.is_continuable());
        assert_eq!(journal.committed().unwrap(), b"first");
        assert!(journal.commit(b"third"));
        assert_eq!(Journal::open(file.as_fd()).unwrap().committed().unwrap(), b"third");
        let too_long = vec![0; STATE_BYTES as usize];
        assert!(!journal.commit(&too_long));
        assert_eq!(journal.committed().unwrap(), b"third");
    }

    #[test]
    fn a_damaged_record_is_refused() {
        let (_file, mut journal) = journal();
        assert!(journal.commit(b"contents") && journal.write(Kind::Memory, 7, b"memory"));
        assert_eq!(journal.read(Kind::Memory, 7).unwrap(), b"memory");
        assert_eq!(journal.read(Kind::Memory, 6), None);
        let (start, _) = Kind::State.slot(1);
        journal.memory.write(start + SLOT_HEADER, b"C").unwrap();
        assert_eq!(journal.committed(), None);
        journal.memory.store_u32(start + 8, u32::MAX).unwrap();
        assert_eq!(journal.committed(), None);
    }

    /// Leaves a message of 20 bytes in a socket, with another one after it.
    fn message() -> (UnixStream, UnixStream) {
        let (mut client, server) = UnixStream::pair().unwrap();
        client.write_all(&[7; 20]).unwrap();
        client.write_all(&[8; 20]).unwrap();
        (client, server)
    }

    fn next_byte(server: &UnixStream) -> u8 {
        let mut byte = [0];
        recv(server.as_raw_fd(), &mut byte, MsgFlags::MSG_PEEK).unwrap();
        byte[0]
    }

    /// What the process that continues finds after a death at one of these places.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Died {
        BeforeRemoval,
        BeforeReceive,
        AfterReceive,
        AfterRemoval,
    }

    const DEATHS: [Died; 4] =
        [Died::BeforeRemoval, Died::BeforeReceive, Died::AfterReceive, Died::AfterRemoval];

    #[test]
    fn finished_messages_are_removed_once_wherever_the_worker_dies() {
        for died in DEATHS {
            let (_client, server) = message();
            let (file, mut journal) = journal();
            journal.commit(b"state").then_some(()).unwrap();
            journal.begin_reply();
            assert_eq!(journal.reply(), ReplyPhase::Sending);
            journal.finish(8);
            journal.finish(12);
            assert_eq!((journal.finished(), next_byte(&server)), (2, 7), "they stay there");
            if died != Died::BeforeRemoval {
                journal.store(SCRATCH, EMPTY);
                journal.store(word::REMOVING, 20);
            }
            if died == Died::AfterReceive || died == Died::AfterRemoval {
                assert_eq!(journal.memory.receive(SCRATCH, 20, server.as_fd()).unwrap(), 20);
            }
            if died == Died::AfterRemoval {
                journal.set_progress(Progress { in_socket: 0, ..journal.progress });
            }
            let mut next = Journal::open(file.as_fd()).unwrap();
            for _ in 0..2 {
                next.complete(server.as_fd()).unwrap();
                assert_eq!((next.finished(), next_byte(&server)), (2, 8), "{died:?}");
                assert_eq!(next.reply(), ReplyPhase::None);
            }
        }
    }

    #[test]
    fn messages_that_are_not_there_end_the_session() {
        let (_client, server) = message();
        let (_file, mut journal) = journal();
        journal.finish(41);
        assert!(journal.remove(server.as_fd()).is_err());
    }

    #[test]
    fn attempts_count_until_the_message_is_finished() {
        let (file, mut journal) = journal();
        assert!(journal.commit(b"state"));
        assert_eq!((journal.count_attempt(), journal.count_attempt()), (1, 2));
        let mut next = Journal::open(file.as_fd()).unwrap();
        assert_eq!(next.count_attempt(), 3);
        next.finish(0);
        assert_eq!(Journal::open(file.as_fd()).unwrap().count_attempt(), 1);
    }

    /// Writes the words of a journal of version 1.
    fn of_version_1(words: &[(u64, u64)]) -> (OwnedFd, Journal) {
        let (file, mut journal) = journal();
        assert!(journal.commit(b"state"));
        journal.store(word::CONTINUABLE, 1);
        for (word, value) in words.iter().chain(&[(word::MAGIC, MAGIC_V1)]) {
            journal.store(*word, *value);
        }
        let journal = Journal::open(file.as_fd()).unwrap();
        (file, journal)
    }

    #[test]
    fn a_journal_of_version_1_continues() {
        let (file, mut journal) = of_version_1(&[(word::v1::FINISHED, 7), (word::v1::REPLY, 2)]);
        assert!(journal.is_used() && journal.is_continuable());
        assert_eq!(Journal::open(file.as_fd()).unwrap().load(word::MAGIC), MAGIC_V1, "not yet");
        journal.convert();
        let next = Journal::open(file.as_fd()).unwrap();
        assert_eq!((next.finished(), next.reply()), (7, ReplyPhase::Sending));
        assert_eq!(next.committed().unwrap(), b"state");

        let removing = [(word::v1::FINISHED, 7), (word::v1::NEXT, 8), (word::v1::REMOVING, 20)];
        for removed in [false, true] {
            let (_client, server) = message();
            let (_file, mut journal) = of_version_1(&removing);
            journal.store(SCRATCH, EMPTY);
            if removed {
                assert_eq!(journal.memory.receive(SCRATCH, 20, server.as_fd()).unwrap(), 20);
            }
            journal.convert();
            journal.complete(server.as_fd()).unwrap();
            assert_eq!((journal.finished(), next_byte(&server)), (8, 8), "{removed}");
            assert_eq!(journal.reply(), ReplyPhase::None);
        }
    }

    #[test]
    fn journals_of_versions_2_to_4_are_taken_over() {
        for magic in EARLIER {
            let (file, mut journal) = journal();
            assert!(journal.commit(b"state"));
            journal.finish(3);
            journal.store(word::MAGIC, magic);
            let mut next = Journal::open(file.as_fd()).unwrap();
            assert_eq!((next.finished(), next.committed().as_deref()), (1, Some(&b"state"[..])));
            next.convert();
            assert_eq!(Journal::open(file.as_fd()).unwrap().finished(), 1);
        }
    }

    #[test]
    fn the_words_of_this_version_stay_the_same() {
        let (file, mut journal) = journal();
        assert!(journal.commit(b"state") && journal.commit(b"state"));
        journal.finish(3);
        journal.finish(4);
        journal.begin_reply();
        let mut words = [0; 80];
        Journal::open(file.as_fd()).unwrap().memory.read(0, &mut words).unwrap();
        let words: Vec<u64> =
            words.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let progress = 2 << 20 | 7 << 1 | 1;
        assert_eq!(words, [0x054e_524a_4152_5354, 2, 0, 0, 0, 0, 0, 0, progress, 0]);
    }
}
