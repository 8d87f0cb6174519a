//! Contents of the journal's records.

use std::os::fd::AsFd;

use anyhow::{Context, Result, ensure};
use mdev_core::device::RunningFunction;
use mdev_core::mem::{MAX_MAPS, RunningMemory, RunningPart};
use serde::{Deserialize, Serialize};
use vfio_user_server::journal::SessionRecord;
use vgpud_api::AttachedClient;

use super::kept::{Kept, Key};
use super::layout::{Journal, Kind};
use super::programs_recorder::ContinuedPrograms;
use super::queue_recorder::{ContinuedQueue, Recorded};
use super::record_file::RecordFile;
use crate::worker::queue_thread::Orders;

/// State of a worker. [`QueueState`] and [`ProgramsState`] follow it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State<'a> {
    /// Device.
    #[serde(borrow)]
    pub function: RunningFunction<'a>,
    /// Position of the client of the GPU.
    pub position: u64,
    /// Number of the record of guest memory.
    pub memory: u64,
    /// VM that is attached.
    pub client: Option<AttachedClient>,
    /// Its session.
    pub session: SessionRecord,
}

/// What the event loop knows of the control queue. Journals of version 2 have none.
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

/// What the event loop knows of the programs of the host. Journals of versions before 4 have none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramsState {
    /// Number of their record, or 0 without programs.
    pub number: u64,
}

/// What a worker continues with.
#[derive(Debug)]
pub struct Continued {
    state: Vec<u8>,
    /// Position of the client of the GPU.
    pub position: u64,
    /// Number of the record of guest memory.
    pub memory_number: u64,
    /// Mappings of guest memory.
    pub memory: RunningMemory,
    /// Number of the last record of the queue's thread.
    queue_number: u64,
    /// That record has the position and the guest memory.
    has_queue_position: bool,
    /// File with the records of the queue's thread.
    pub queue_file: Option<RecordFile>,
    /// Control queue, if it runs.
    pub queue: Option<ContinuedQueue>,
    /// Orders for the queue's thread.
    pub orders: Orders,
    /// File with the records of the host's programs.
    pub programs_file: Option<RecordFile>,
    /// Programs of the host, if there are any.
    pub programs: Option<ContinuedPrograms>,
}

impl Continued {
    /// Reads the state in force.
    ///
    /// # Errors
    ///
    /// Fails if no other worker can continue, or a record is damaged.
    pub fn read(journal: &Journal, kept: &mut Kept) -> Result<Self> {
        let what = "The worker before was in a state from which none can continue";
        ensure!(journal.is_continuable(), what);
        let bytes = journal.committed().context("The journal's state is damaged")?;
        let (State { position, memory: memory_number, .. }, queue, programs) = parse(&bytes)?;
        let mut take_file = |key| -> Result<Option<RecordFile>> {
            let file = kept.take(key).map(|file| RecordFile::open(file.as_fd()));
            Ok(file.transpose()?.flatten())
        };
        let (mut file, mut programs_file) = (take_file(Key::QUEUE)?, take_file(Key::PROGRAMS)?);
        let mut continued_programs = None;
        if programs.number > 0 {
            let file = programs_file.as_mut().context("The record of the programs is missing")?;
            continued_programs = Some(ContinuedPrograms::read(file, programs.number)?);
        }
        let queue_number = queue.number.max(file.as_ref().map_or(0, RecordFile::number));
        let has_position = queue.has_position || queue_number > queue.number;
        let mut continued = None;
        if has_position || queue.runs {
            let file = file.as_mut().context("The record of the control queue is missing")?;
            ensure!(!file.is_lost(), what);
            continued = Some(ContinuedQueue::read(file, queue_number)?);
        }
        let (position, memory) = match &mut continued {
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
            queue: continued,
            orders: queue.orders,
            programs_file,
            programs: continued_programs,
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
        parse(&self.state).map(|(state, ..)| state)
    }
}

/// Encodes the record of guest memory. Parts of mappings follow the mappings.
pub fn encode_memory(memory: &RunningMemory) -> postcard::Result<Vec<u8>> {
    postcard::to_extend(&memory.parts, postcard::to_stdvec(&memory.maps)?)
}

fn read_memory(journal: &Journal, number: u64) -> Result<RunningMemory> {
    let memory = journal.read(Kind::Memory, number);
    decode_memory(&memory.context("The journal's list of guest memory is damaged")?)
}

fn decode_memory(record: &[u8]) -> Result<RunningMemory> {
    let (maps, rest) = postcard::take_from_bytes(record).context("The journal cannot be read")?;
    Ok(RunningMemory { maps, parts: decode_parts(rest)? })
}

/// Decodes the parts of mappings at the end of a record. Journals of versions before 5 have none.
pub fn decode_parts(rest: &[u8]) -> Result<Vec<RunningPart>> {
    if rest.is_empty() {
        return Ok(Vec::new());
    }
    postcard::from_bytes(rest).context("The journal cannot be read")
}

fn parse(state: &[u8]) -> Result<(State<'_>, QueueState, ProgramsState)> {
    const WHAT: &str = "The journal cannot be read";
    let (state, rest) = postcard::take_from_bytes(state).context(WHAT)?;
    if rest.is_empty() {
        return Ok((state, QueueState::default(), ProgramsState::default()));
    }
    let (queue, rest) = postcard::take_from_bytes(rest).context(WHAT)?;
    if rest.is_empty() {
        return Ok((state, queue, ProgramsState::default()));
    }
    Ok((state, queue, postcard::from_bytes(rest).context(WHAT)?))
}

#[cfg(test)]
mod tests {
    use mdev_core::device::{FunctionSpec, VirtualFunction};
    use mdev_core::ids::{GuestPa, MemoryId, VgpuId};
    use mdev_core::mem::{DmaAccess, RunningMap};
    use mdev_core::testing::Recorder;

    use super::*;

    #[test]
    fn states_of_earlier_versions_have_no_queue_or_programs() {
        let spec = FunctionSpec {
            vgpu: VgpuId::random(),
            type_name: "TEST-1C".into(),
            display: None,
            doorbell_mapped: true,
        };
        let function = VirtualFunction::new(&spec, Recorder::new().0).unwrap();
        let function = function.running();
        let session = SessionRecord::default();
        let state = State { function, position: 7, memory: 3, client: None, session };
        let version_2 = postcard::to_stdvec(&state).unwrap();
        let none = ProgramsState::default();
        assert_eq!(parse(&version_2).unwrap(), (state.clone(), QueueState::default(), none));
        let queue = QueueState { number: 5, has_position: true, runs: true, ..Default::default() };
        let version_3 = postcard::to_extend(&queue, version_2).unwrap();
        assert_eq!(parse(&version_3).unwrap(), (state.clone(), queue.clone(), none));
        let programs = ProgramsState { number: 9 };
        let version_4 = postcard::to_extend(&programs, version_3).unwrap();
        assert_eq!(parse(&version_4).unwrap(), (state, queue, programs));
    }

    #[test]
    fn mappings_of_earlier_versions_have_no_parts() {
        let map = RunningMap {
            address: GuestPa(1 << 32),
            size: 1 << 30,
            access: DmaAccess::READ,
            offset: Some(0),
            import: None,
        };
        let part = RunningPart { address: map.address, len: 1 << 26, import: MemoryId(3) };
        let memory = RunningMemory { maps: vec![map], parts: vec![part] };
        assert_eq!(decode_memory(&encode_memory(&memory).unwrap()).unwrap(), memory);
        let version_4 = postcard::to_stdvec(&memory.maps).unwrap();
        let before = RunningMemory { parts: Vec::new(), ..memory };
        assert_eq!(decode_memory(&version_4).unwrap(), before);
    }
}
