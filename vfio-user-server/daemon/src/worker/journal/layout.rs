//! Records in the journal's file, and words for the session's progress.

use std::io;
use std::os::fd::BorrowedFd;

use ipc::record_file::{RecordFile, Slots};
use vfio_user_server::journal::{MAX_FINISHED, ReplyPhase};

use super::progress::Progress;

/// Length of the file in bytes. Pages that are not written take no memory.
pub const BYTES: u64 = SCRATCH + SCRATCH_BYTES as u64;

/// `"TSRAJRN"` and the version of the file.
const MAGIC: u64 = u64::from_le_bytes(*b"TSRAJRN\x01");

/// Words at the start of the file: offsets in bytes.
mod word {
    /// Number of the state in force.
    pub const STATE: u64 = 8;
    /// 1 if another worker can continue.
    pub const ADOPTABLE: u64 = 16;
    /// Number of workers that tried to continue with the same message.
    pub const ATTEMPTS: u64 = 24;
    /// [`Progress`](super::super::progress::Progress) of the session.
    pub const PROGRESS: u64 = 32;
    /// Bytes that are being removed from the socket.
    pub const REMOVING: u64 = 40;
}

const STATES: Slots = Slots::new(4096, 64 << 10);
/// A mapping takes up to 45 bytes.
const MEMORIES: Slots = Slots::new(STATES.end(), 256 << 10);
/// Where bytes go that are removed from the socket.
const SCRATCH: u64 = MEMORIES.end();
const SCRATCH_BYTES: usize = MAX_FINISHED;

/// Kind of a record.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Device, session and position of the client.
    State,
    /// Mappings of guest memory.
    Memory,
}

impl Kind {
    const fn slots(self) -> Slots {
        match self {
            Self::State => STATES,
            Self::Memory => MEMORIES,
        }
    }
}

/// Journal of a worker.
#[derive(Debug)]
pub struct Journal {
    file: RecordFile,
    /// Number of the state in force.
    state: u64,
    is_adoptable: bool,
    progress: Progress,
    /// Whether [`word::ATTEMPTS`] may not be 0.
    has_attempts: bool,
}

impl Journal {
    /// Opens the journal that the anchor keeps. Its file has [`BYTES`] bytes.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be mapped, or is of another version.
    pub fn open(file: BorrowedFd<'_>) -> io::Result<Self> {
        let file = RecordFile::map(file, BYTES)?;
        let mut journal = Self {
            state: 0,
            is_adoptable: false,
            progress: Progress::default(),
            has_attempts: true,
            file,
        };
        match journal.file.magic() {
            MAGIC => {
                journal.state = journal.file.load(word::STATE);
                journal.is_adoptable = journal.file.load(word::ADOPTABLE) == 1;
                journal.progress = Progress::decode(journal.file.load(word::PROGRESS));
            }
            // The first state is the last to be in force: until then the other words say nothing.
            0 => {}
            _ => {
                let message = "The journal is of another version of vgpud";
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
        }
        Ok(journal)
    }

    /// Returns true if an earlier worker has written a state.
    pub fn is_used(&self) -> bool {
        self.state != 0
    }

    /// Returns true if another worker can continue.
    pub fn is_adoptable(&self) -> bool {
        self.is_adoptable
    }

    /// Sets whether another worker can continue.
    pub fn set_adoptable(&mut self, adoptable: bool) {
        if self.is_adoptable != adoptable {
            self.is_adoptable = adoptable;
            self.file.store(word::ADOPTABLE, adoptable.into());
        }
    }

    /// Writes a record that is not in force yet. Returns false if it is too long.
    #[must_use]
    pub fn write(&self, kind: Kind, number: u64, contents: &[u8]) -> bool {
        self.file.write(kind.slots(), number, contents)
    }

    /// Returns a record, if it is whole.
    pub fn read(&self, kind: Kind, number: u64) -> Option<Vec<u8>> {
        self.file.read(kind.slots(), number)
    }

    /// Brings the next state into force. Returns false, and leaves the one before in force, if it
    /// is too long.
    #[must_use]
    pub fn commit(&mut self, contents: &[u8]) -> bool {
        // A worker that was compromised may have left any number.
        let number = self.state.wrapping_add(1);
        if !self.write(Kind::State, number, contents) {
            return false;
        }
        self.file.store(word::STATE, number);
        if self.state == 0 {
            self.file.begin(MAGIC);
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
        self.file.store(word::PROGRESS, progress.encode());
    }

    /// Begins with the message after `finished` messages, of which `in_socket` bytes are still in
    /// the session's socket.
    pub fn begin_session(&mut self, finished: u64, in_socket: usize) {
        self.set_progress(Progress { finished, in_socket, replying: false });
        self.file.store(word::REMOVING, 0);
        self.file.store(word::ATTEMPTS, 0);
    }

    /// Returns how far the reply to the message at hand has come.
    pub fn reply(&self) -> ReplyPhase {
        if self.progress.replying { ReplyPhase::Sending } else { ReplyPhase::None }
    }

    /// Records that the reply to the message at hand is sent, or about to be.
    pub fn begin_reply(&mut self) {
        self.set_progress(Progress { replying: true, ..self.progress });
    }

    /// Counts an attempt to carry out the message at hand by the adopting worker. Returns the
    /// number of attempts.
    pub fn count_attempt(&mut self) -> u64 {
        let attempts = self.file.load(word::ATTEMPTS).saturating_add(1);
        self.file.store(word::ATTEMPTS, attempts);
        self.has_attempts = true;
        attempts
    }

    /// Finishes the message at hand, whose `bytes` bytes follow those of the finished messages in
    /// the socket.
    pub fn finish(&mut self, bytes: usize) {
        let Progress { finished, in_socket, .. } = self.progress;
        let in_socket = in_socket + bytes;
        let finished = finished.wrapping_add(1);
        self.set_progress(Progress { finished, in_socket, replying: false });
        if std::mem::take(&mut self.has_attempts) {
            self.file.store(word::ATTEMPTS, 0);
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
        self.file.store(SCRATCH, EMPTY);
        self.file.store(word::REMOVING, self.progress.in_socket as u64);
        self.receive(socket)
    }

    /// Receives the finished messages.
    fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        // The messages were there as a whole, and descriptors are with the last one only, so one
        // call removes all of them.
        let bytes = self.progress.in_socket;
        let removed = self.file.memory().receive(SCRATCH, bytes.min(SCRATCH_BYTES), socket)?;
        if removed != bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.end_removal();
        Ok(())
    }

    /// Records that the finished messages have left the socket. Can be repeated.
    fn end_removal(&mut self) {
        self.set_progress(Progress { in_socket: 0, ..self.progress });
        self.file.store(word::REMOVING, 0);
    }

    /// Removes the messages that an earlier worker has finished, if they are still in the socket.
    pub fn complete(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        match self.file.load(word::REMOVING) {
            0 => self.remove(socket),
            _ if self.file.load(SCRATCH) == EMPTY => self.receive(socket),
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

    use ipc::mem::sealed_memfd;
    use nix::sys::socket::{MsgFlags, recv};

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
        assert!(journal.is_used() && !journal.is_adoptable());
        assert_eq!(journal.committed().unwrap(), b"first");
        assert!(journal.commit(b"third"));
        assert_eq!(Journal::open(file.as_fd()).unwrap().committed().unwrap(), b"third");
        let too_long = vec![0; 64 << 10];
        assert!(!journal.commit(&too_long));
        assert_eq!(journal.committed().unwrap(), b"third");
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

    /// What the adopting process finds after a death at one of these places.
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
                journal.file.store(SCRATCH, EMPTY);
                journal.file.store(word::REMOVING, 20);
            }
            if died == Died::AfterReceive || died == Died::AfterRemoval {
                assert_eq!(journal.file.memory().receive(SCRATCH, 20, server.as_fd()).unwrap(), 20);
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

    /// A worker that dies within its first record has left nothing to continue with.
    #[test]
    fn a_journal_without_a_version_is_unused() {
        let (file, mut first) = journal();
        assert!(first.commit(b"state"));
        first.file.begin(0);
        let mut next = Journal::open(file.as_fd()).unwrap();
        assert!(!next.is_used() && !next.is_adoptable());
        assert!(next.commit(b"next"));
        assert_eq!(Journal::open(file.as_fd()).unwrap().committed().unwrap(), b"next");
    }

    #[test]
    fn a_journal_of_another_version_is_refused() {
        let (file, mut journal) = journal();
        assert!(journal.commit(b"state"));
        journal.file.begin(MAGIC + (1 << 56));
        assert!(Journal::open(file.as_fd()).is_err());
    }

    #[test]
    fn the_words_of_this_version_stay_the_same() {
        let (file, mut journal) = journal();
        assert!(journal.commit(b"state") && journal.commit(b"state"));
        journal.finish(3);
        journal.finish(4);
        journal.begin_reply();
        let mut words = [0; 48];
        Journal::open(file.as_fd()).unwrap().file.memory().read(0, &mut words).unwrap();
        let words: Vec<u64> =
            words.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let progress = 2 << 20 | 7 << 1 | 1;
        assert_eq!(words, [0x014e_524a_4152_5354, 2, 0, 0, progress, 0]);
    }
}
