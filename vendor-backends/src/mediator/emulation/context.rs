//! Context of the operations that a channel runs.

use mdev_core::gpu::Pending;
use mdev_core::ids::VgpuId;

use super::address_space::{Access, AddressSpace, MmuFault};
use super::interrupts::Interrupts;
use super::run_limit::RunLimit;
use crate::mediator::Hardware;
use crate::mediator::fault::Fault;

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
    /// Has the device write bytes, which may cross a page.
    pub fn write(&self, va: u64, bytes: &[u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < bytes.len() {
            let at = va.checked_add(done as u64).ok_or(MmuFault(va))?;
            let to = self.space.resolve(at, (bytes.len() - done) as u64, Access::Write)?;
            let end = done + to.len as usize;
            self.hardware.write(self.vgpu, to, &bytes[done..end])?;
            done = end;
        }
        Ok(())
    }

    /// Raises the channel's non-stall interrupt.
    pub fn raise_interrupt(&self) {
        self.interrupts.raise(Pending::NONSTALL, Some(self.vector));
    }
}
