//! Handover of a vGPU to another process of its VM: a VMM is replaced under a running guest.
//!
//! The vGPU's state is kept here in the meantime, and video memory stays where it is. What the new
//! process does to the function while it attaches, such as a reset, has no effect on the guest.

use std::mem;

use pci_registers::Interrupts;

use super::VirtualFunction;
use super::saved::{ConfigWrite, RestoreError, SaveError, SavedVgpu};
use crate::abi::control::VECTORS;
use crate::mem::GuestMemory;

/// vGPU between two processes: its state, and what the old process has given to the device.
#[derive(Debug)]
pub struct Handover {
    saved: SavedVgpu,
    memory: GuestMemory,
    irq: Interrupts,
}

impl VirtualFunction {
    /// Pauses the vGPU and puts its state, guest memory and interrupts aside, so that another
    /// process can attach. Refused, and without effect, if its state cannot be saved.
    pub fn begin_handover(&mut self) -> Result<Handover, SaveError> {
        self.pause()?;
        let saved = match self.save_vgpu() {
            Ok(saved) => saved,
            Err(error) => {
                self.resume()?;
                return Err(error);
            }
        };
        // Only an unused import can be made again for the new process within the limits.
        self.reset();
        let memory = {
            let mut client = self.client.lock();
            let mut memory = self.memory.lock();
            memory.release_imports(&mut **client);
            mem::take(&mut *memory)
        };
        let irq = mem::replace(&mut self.irq, Interrupts::new(true, VECTORS));
        Ok(Handover { saved, memory, irq })
    }

    /// Gives the vGPU to the process that has attached meanwhile. The vGPU is paused on success,
    /// and reset on an error. Returns the writes to configuration space that the process must learn
    /// of.
    pub fn finish_handover(
        &mut self,
        handover: &Handover,
    ) -> Result<Vec<ConfigWrite>, RestoreError> {
        self.reset();
        self.restore_checked(&handover.saved)?;
        Ok(self.config_writes())
    }

    /// Gives the vGPU back to the old process. The vGPU is paused on success, and reset on an
    /// error.
    pub fn abandon_handover(&mut self, handover: Handover) -> Result<(), RestoreError> {
        self.release_client();
        *self.memory.lock() = handover.memory;
        self.irq = handover.irq;
        self.restore_checked(&handover.saved)
    }

    /// Forgets what a process has given to the device, and resets the device. Video memory stays.
    pub fn release_client(&mut self) {
        self.irq.reset();
        self.reset();
        self.dma_unmap_all();
    }
}
