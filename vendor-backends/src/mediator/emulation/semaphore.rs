//! Semaphores: releases and acquires.

use mdev_core::abi::host::sem;
use serde::{Deserialize, Serialize};

use super::address_space::{AddressSpace, MmuFault};
use super::clock::now_ns;
use super::context::Progress;
use super::reduction::Reduction;
use crate::mediator::fault::Fault;

/// Payload of a semaphore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Payload {
    /// 32 bits.
    Word(u32),
    /// 64 bits.
    Double(u64),
}

impl Payload {
    /// Returns the lower 32 bits or all 64 bits of a payload.
    pub const fn new(payload: u64, is_64: bool) -> Self {
        if is_64 { Self::Double(payload) } else { Self::Word(payload as u32) }
    }
}

/// A release of a semaphore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// Address.
    pub va: u64,
    /// Value to write, or operand of the reduction.
    pub payload: Payload,
    /// Whether a timestamp is written at +8.
    pub timestamp: bool,
    /// Operation with the value in memory, instead of a write.
    pub reduction: Option<Reduction>,
}

impl Release {
    /// Executes the release. The payload is written after the timestamp and after all earlier
    /// writes.
    pub fn run(&self, space: AddressSpace<'_>) -> Result<(), MmuFault> {
        if self.timestamp {
            space.store_u64(self.va.wrapping_add(8), now_ns())?;
        }
        match (self.reduction, self.payload) {
            (None, Payload::Word(word)) => space.store_u32(self.va, word),
            (None, Payload::Double(double)) => space.store_u64(self.va, double),
            (Some(reduction), Payload::Word(word)) => {
                space.update_u32(self.va, |old| reduction.apply_u32(old, word))
            }
            (Some(reduction), Payload::Double(double)) => {
                space.update_u64(self.va, |old| reduction.apply_u64(old, double))
            }
        }
    }
}

/// A semaphore acquire. The channel yields the engine while it waits, with or without
/// [`sem::ACQUIRE_SWITCH_TSG`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Acquire {
    pub(super) va: u64,
    pub(super) payload: Payload,
    pub(super) operation: u32,
}

impl Acquire {
    /// Returns whether the semaphore satisfies the acquire.
    pub fn run(&self, space: AddressSpace<'_>) -> Result<Progress, Fault> {
        let satisfied = match self.payload {
            Payload::Word(want) => {
                let have = space.load_u32(self.va)?;
                let ahead = have.wrapping_sub(want).cast_signed() >= 0;
                self.compare(have.into(), want.into(), ahead, !(have | want) != 0)
            }
            Payload::Double(want) => {
                let have = space.load_u64(self.va)?;
                let ahead = have.wrapping_sub(want).cast_signed() >= 0;
                self.compare(have, want, ahead, !(have | want) != 0)
            }
        };
        Ok(if satisfied { Progress::Done } else { Progress::Blocked })
    }

    /// Compares values that are extended to 64 bits. The caller computes `ahead` and `nor`, which
    /// depend on the width.
    fn compare(&self, have: u64, want: u64, ahead: bool, nor: bool) -> bool {
        match self.operation {
            sem::ACQUIRE => have == want,
            sem::ACQ_STRICT_GEQ => have >= want,
            sem::ACQ_CIRC_GEQ => ahead,
            sem::ACQ_AND => have & want != 0,
            _ => nor,
        }
    }
}
