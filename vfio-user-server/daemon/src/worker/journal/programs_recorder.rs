//! Recording of the host's programs.
//!
//! Their record is written before the state of the worker, which has the record's number: one store
//! brings both into force.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use cuda_socket::FileId;
use ipc::seqpacket::SeqPacket;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use programs::change_map::{Changed, apply};
use programs::front_end::MemoryFileId;
use serde::{Deserialize, Serialize};

use super::descriptors::{Anchor, Key};
use super::program_memory::{MemoryFiles, ProgramMemory};
use super::program_records::{Log, ProgramRecords};

/// Longest time to wait for the anchor to close a descriptor.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Number of a connection or an open file of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Source(pub u32);

/// An open file, as its worker knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenFile {
    /// Its id.
    pub id: FileId,
    /// Device and inode number of the program's end of its socket.
    pub inode: (u64, u64),
}

/// Changes of the programs, or all of their state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramChanges {
    /// Whether a connection's hello was answered.
    pub connections: Vec<Changed<Source, bool>>,
    /// Open files.
    pub files: Vec<Changed<Source, OpenFile>>,
    /// Changes of the front end, in its own form.
    #[serde(with = "serde_bytes")]
    pub front_end: Option<Vec<u8>>,
    /// Files with memory that may be new or gone.
    #[serde(skip)]
    pub memory: Vec<MemoryFileId>,
}

/// Reply to the last request. It is sent once the request will not be carried out again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The connection.
    pub connection: Source,
    /// Number of the request there.
    pub number: u64,
    /// The reply.
    #[serde(with = "serde_bytes")]
    pub packet: Vec<u8>,
    /// Number of descriptors that are attached.
    pub descriptors: usize,
}

/// Record of the programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// Number of the last connection or file.
    last: Source,
    answer: Option<Answer>,
    log: Log,
}

/// What is recorded of the programs.
pub trait ProgramState {
    /// Returns the number of the last connection or file.
    fn last(&self) -> Source;
    /// Returns the reply to the last request, until the program has it.
    fn answer(&self) -> Option<&Answer>;
    /// Returns what has changed since the last call, if something has.
    fn take_changes(&mut self) -> Option<ProgramChanges>;
    /// Returns all of the state.
    fn all(&self) -> ProgramChanges;
    /// Returns a file with system memory.
    fn memory_file(&self, id: MemoryFileId) -> Option<BorrowedFd<'_>>;
}

/// State that an earlier worker left.
#[derive(Debug)]
pub struct JournaledPrograms {
    /// Number of the last connection or file.
    pub last: Source,
    /// Reply to the last request, which the program may not have.
    pub answer: Option<Answer>,
    /// Whether a connection's hello was answered.
    pub connections: BTreeMap<Source, bool>,
    /// Open files.
    pub files: BTreeMap<Source, OpenFile>,
    /// Changes of the front end, in order.
    pub front_end: Vec<Vec<u8>>,
    number: u64,
    log: Log,
}

impl JournaledPrograms {
    /// Reads the record with a number.
    ///
    /// # Errors
    ///
    /// Fails if the record is damaged.
    pub fn read(file: &mut ProgramRecords, number: u64) -> Result<Self> {
        const WHAT: &str = "The record of the programs is damaged";
        let bytes = file.record(number).context(WHAT)?;
        let Record { last, answer, log } = postcard::from_bytes(&bytes).context(WHAT)?;
        let (mut connections, mut files) = (BTreeMap::new(), BTreeMap::new());
        let mut front_end = Vec::new();
        for part in file.parts(log).context(WHAT)? {
            let part: ProgramChanges = postcard::from_bytes(&part).context(WHAT)?;
            apply(&mut connections, part.connections);
            apply(&mut files, part.files);
            front_end.extend(part.front_end);
        }
        Ok(Self { last, answer, connections, files, front_end, number, log })
    }
}

/// Recorder of the host's programs.
#[derive(Debug)]
pub struct ProgramsRecorder {
    file: Option<ProgramRecords>,
    kept: ProgramMemory,
    /// Number of the last record.
    number: u64,
    /// The programs are there, and recorded.
    is_present: bool,
    /// Log of the last record.
    log: Option<Log>,
    last: Vec<u8>,
    is_lost: bool,
    /// Open until the anchor has closed the descriptors of a reply.
    probe: Option<SeqPacket>,
}

impl ProgramsRecorder {
    /// Creates the recorder. `file` is an earlier worker's, if there was one.
    pub fn new(anchor: Anchor, file: Option<ProgramRecords>) -> Self {
        Self {
            number: file.as_ref().map_or(0, ProgramRecords::number),
            file,
            kept: ProgramMemory::new(MemoryFiles::new(anchor)),
            is_present: false,
            log: None,
            last: Vec::new(),
            is_lost: false,
            probe: None,
        }
    }

    /// Continues after a record of an earlier worker, if there are programs. The anchor keeps
    /// descriptors with these keys.
    pub fn adopt(&mut self, recorded: Option<&JournaledPrograms>, keys: impl Iterator<Item = Key>) {
        if let Some(recorded) = recorded {
            (self.number, self.log) = (recorded.number, Some(recorded.log));
            self.is_present = true;
        }
        self.kept.lock().keys.extend(keys);
    }

    /// Sets the memory that an earlier worker has made for a request that it has not finished.
    pub fn set_unfinished(&self, memory: BTreeMap<u32, OwnedFd>) {
        self.kept.lock().unfinished = memory;
    }

    /// Returns the maker of memory.
    pub fn memory(&self) -> ProgramMemory {
        self.kept.clone()
    }

    /// Returns the number of the record that the next state of the worker refers to, or 0.
    pub fn number(&self) -> u64 {
        if self.is_present { self.number } else { 0 }
    }

    /// Returns whether the programs could not be recorded.
    pub fn is_lost(&self) -> bool {
        let kept = self.kept.lock();
        self.is_present && (self.is_lost || !kept.missing.is_empty() || kept.anchor.is_lost())
    }

    /// Keeps a descriptor before a record needs it.
    pub fn keep(&self, key: Key, fd: BorrowedFd<'_>) {
        self.kept.lock().keep(key, fd);
    }

    /// Drops a descriptor once the next state is recorded.
    pub fn drop_later(&self, key: Key) {
        self.kept.lock().drop_later(key);
    }

    /// Drops a descriptor that no state needs.
    pub fn drop_now(&self, key: Key) {
        self.kept.lock().drop_now(key);
    }

    /// Notes that the state of the worker is recorded.
    pub fn recorded(&self) {
        self.kept.lock().anchor.recorded();
    }

    /// Notes what is going to be served.
    pub fn set_served(&self, served: u64) {
        if let Some(file) = &self.file {
            file.set_served(served);
        }
    }

    /// Counts an attempt to finish what an earlier worker has begun. Returns the number of
    /// attempts.
    pub fn count_attempt(&self) -> u64 {
        self.file.as_ref().map_or(0, ProgramRecords::count_attempt)
    }

    /// Notes that what an earlier worker has begun is finished. The memory that it has made for it,
    /// and the descriptors of its reply, are of no use any more.
    pub fn end_attempts(&mut self) {
        let mut kept = self.kept.lock();
        for file in std::mem::take(&mut kept.unfinished).into_keys() {
            kept.drop_now(Key::program_memory(file));
        }
        drop(kept);
        self.drop_reply(true);
        if let Some(file) = &self.file {
            file.end_attempts();
        }
    }

    /// Keeps the descriptors of a reply until [`Self::drop_reply`].
    pub fn keep_reply(&self, fds: &[OwnedFd]) {
        let anchor = &mut self.kept.lock().anchor;
        for (index, fd) in fds.iter().enumerate() {
            anchor.keep(Key::of_reply(index), fd.as_fd());
        }
    }

    /// Drops the descriptors of the last reply. If a program's end of a file's socket is among
    /// them, [`Self::settle`] waits for that.
    pub fn drop_reply(&mut self, has_socket: bool) {
        let mut kept = self.kept.lock();
        let anchor = &mut kept.anchor;
        // Without a probe, a file that is closed at once may be noticed later.
        if has_socket && let Ok((ours, theirs)) = SeqPacket::pair() {
            anchor.keep(Key::PROBE, theirs.as_fd());
            self.probe = Some(ours);
        }
        anchor.drop_now(Key::OF_REPLY);
    }

    /// Waits until the anchor has closed the descriptors of the last reply. Only then does a file's
    /// socket show that its program has closed it.
    pub fn settle(&mut self) {
        if let Some(probe) = self.probe.take() {
            let mut fds = [PollFd::new(probe.as_fd(), PollFlags::POLLIN)];
            let timeout = PollTimeout::try_from(CLOSE_TIMEOUT).unwrap_or(PollTimeout::MAX);
            let _ = poll(&mut fds, timeout);
        }
    }

    /// Records the programs, if they have changed. The next state of the worker brings the record
    /// into force. Returns whether there is one.
    pub fn record(&mut self, state: &mut dyn ProgramState) -> bool {
        let written = self.write(state);
        if written.is_none() {
            // The next record has all of the state.
            (self.log, self.is_lost) = (None, true);
        }
        self.is_present = true;
        written != Some(false)
    }

    /// Notes that the programs have ended, and their descriptors are of no use. Returns whether
    /// there were any.
    pub fn end(&mut self) -> bool {
        // A connection that has arrived is kept before it is recorded.
        if !std::mem::take(&mut self.is_present) {
            return false;
        }
        let mut kept = self.kept.lock();
        for key in std::mem::take(&mut kept.keys) {
            kept.anchor.drop_later(key..=key);
        }
        kept.missing.clear();
        (self.log, self.is_lost) = (None, false);
        true
    }

    /// Returns whether there is a new record, or none if it cannot be written.
    fn write(&mut self, state: &mut dyn ProgramState) -> Option<bool> {
        let log = self.append(state)?;
        let record = Record { last: state.last(), answer: state.answer().cloned(), log };
        let contents = postcard::to_stdvec(&record).ok()?;
        if contents == self.last && self.is_present && !self.is_lost {
            return Some(false);
        }
        let number = self.number.wrapping_add(1);
        if !self.file()?.commit(number, &contents) {
            return None;
        }
        (self.number, self.log, self.last) = (number, Some(log), contents);
        self.is_lost = false;
        Some(true)
    }

    /// Adds what has changed to the log, or begins another log. Returns the log.
    fn append(&mut self, state: &mut dyn ProgramState) -> Option<Log> {
        let changes = state.take_changes();
        let part = match (&changes, self.log) {
            (None, Some(log)) => return Some(log),
            (Some(changes), Some(_)) => {
                self.keep_memory(changes, state);
                postcard::to_stdvec(changes).ok()?
            }
            (_, None) => {
                self.keep_memory(&state.all(), state);
                self.file()?.begin_log();
                Vec::new()
            }
        };
        self.file()?.append(&part, || postcard::to_stdvec(&state.all()).unwrap_or_default())
    }

    /// Keeps the files of new memory, and drops those of memory that was freed.
    fn keep_memory(&self, changes: &ProgramChanges, state: &dyn ProgramState) {
        let mut kept = self.kept.lock();
        for &id in &changes.memory {
            let key = Key::program_memory(id.0);
            match state.memory_file(id) {
                Some(file) => {
                    // The worker before may have passed it on for the request that this one has
                    // repeated. From now on, a state needs it.
                    if kept.unfinished.remove(&id.0).is_some() {
                        kept.keys.remove(&key);
                    }
                    kept.keep(key, file);
                }
                None => kept.drop_later(key),
            }
        }
    }

    /// Returns the file, which is made for the first record.
    fn file(&mut self) -> Option<&mut ProgramRecords> {
        if self.file.is_none() {
            let (file, fd) = ProgramRecords::create()
                .inspect_err(|error| log::warn!("Programs cannot be recorded: {error}"))
                .ok()?;
            self.kept.lock().anchor.keep(Key::PROGRAMS, fd.as_fd());
            self.file = Some(file);
        }
        self.file.as_mut()
    }
}

#[cfg(test)]
mod tests;
