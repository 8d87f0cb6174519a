//! One mapping of guest memory.

use std::io;
use std::os::fd::OwnedFd;

use vm_memory::{
    GuestAddress, GuestMemoryRegion, GuestMemoryRegionBytes, MemoryRegionAddress, VolatileSlice,
    guest_memory,
};

use super::DmaAccess;
use crate::gpu::Client;
use crate::ids::MemoryId;
use crate::sigbus::GuardedMapping;

/// Mapping as the client has made it.
#[derive(Debug)]
pub(super) struct Map {
    pub size: u64,
    pub access: DmaAccess,
    /// The file and the offset, if the range is accessible.
    pub file: Option<(OwnedFd, u64)>,
    pub import: Option<MemoryId>,
    /// Error of mapping the file.
    pub failure: Option<io::Error>,
    /// Whether the client has truncated the file. The range is no longer accessible.
    pub truncated: bool,
}

impl Map {
    /// Releases the import, if there is one.
    pub fn release(&mut self, client: &mut dyn Client, iova: u64) -> bool {
        let Some(memory) = self.import.take() else { return false };
        if let Err(error) = client.release(memory) {
            log::warn!("Cannot release guest memory at {iova:#x}: {error}");
        }
        true
    }
}

/// Mapping with a file, for vm-memory.
#[derive(Debug)]
pub(super) struct SharedRegion {
    pub start: u64,
    pub mapping: GuardedMapping,
}

impl GuestMemoryRegion for SharedRegion {
    type B = ();

    fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    fn start_addr(&self) -> GuestAddress {
        GuestAddress(self.start)
    }

    fn bitmap(&self) {}

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> guest_memory::Result<VolatileSlice<'_>> {
        Ok(self.mapping.slice().subslice(offset.0 as usize, count)?)
    }
}

impl GuestMemoryRegionBytes for SharedRegion {}
