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
    /// Mappings of guest memory.
    pub memory: Vec<RunningMap>,
}

impl Continued {
    /// Reads the state in force.
    ///
    /// # Errors
    ///
    /// Fails if a record is damaged.
    pub fn read(journal: &Journal) -> Result<Self> {
        let state = journal.committed().context("The journal's state is damaged")?;
        let mut read = Self { state, memory: Vec::new() };
        let memory = journal.read(Kind::Memory, read.state()?.memory);
        let memory = memory.context("The journal's list of guest memory is damaged")?;
        read.memory = postcard::from_bytes(&memory).context("The journal cannot be read")?;
        ensure!(read.memory.len() <= MAX_MAPS, "The journal has too many mappings");
        Ok(read)
    }

    /// Returns the state.
    ///
    /// # Errors
    ///
    /// Fails if the record is damaged.
    pub fn state(&self) -> Result<State<'_>> {
        postcard::from_bytes(&self.state).context("The journal cannot be read")
    }
}
