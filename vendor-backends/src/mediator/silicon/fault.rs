//! How a channel ends, and what an operation needs to know while it runs.

use mdev_core::abi::notifier;
use mdev_core::gpu::Pending;
use mdev_core::ids::VgpuId;

use super::address_space::{AddressSpace, MmuFault};
use super::clock::Turn;
use super::signals::Signals;
use crate::mediator::Hardware;

/// What ended a channel: a code of [`notifier`], and the address, method or entry that it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Error notifier code.
    pub code: u32,
    /// Address, method or entry.
    pub info: u64,
}

impl Fault {
    /// A method or QMD that the class does not have.
    pub fn class(info: impl Into<u64>) -> Self {
        Self { code: notifier::GR_ERROR, info: info.into() }
    }

    /// A pushbuffer, entry or host method that makes no sense.
    pub fn host(info: impl Into<u64>) -> Self {
        Self { code: notifier::PBDMA_ERROR, info: info.into() }
    }
}

impl From<MmuFault> for Fault {
    fn from(MmuFault(va): MmuFault) -> Self {
        Self { code: notifier::MMU_FAULT, info: va }
    }
}

/// How far an operation came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// To its end.
    Done,
    /// To the end of the turn: it goes on from there.
    More,
    /// To a semaphore that is not what it waits for.
    Blocked,
}

/// What an operation works with.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// What moves bytes.
    pub hardware: &'a dyn Hardware,
    /// Whose work it is.
    pub vgpu: VgpuId,
    /// The vGPU's address space.
    pub space: &'a AddressSpace,
    /// Its turn.
    pub turn: &'a Turn<'a>,
    /// Its interrupts.
    pub signals: &'a Signals,
    /// The channel's interrupt vector.
    pub vector: u32,
}

impl Context<'_> {
    /// Raises the channel's non-stall interrupt.
    pub fn interrupt(&self) {
        self.signals.raise(Pending::NONSTALL, Some(self.vector));
    }
}

/// Writes a semaphore: the payload comes after the timestamp and after all that was written before.
pub fn release(
    space: &AddressSpace,
    va: u64,
    payload: Payload,
    timestamp: Option<u64>,
) -> Result<(), MmuFault> {
    if let Some(now) = timestamp {
        space.store_u64(va.wrapping_add(8), now)?;
    }
    match payload {
        Payload::Word(word) => space.store_u32(va, word),
        Payload::Double(double) => space.store_u64(va, double),
    }
}

/// What a semaphore is set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// 32 bits.
    Word(u32),
    /// 64 bits.
    Double(u64),
}
