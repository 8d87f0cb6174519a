//! Log of the scheduler's last decisions, each with its cause and the counters at that time.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::budget::Budget;
use crate::ids::VgpuId;

/// Number of records kept, as in NVIDIA's scheduler log.
pub const RECORDS: usize = 200;

/// Cause of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// A vGPU started.
    Started,
    /// A vGPU stopped.
    Stopped,
    /// A vGPU requested another share.
    Share,
    /// The policy or another setting changed.
    Policy,
    /// The vGPU used more or less engine time than was due.
    Repay,
    /// Other vGPUs compete than before, or work below their shares.
    Demand,
    /// The cap of the vGPU was reached, or allows it to run again.
    Cap,
    /// The vGPU was ahead of its share by more than slices can repay, or is not ahead any more.
    Ahead,
    /// There was no reading of the counters for a second.
    Stale,
}

/// Decision about one vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decision {
    /// Time slice.
    Slice(Duration),
    /// Budget, or none.
    Budget(Option<Budget>),
    /// Gate: true is open.
    Gate(bool),
}

/// Record of one decision.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Time of the event, by `CLOCK_MONOTONIC`, in nanoseconds.
    pub at_ns: u64,
    /// The vGPU.
    pub vgpu: VgpuId,
    /// The decision.
    pub decision: Decision,
    /// The cause.
    pub cause: Cause,
    /// Engine time that the vGPU had used since its start.
    pub engine_ns: u64,
    /// Time that the vGPU had waited for the engine since its start.
    pub wait_ns: u64,
    /// Engine time that other vGPUs owed to the vGPU; negative if the vGPU owed.
    pub owed_ns: i64,
}

/// Log of the last records, oldest first.
#[derive(Clone, Debug, Default)]
pub struct Log(VecDeque<Record>);

impl Log {
    /// Adds a record. A full log drops the oldest.
    pub fn push(&mut self, record: Record) {
        if self.0.len() == RECORDS {
            self.0.pop_front();
        }
        self.0.push_back(record);
    }

    /// Returns the records, oldest first.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Record> {
        self.0.iter()
    }
}
