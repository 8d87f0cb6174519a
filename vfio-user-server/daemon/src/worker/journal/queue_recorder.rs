//! Recording of what the control queue's thread does.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use mdev_core::gpu::{Adoption, Client};
use mdev_core::mem::{GuestMemory, JournaledMemory};
use programs::control_queue::ControlQueue;
use programs::control_queue::journal::QueueState;
use serde::{Deserialize, Serialize};

use super::descriptors::{Anchor, Key};
use super::program_records::{Log, ProgramRecords};

/// Record of the queue's thread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// Position of the client of the GPU.
    position: u64,
    memory: JournaledMemory,
    /// Number of the last order that is done.
    done: u64,
    /// Value of `QUEUE_STATUS`.
    status: u32,
    queue: Option<(QueueState, Log)>,
}

/// What the event loop has to know of the thread's records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recorded {
    /// Position of the client that is recorded, if one is.
    pub position: Option<u64>,
    /// Number of the thread's last record, or 0.
    pub number: u64,
    /// The position is that of the thread's last record.
    pub by_thread: bool,
    /// The last record could not be written.
    pub is_lost: bool,
}

/// [`Recorded`], for both threads.
#[derive(Clone, Debug, Default)]
pub struct SharedRecorded(Arc<Mutex<Recorded>>);

impl SharedRecorded {
    /// Returns what is recorded.
    pub fn lock(&self) -> MutexGuard<'_, Recorded> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// State of the queue that an earlier worker left.
#[derive(Debug)]
pub struct JournaledQueue {
    /// Position of the client of the GPU.
    pub position: u64,
    /// Mappings of guest memory.
    pub memory: JournaledMemory,
    /// Number of the last order that is done.
    pub done: u64,
    /// Value of `QUEUE_STATUS`.
    pub status: u32,
    /// Queue, and changes of the programs, while there are any.
    pub queue: Option<(QueueState, Vec<Vec<u8>>)>,
    /// The event loop was changing what the record has.
    pub is_held: bool,
}

impl JournaledQueue {
    /// Reads the record with a number.
    ///
    /// # Errors
    ///
    /// Fails if the record is damaged, or is not the last.
    pub fn read(file: &mut ProgramRecords, number: u64) -> Result<Self> {
        let bytes = file.record(number).context("The record of the control queue is damaged")?;
        let record = postcard::from_bytes(&bytes);
        let Record { position, memory, done, status, queue } =
            record.context("The record of the control queue is damaged")?;
        let queue = match queue {
            None => None,
            Some((queue, log)) => {
                let changes = file.parts(log).context("The record of the programs is damaged")?;
                Some((queue, changes))
            }
        };
        Ok(Self { position, memory, done, status, queue, is_held: file.is_held() })
    }
}

/// Recorder of the queue's thread.
#[derive(Debug)]
pub struct QueueRecorder {
    anchor: Anchor,
    file: Option<ProgramRecords>,
    recorded: SharedRecorded,
    /// The last record.
    last: Vec<u8>,
    /// Log of the last record.
    log: Option<Log>,
}

impl QueueRecorder {
    /// Creates the recorder. `file` is an earlier worker's, if there was one.
    pub fn new(anchor: Anchor, file: Option<ProgramRecords>, recorded: SharedRecorded) -> Self {
        Self { anchor, file, recorded, last: Vec::new(), log: None }
    }

    /// Sets whether the event loop is changing what the record has.
    pub fn set_held(&self, held: bool) {
        if let Some(file) = &self.file {
            file.set_held(held);
        }
    }

    /// Notes that the queue has ended. The log of the next one begins anew.
    pub fn end_queue(&mut self) {
        self.log = None;
    }

    /// Records the state, if it has changed. If it cannot be recorded, no other worker continues
    /// until a later one is.
    pub fn commit(
        &mut self,
        client: &mut dyn Client,
        memory: &GuestMemory,
        mut queue: Option<&mut ControlQueue>,
        (done, status): (u64, u32),
    ) {
        let position = client.adoption().and_then(Adoption::position);
        let Some(position) = position else { return self.lose() };
        let state = match &mut queue {
            None => None,
            Some(queue) => match self.append(queue) {
                Some(log) => Some((queue.state(), log)),
                None => return self.lose(),
            },
        };
        let record = Record { position, memory: memory.journaled(), done, status, queue: state };
        let Ok(contents) = postcard::to_stdvec(&record) else { return self.lose() };
        let Recorded { position: before, is_lost, .. } = *self.recorded.lock();
        if contents == self.last && before == Some(position) && !is_lost {
            return;
        }
        let Some(client) = client.adoption() else { return self.lose() };
        if !self.write(client, position, &contents) {
            return self.lose();
        }
        self.last = contents;
    }

    /// Adds what has changed to the log, or begins another log. Returns the log.
    fn append(&mut self, queue: &mut ControlQueue) -> Option<Log> {
        let part = match (queue.take_changes(), self.log) {
            (None, Some(log)) => return Some(log),
            (changes, Some(_)) => changes?,
            (_, None) => {
                self.file()?.begin_log();
                Vec::new()
            }
        };
        self.log = self.file()?.append(&part, || queue.all());
        self.log
    }

    /// Returns the file, which is made for the first record.
    fn file(&mut self) -> Option<&mut ProgramRecords> {
        if self.file.is_none() {
            let (file, fd) = ProgramRecords::create()
                .inspect_err(|error| log::warn!("Programs cannot be recorded: {error}"))
                .ok()?;
            self.anchor.keep(Key::QUEUE, fd.as_fd());
            self.file = Some(file);
        }
        self.file.as_mut()
    }

    fn write(&mut self, client: &mut dyn Adoption, position: u64, contents: &[u8]) -> bool {
        self.anchor.keep_for_client(client.take_descriptors());
        let number = self.recorded.lock().number.wrapping_add(1);
        let is_lost = self.anchor.is_lost();
        let Some(file) = self.file() else { return false };
        if is_lost || !file.commit(number, contents) {
            return false;
        }
        file.set_lost(false);
        let position = Some(position);
        *self.recorded.lock() = Recorded { position, number, by_thread: true, is_lost: false };
        client.record();
        self.anchor.recorded();
        true
    }

    /// Lets no other worker continue until the next record.
    fn lose(&mut self) {
        // The next record has all of the state.
        self.log = None;
        self.recorded.lock().is_lost = true;
        if let Some(file) = &self.file {
            file.set_lost(true);
        }
    }
}
