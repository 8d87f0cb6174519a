//! The last decisions of a scheduler, each with what it was made from.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::budget::Budget;
use crate::ids::VgpuId;

/// Records that are kept, as in NVIDIA's scheduler log.
pub const RECORDS: usize = 200;

/// Why a decision was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// A vGPU started.
    Started,
    /// A vGPU stopped.
    Stopped,
    /// A share was changed.
    Share,
    /// The policy or one of its knobs was changed.
    Policy,
    /// The vGPU had more or less time than was due to it.
    Repay,
    /// The vGPU used up what its cap allows.
    Cap,
    /// The vGPU ran ahead of its share by more than slices can repay, or the others have had theirs again.
    Ahead,
    /// Nothing was measured for a while.
    Stale,
}

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decision {
    /// The vGPU's slice.
    Slice(Duration),
    /// The vGPU's cap, or none.
    Budget(Option<Budget>),
    /// Whether its gate is open.
    Gate(bool),
}

/// One decision.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// When, by `CLOCK_MONOTONIC`: when the counters were last read.
    pub at_ns: u64,
    /// Whom it concerns.
    pub vgpu: VgpuId,
    /// What was decided.
    pub decision: Decision,
    /// Why.
    pub cause: Cause,
    /// Engine time that the vGPU had used, since it started.
    pub engine_ns: u64,
    /// Time that it had waited for the engine, since it started.
    pub wait_ns: u64,
    /// Engine time that it was owed (or, negative, that it owed) then.
    pub owed_ns: i64,
}

/// The last records, oldest first.
#[derive(Clone, Debug, Default)]
pub struct Log(VecDeque<Record>);

impl Log {
    /// Adds one; the oldest one goes.
    pub fn push(&mut self, record: Record) {
        if self.0.len() == RECORDS {
            self.0.pop_front();
        }
        self.0.push_back(record);
    }

    /// All that are kept, oldest first.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Record> {
        self.0.iter()
    }
}
