//! Guest memory of the function, as the client maps it.

use std::os::fd::OwnedFd;

use super::VirtualFunction;
use crate::ids::GuestPa;
use crate::mem::{DmaAccess, MemError};

impl VirtualFunction {
    /// Adds guest memory. The device cannot access memory without a file.
    pub fn dma_map(
        &mut self,
        iova: GuestPa,
        size: u64,
        access: DmaAccess,
        file: Option<(OwnedFd, u64)>,
    ) -> Result<(), MemError> {
        self.memory.lock().map(iova, size, access, file)
    }

    /// Removes a mapping of exactly this range. Afterwards neither the device nor the GPU accesses
    /// the range.
    pub fn dma_unmap(&mut self, iova: GuestPa, size: u64) -> Result<(), MemError> {
        let mut client = self.client.lock();
        self.memory.lock().unmap(&mut **client, iova, size)
    }

    /// Removes all mappings and returns their size in bytes.
    pub fn dma_unmap_all(&mut self) -> u64 {
        let mut client = self.client.lock();
        self.memory.lock().clear(&mut **client)
    }
}
