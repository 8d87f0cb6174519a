//! Checkpoints of the guest's CUDA programs, so that the vGPU can be saved.
//!
//! The state of CUDA programs cannot be saved from outside. An agent in the guest has NVIDIA's
//! libcuda move it into the programs' own memory, which is saved with the VM. Then nothing is left
//! at the vGPU, and the guest's driver stops the control queue.

use super::interrupts::Delivery;
use super::{SaveError, VirtualFunction};
use crate::abi::control::{CHECKPOINT_WANTED, CheckpointState};
use crate::gpu::Pending;

impl VirtualFunction {
    /// Asks the guest to checkpoint its programs until [`Self::end_checkpoint`], unless it was
    /// asked already. Returns whether no program uses the vGPU any more.
    ///
    /// # Errors
    ///
    /// Fails if the vGPU could not be saved then, or the guest refuses. Its programs continue then,
    /// and the request has ended.
    pub fn checkpoint(&mut self) -> Result<bool, SaveError> {
        if self.lost {
            return Err(SaveError::Lost);
        }
        if !self.can_save() {
            return Err(SaveError::Unsupported);
        }
        match self.control.checkpoint_state() {
            CheckpointState::None if self.queue_runs() => {
                self.end_checkpoint();
                Err(SaveError::NoAgent)
            }
            CheckpointState::None => Ok(true),
            _ if !self.is_checkpoint_wanted() => {
                self.control.forget_answer();
                self.change_checkpoint_request();
                Ok(false)
            }
            CheckpointState::Ready => Ok(false),
            CheckpointState::Done => Ok(!self.queue_runs()),
            CheckpointState::Refused => {
                self.end_checkpoint();
                Err(SaveError::Refused(self.control.refusal()))
            }
        }
    }

    /// Tells the guest to restore its programs, if it was asked to checkpoint them.
    pub fn end_checkpoint(&mut self) {
        if self.is_checkpoint_wanted() {
            self.change_checkpoint_request();
        }
    }

    /// Returns whether the guest is asked to checkpoint its programs.
    pub fn is_checkpoint_wanted(&self) -> bool {
        self.control.checkpoint_request() & CHECKPOINT_WANTED != 0
    }

    /// Returns whether the guest's programs are checkpointed, so that video memory is unused.
    pub(super) fn is_checkpointed(&self) -> bool {
        self.is_checkpoint_wanted()
            && self.control.checkpoint_state() == CheckpointState::Done
            && !self.queue_runs()
            && self.display.is_none()
    }

    fn change_checkpoint_request(&mut self) {
        self.control.change_checkpoint_request();
        self.raise(Pending::QUEUE, Delivery::All);
    }
}
