//! USERD: the page part through which a guest and the engine exchange a channel's ring indices.

use std::sync::Arc;

use ipc::mem::Mapping;
use mdev_core::ids::MemoryId;

/// Location of a channel's USERD.
#[derive(Debug)]
pub struct Userd {
    /// Memory that contains the USERD.
    pub mapping: Arc<Mapping>,
    /// Byte offset in the memory.
    pub offset: u64,
    /// Import that the memory belongs to; `None` for video memory.
    pub memory: Option<MemoryId>,
}

impl Userd {
    pub(super) fn load(&self, field: u64) -> u32 {
        self.mapping.load_u32(self.offset + field).unwrap_or_default()
    }

    pub(super) fn store(&self, field: u64, value: u32) {
        let _ = self.mapping.store_u32(self.offset + field, value);
    }
}
