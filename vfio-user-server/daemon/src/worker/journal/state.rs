//! Contents of the journal's records.

use std::os::fd::AsFd;

use anyhow::{Context, Result, ensure};
use mdev_core::device::JournaledFunction;
use mdev_core::mem::{JournaledMemory, MAX_MAPS};
use serde::{Deserialize, Serialize};
use vfio_user_server::journal::SessionRecord;
use vgpud_api::AttachedClient;

use super::descriptors::{Descriptors, Key};
use super::layout::{Journal, Kind};
use super::program_records::ProgramRecords;
use super::programs_recorder::JournaledPrograms;
use super::queue_recorder::{JournaledQueue, Recorded};
use crate::worker::queue_thread::Orders;

/// State of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State<'a> {
    /// Device.
    #[serde(borrow)]
    pub function: JournaledFunction<'a>,
    /// Position of the client of the GPU.
    pub position: u64,
    /// Number of the record of guest memory.
    pub memory: u64,
    /// VM that is attached.
    pub client: Option<AttachedClient>,
    /// Its session.
    pub session: SessionRecord,
    /// Control queue.
    pub queue: QueueState,
    /// Programs of the host.
    pub programs: ProgramsState,
}

/// What the event loop knows of the control queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueState {
    /// Number of the last record of the queue's thread. A later one has a later position.
    pub number: u64,
    /// That record has the position and the guest memory, not [`State`].
    pub has_position: bool,
    /// The queue runs.
    pub runs: bool,
    /// Orders for the thread.
    pub orders: Orders,
}

/// What the event loop knows of the programs of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramsState {
    /// Number of their record, or 0 without programs.
    pub number: u64,
}

/// What a worker adopts.
#[derive(Debug)]
pub struct Journaled {
    state: Vec<u8>,
    /// Position of the client of the GPU.
    pub position: u64,
    /// Number of the record of guest memory.
    pub memory_number: u64,
    /// Mappings of guest memory.
    pub memory: JournaledMemory,
    /// Number of the last record of the queue's thread.
    queue_number: u64,
    /// That record has the position and the guest memory.
    has_queue_position: bool,
    /// File with the records of the queue's thread.
    pub queue_file: Option<ProgramRecords>,
    /// Control queue, if it runs.
    pub queue: Option<JournaledQueue>,
    /// Orders for the queue's thread.
    pub orders: Orders,
    /// File with the records of the host's programs.
    pub programs_file: Option<ProgramRecords>,
    /// Programs of the host, if there are any.
    pub programs: Option<JournaledPrograms>,
}

impl Journaled {
    /// Reads the state in force.
    ///
    /// # Errors
    ///
    /// Fails if no other worker can continue, or a record is damaged.
    pub fn read(journal: &Journal, kept: &mut Descriptors) -> Result<Self> {
        let what = "The worker before was in a state from which none can continue";
        ensure!(journal.is_adoptable(), what);
        let bytes = journal.committed().context("The journal's state is damaged")?;
        let State { position, memory: memory_number, queue, programs, .. } = parse(&bytes)?;
        let mut take_file = |key| -> Result<Option<ProgramRecords>> {
            let file = kept.take(key).map(|file| ProgramRecords::open(file.as_fd()));
            Ok(file.transpose()?.flatten())
        };
        let (mut file, mut programs_file) = (take_file(Key::QUEUE)?, take_file(Key::PROGRAMS)?);
        let mut journaled_programs = None;
        if programs.number > 0 {
            let file = programs_file.as_mut().context("The record of the programs is missing")?;
            journaled_programs = Some(JournaledPrograms::read(file, programs.number)?);
        }
        let queue_number = queue.number.max(file.as_ref().map_or(0, ProgramRecords::number));
        let has_position = queue.has_position || queue_number > queue.number;
        let mut journaled = None;
        if has_position || queue.runs {
            let file = file.as_mut().context("The record of the control queue is missing")?;
            ensure!(!file.is_lost(), what);
            journaled = Some(JournaledQueue::read(file, queue_number)?);
        }
        let (position, memory) = match &mut journaled {
            Some(queue) if has_position => (queue.position, std::mem::take(&mut queue.memory)),
            _ => (position, read_memory(journal, memory_number)?),
        };
        ensure!(memory.maps.len() <= MAX_MAPS, "The journal has too many mappings");
        Ok(Self {
            state: bytes,
            position,
            memory_number,
            memory,
            queue_number,
            has_queue_position: has_position,
            queue_file: file,
            queue: journaled,
            orders: queue.orders,
            programs_file,
            programs: journaled_programs,
        })
    }

    /// Returns what is recorded of the client.
    pub fn recorded(&self) -> Recorded {
        Recorded {
            position: Some(self.position),
            number: self.queue_number,
            by_thread: self.has_queue_position,
            is_lost: false,
        }
    }

    /// Returns the state.
    ///
    /// # Errors
    ///
    /// Fails if the record is damaged.
    pub fn state(&self) -> Result<State<'_>> {
        parse(&self.state)
    }
}

/// Reads a record of guest memory.
fn read_memory(journal: &Journal, number: u64) -> Result<JournaledMemory> {
    let memory = journal.read(Kind::Memory, number);
    let memory = memory.context("The journal's list of guest memory is damaged")?;
    postcard::from_bytes(&memory).context("The journal cannot be read")
}

fn parse(state: &[u8]) -> Result<State<'_>> {
    postcard::from_bytes(state).context("The journal cannot be read")
}
