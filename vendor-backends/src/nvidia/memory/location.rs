//! Place in a vGPU's memory.

use std::sync::Arc;

use ipc::mem::Mapping;
use mdev_core::ids::MemoryId;
use nvidia_rm::rm_client::Object;

/// Location in guest memory or video memory, such as that of a USERD.
#[derive(Clone, Debug)]
pub struct MemoryLocation {
    /// Memory object.
    pub object: Arc<Object>,
    /// Offset in the object, in bytes.
    pub offset: u64,
    /// Import or allocation.
    pub memory: Option<MemoryId>,
    /// Mapping of the object in this process, for guest memory.
    pub mapping: Option<Arc<Mapping>>,
}
