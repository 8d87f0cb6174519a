//! Guest memory that the vGPU writes, for a VM whose memory is copied while it runs.

use std::ops::ControlFlow;

use super::VirtualFunction;
use crate::gpu::GpuError;
use crate::ids::GuestPa;
use crate::mem::{NotRecorded, Unreachable};
use crate::stream::MAX_CHUNK;

/// Error of reading what the vGPU has written.
#[derive(Debug, thiserror::Error)]
pub enum WrittenError<E> {
    /// It is not known what was written.
    #[error("{0}")]
    NotRecorded(#[from] NotRecorded),
    /// The VM has taken the memory away.
    #[error("{0}")]
    Unreachable(#[from] Unreachable),
    /// The caller does not take it.
    #[error("{0}")]
    Put(E),
}

impl VirtualFunction {
    /// Records from now on which guest memory the vGPU writes, until [`Self::end_write_log`] or
    /// until the VM leaves.
    pub fn begin_write_log(&mut self) -> Result<(), GpuError> {
        let mut client = self.client.lock();
        self.memory.lock().begin_log(&mut **client)
    }

    /// Ends the record.
    pub fn end_write_log(&mut self) {
        let mut client = self.client.lock();
        self.memory.lock().end_log(&mut **client);
    }

    /// Passes the guest memory that a paused vGPU has written, from an address on, to `put`: pieces
    /// of at most [`MAX_CHUNK`] bytes with their addresses, in ascending order, until `put` breaks.
    pub fn written<E>(
        &mut self,
        from: GuestPa,
        mut put: impl FnMut(GuestPa, &[u8]) -> Result<ControlFlow<()>, E>,
    ) -> Result<(), WrittenError<E>> {
        let mut memory = self.memory.lock();
        let mut piece = Vec::new();
        for (GuestPa(start), len) in memory.written()? {
            let end = start + len;
            for at in (start.max(from.0)..end).step_by(MAX_CHUNK) {
                piece.resize((end - at).min(MAX_CHUNK as u64) as usize, 0);
                memory.read(GuestPa(at), &mut piece)?;
                if put(GuestPa(at), &piece).map_err(WrittenError::Put)?.is_break() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Writes guest memory that the vGPU had written before it was restored.
    pub fn fill_guest_memory(&mut self, address: GuestPa, data: &[u8]) -> Result<(), Unreachable> {
        self.memory.lock().write(address, data)
    }
}
