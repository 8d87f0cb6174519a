//! Context of the operations that a channel runs.

use mdev_core::gpu::Pending;
use mdev_core::ids::VgpuId;

use super::address_space::AddressSpace;
use super::interrupts::Interrupts;
use super::run_limit::RunLimit;
use crate::mediator::Hardware;

/// Progress of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The operation is complete.
    Done,
    /// The run limit was reached. The next run continues the operation.
    More,
    /// The operation waits for a semaphore.
    Blocked,
}

/// Context of one run of a channel.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The device.
    pub hardware: &'a dyn Hardware,
    /// The vGPU of the channel.
    pub vgpu: VgpuId,
    /// The channel's address space.
    pub space: AddressSpace<'a>,
    /// Limit of the run.
    pub limit: &'a RunLimit<'a>,
    /// The vGPU's interrupts.
    pub interrupts: &'a Interrupts,
    /// The channel's interrupt vector.
    pub vector: u32,
}

impl Context<'_> {
    /// Raises the channel's non-stall interrupt.
    pub fn raise_interrupt(&self) {
        self.interrupts.raise(Pending::NONSTALL, Some(self.vector));
    }
}
