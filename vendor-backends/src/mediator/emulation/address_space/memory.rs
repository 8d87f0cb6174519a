//! Memory that an address space can map: the video memory partition and the guest's imports.

use std::sync::Arc;

use ipc::mem::Mapping;
use mdev_core::ids::MemoryId;

use super::first_touch::ImportedFile;
use crate::mediator::hardware::Attachment;
use crate::mediator::wire::Refusal;

/// Maximum number of imports of one vGPU.
const MAX_IMPORTS: usize = 256;

/// Index of a memory: 0 is video memory, n + 1 is the import with id n.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(pub(super) u16);

impl Slot {
    /// Video memory.
    pub const VRAM: Self = Self(0);

    /// Returns the id of the import; `None` for video memory.
    pub fn memory(self) -> Option<MemoryId> {
        self.0.checked_sub(1).map(|id| MemoryId(id.into()))
    }
}

impl TryFrom<MemoryId> for Slot {
    type Error = Refusal;

    fn try_from(id: MemoryId) -> Result<Self, Refusal> {
        let slot = u16::try_from(id.0).ok().and_then(|id| id.checked_add(1));
        slot.map(Self).ok_or(Refusal::NoMemory)
    }
}

/// Memory that an address space may map.
#[derive(Debug)]
pub struct Memory {
    /// The device's mapping of the memory, if the device does DMA. Dropped before `mapping`.
    pub attachment: Option<Attachment>,
    /// This process' mapping of the memory.
    pub mapping: Arc<Mapping>,
    /// File of the memory, if the guest provides it.
    pub file: Option<ImportedFile>,
}

impl From<Arc<Mapping>> for Memory {
    fn from(mapping: Arc<Mapping>) -> Self {
        Self { attachment: None, mapping, file: None }
    }
}

/// All memory of one vGPU, with a limit on imported bytes.
#[derive(Debug)]
pub(super) struct Memories {
    slots: Vec<Option<Memory>>,
    imported_bytes: u64,
    max_import_bytes: u64,
}

impl Memories {
    pub fn new(vram: Option<Arc<Mapping>>, max_import_bytes: u64) -> Self {
        Self { slots: vec![vram.map(Memory::from)], imported_bytes: 0, max_import_bytes }
    }

    /// Replaces video memory. Returns the former.
    pub fn replace_vram(&mut self, vram: Arc<Mapping>) -> Option<Memory> {
        self.slots[0].replace(Memory::from(vram))
    }

    pub fn imported_bytes(&self) -> u64 {
        self.imported_bytes
    }

    /// Returns the bytes that may still be imported.
    pub fn import_room(&self) -> u64 {
        self.max_import_bytes - self.imported_bytes
    }

    /// Adds guest memory.
    pub fn import(&mut self, memory: Memory) -> Result<MemoryId, Refusal> {
        let len = memory.mapping.len();
        if len > self.import_room() {
            return Err(Refusal::ImportLimit);
        }
        let free = self.slots.iter().skip(1).position(Option::is_none);
        let id = free.unwrap_or(self.slots.len() - 1);
        if id >= MAX_IMPORTS {
            return Err(Refusal::ImportLimit);
        }
        self.imported_bytes += len;
        if id + 1 == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[id + 1] = Some(memory);
        Ok(MemoryId(id as u32))
    }

    /// Removes guest memory.
    pub fn remove(&mut self, slot: Slot) -> Result<Memory, Refusal> {
        let memory = self.slots.get_mut(usize::from(slot.0)).and_then(Option::take);
        let memory = memory.ok_or(Refusal::NoMemory)?;
        self.imported_bytes -= memory.mapping.len();
        Ok(memory)
    }

    /// Returns the memory in a slot.
    #[inline]
    pub fn get(&self, slot: Slot) -> Option<&Memory> {
        self.slots.get(usize::from(slot.0))?.as_ref()
    }

    /// Returns the files of all imports.
    pub fn files(&self) -> impl Iterator<Item = &ImportedFile> + Clone {
        self.slots.iter().flatten().filter_map(|memory| memory.file.as_ref())
    }

    /// Returns true if a guest has truncated a file of imported memory.
    pub fn poisoned(&self) -> bool {
        self.slots.iter().flatten().any(|memory| memory.mapping.poisoned())
    }
}
