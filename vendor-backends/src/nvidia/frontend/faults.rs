//! What programs learn of errors of their channels: notifiers, and the cause of a fault.
//!
//! After an error, libcuda reads the states of the multiprocessors through its debugger object. The
//! driver reads them from the GPU, for a context that has its channel. Here the answer is made from
//! the channel's error alone: whether the memory management unit refused an access, which libcuda
//! reports as an illegal address.

use mdev_core::abi::notifier;
use mdev_core::gpu::Client;

use super::FrontEnd;
use super::call::{Stop, put_u32};
use super::control::{Control, WRONG_LENGTH};
use super::objects::Kind;
use crate::nvidia::sys::numbers::status;

/// `NV83DE_CTRL_DEBUG_READ_ALL_SM_ERROR_STATES_PARAMS`.
mod states {
    pub const LEN: usize = 4824;
    /// Offset of the handle of the channel.
    pub const CHANNEL: usize = 0;
    /// Offset of the states of 100 multiprocessors, which are followed by the fault.
    pub const FIRST: usize = 8;
    /// Offset of the fault, between an old form of it and its kind: whether there was one.
    pub const FAULT_VALID: usize = 4812;
    pub const END: usize = 4820;
}

impl FrontEnd {
    /// Writes the notifiers of channels that have failed.
    pub fn note_errors(&mut self, gpu: &mut dyn Client) {
        let memories = &self.memories;
        for object in self.clients.all_mut() {
            let Kind::Channel { handle, notifier, failed, ended: false, .. } = &mut object.kind
            else {
                continue;
            };
            let Ok(found) = gpu.query_channel(handle.id) else { continue };
            if found.error == 0 || *failed {
                continue;
            }
            *failed = true;
            if let Some(store) = notifier {
                memories.write(*store, 0, &notification(found.error));
            }
        }
    }

    /// `NV83DE_CTRL_CMD_DEBUG_READ_ALL_SM_ERROR_STATES`. Errors of other kinds than faults are
    /// refused: their cause is in the states, which are not read.
    pub(super) fn fault_states(
        &self,
        gpu: &mut dyn Client,
        control: &mut Control,
    ) -> Result<(), Stop> {
        if control.params.len() != states::LEN {
            return Err(WRONG_LENGTH);
        }
        let target = control.u32(states::CHANNEL)?;
        let object = self.clients.object(control.file, control.root, target)?;
        let Kind::Channel { handle, ended, .. } = object.kind else {
            return Err(Stop::Status(status::INVALID_OBJECT_HANDLE));
        };
        if ended || gpu.query_channel(handle.id)?.error != notifier::MMU_FAULT {
            return Err(Stop::Status(status::NOT_SUPPORTED));
        }
        let outputs = control.params.get_mut(states::FIRST..states::END).ok_or(WRONG_LENGTH)?;
        outputs.fill(0);
        // The kind, 0, is that of an address without a mapping.
        put_u32(&mut control.params, states::FAULT_VALID, 1).ok_or(WRONG_LENGTH)
    }
}

/// Returns an `NvNotification` with the error of a channel.
fn notification(error: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[8..12].copy_from_slice(&error.to_le_bytes());
    // The status: an error.
    bytes[14..16].fill(0xff);
    bytes
}
