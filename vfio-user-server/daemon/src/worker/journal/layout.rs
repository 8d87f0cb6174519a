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
use vfio_user_server::journal::ReplyPhase;

/// Length of the file in bytes. Pages that are not written take no memory.
pub const BYTES: u64 = SCRATCH + SCRATCH_BYTES as u64;

/// `"TSRAJRN"` and the version of the file.
const MAGIC: u64 = u64::from_le_bytes(*b"TSRAJRN\x01");

/// Words at the start of the file: offsets in bytes.
mod word {
    pub const MAGIC: u64 = 0;
    /// Number of the state in force.
    pub const STATE: u64 = 8;
    /// Number of messages of the session that are finished.
    pub const FINISHED: u64 = 16;
    /// How far the reply to the message at hand has come.
    pub const REPLY: u64 = 24;
    /// Bytes that are being removed from the socket.
    pub const REMOVING: u64 = 32;
    /// 1 if another worker can continue.
    pub const CONTINUABLE: u64 = 40;
    /// Number of workers that tried to continue with the same message.
    pub const ATTEMPTS: u64 = 48;
    /// Number of finished messages once the one at hand has been removed.
    pub const NEXT: u64 = 56;
}

const STATES: u64 = 4096;
const STATE_BYTES: u64 = 64 << 10;
const MEMORIES: u64 = STATES + 2 * STATE_BYTES;
/// A mapping takes up to 45 bytes.
const MEMORY_BYTES: u64 = 256 << 10;
/// Where bytes go that are removed from the socket.
const SCRATCH: u64 = MEMORIES + 2 * MEMORY_BYTES;
/// A held message is at most as long as the session's buffer.
const SCRATCH_BYTES: usize = 64 << 10;
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
}

impl Journal {
    /// Opens the journal that the anchor keeps. Its file has [`BYTES`] bytes.
    pub fn open(file: BorrowedFd<'_>) -> io::Result<Self> {
        let memory = Mapping::new(file, 0, BYTES, true)?;
        let mut journal = Self { memory, state: 0, is_continuable: false };
        if journal.load(word::MAGIC) == MAGIC {
            journal.state = journal.load(word::STATE);
            journal.is_continuable = journal.load(word::CONTINUABLE) == 1;
        }
        Ok(journal)
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
        let number = self.state + 1;
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
        self.load(word::FINISHED)
    }

    /// Begins with the first message of a session.
    pub fn begin_session(&self) {
        self.store(word::FINISHED, 0);
        self.store(word::REPLY, 0);
        self.store(word::REMOVING, 0);
        self.store(word::ATTEMPTS, 0);
    }

    /// Returns how far the reply to the message at hand has come.
    pub fn reply(&self) -> ReplyPhase {
        match self.load(word::REPLY) {
            0 => ReplyPhase::None,
            1 => ReplyPhase::Sending,
            _ => ReplyPhase::Sent,
        }
    }

    /// Sets how far the reply to the message at hand has come.
    pub fn set_reply(&self, reply: ReplyPhase) {
        let value = match reply {
            ReplyPhase::None => 0,
            ReplyPhase::Sending => 1,
            ReplyPhase::Sent => 2,
        };
        self.store(word::REPLY, value);
    }

    /// Counts an attempt to carry out the message at hand by a worker that continues. Returns the
    /// number of attempts.
    pub fn count_attempt(&self) -> u64 {
        let attempts = self.load(word::ATTEMPTS).saturating_add(1);
        self.store(word::ATTEMPTS, attempts);
        attempts
    }

    /// Removes the message at hand, of `bytes` bytes, from the socket, and finishes it.
    ///
    /// # Errors
    ///
    /// Fails if the socket has fewer bytes. The session cannot go on then.
    pub fn finish(&self, socket: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
        self.store(word::NEXT, self.finished() + 1);
        if bytes == 0 {
            self.end_message();
            return Ok(());
        }
        self.store(SCRATCH, EMPTY);
        self.store(word::REMOVING, bytes as u64);
        self.remove(socket, bytes)
    }

    fn remove(&self, socket: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
        // The message was there as a whole, and without descriptors of another one after it, so one
        // call removes all of it.
        let removed = self.memory.receive(SCRATCH, bytes.min(SCRATCH_BYTES), socket)?;
        if removed != bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.end_message();
        Ok(())
    }

    /// Finishes a message that has left the socket. Can be repeated.
    fn end_message(&self) {
        self.store(word::FINISHED, self.load(word::NEXT));
        self.store(word::REPLY, 0);
        self.store(word::ATTEMPTS, 0);
        self.store(word::REMOVING, 0);
    }

    /// Finishes the message that an earlier worker began to remove from the socket, if there is one.
    pub fn complete(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        match self.load(word::REMOVING) as usize {
            0 => Ok(()),
            bytes if self.load(SCRATCH) == EMPTY => self.remove(socket, bytes),
            _ => {
                self.end_message();
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

    #[test]
    fn a_message_is_removed_once_wherever_the_worker_dies() {
        let (_client, server) = message();
        let (_file, journal) = journal();
        journal.finish(server.as_fd(), 20).unwrap();
        assert_eq!((journal.finished(), next_byte(&server)), (1, 8));
        journal.complete(server.as_fd()).unwrap();
        assert_eq!((journal.finished(), next_byte(&server)), (1, 8), "nothing was begun");

        // Before the call that removes it, and after.
        for removed in [false, true] {
            let (_client, server) = message();
            let (_file, journal) = self::journal();
            journal.set_reply(ReplyPhase::Sent);
            journal.store(word::NEXT, 1);
            journal.store(SCRATCH, EMPTY);
            journal.store(word::REMOVING, 20);
            if removed {
                assert_eq!(journal.memory.receive(SCRATCH, 20, server.as_fd()).unwrap(), 20);
            }
            journal.complete(server.as_fd()).unwrap();
            assert_eq!((journal.finished(), next_byte(&server)), (1, 8), "{removed}");
            assert_eq!(journal.reply(), ReplyPhase::None);
        }
    }
}
