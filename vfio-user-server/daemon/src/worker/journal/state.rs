//! Contents of the journal's records.

use anyhow::{Context, Result, ensure};
use mdev_core::device::RunningFunction;
use mdev_core::mem::{MAX_MAPS, RunningMap};
use serde::{Deserialize, Serialize};
use vfio_user_server::journal::SessionRecord;
use vgpud_api::AttachedClient;

use super::layout::{Journal, Kind};

/// State of a worker.
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

/// What a worker continues with.
#[derive(Debug)]
pub struct Continued {
    state: Vec<u8>,
    /// Position of the client of the GPU.
    pub position: u64,
    /// Mappings of guest memory.
    pub memory: Vec<RunningMap>,
}

impl Continued {
    /// Reads the state in force.
    ///
    /// # Errors
    ///
    /// Fails if no other worker can continue, or a record is damaged.
    pub fn read(journal: &Journal) -> Result<Self> {
        let what = "The worker before was in a state from which none can continue";
        ensure!(journal.is_continuable(), what);
        let bytes = journal.committed().context("The journal's state is damaged")?;
        let state = parse(&bytes)?;
        let memory = journal.read(Kind::Memory, state.memory);
        let memory = memory.context("The journal's list of guest memory is damaged")?;
        let memory: Vec<_> = postcard::from_bytes(&memory).context("The journal cannot be read")?;
        ensure!(memory.len() <= MAX_MAPS, "The journal has too many mappings");
        Ok(Self { position: state.position, memory, state: bytes })
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

fn parse(state: &[u8]) -> Result<State<'_>> {
    postcard::from_bytes(state).context("The journal cannot be read")
}
