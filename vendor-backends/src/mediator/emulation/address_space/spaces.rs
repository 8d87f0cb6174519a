//! All address spaces of a vGPU, the memory behind them, and the common limit of page tables.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use ipc::mem::Mapping;
use mdev_core::abi::mailbox::{VA_END, VA_START};
use mdev_core::gpu::{Backing, CREATED_VA_END, MapRequest};
use mdev_core::ids::{GpuVa, MemoryId, SpaceId};
use mdev_core::units::{PAGE_SIZE, is_aligned};

use super::AddressSpace;
use super::first_touch::{self, FirstTouch};
use super::memory::{Memories, Memory, Slot};
use super::page_table::{LARGE, PageTables, Pte};
use crate::mediator::wire::Refusal;

/// Page tables that every vGPU may have in addition to those that its memory needs.
pub(super) const SPARE_TABLES: u64 = 1024;

/// Address spaces that a vGPU may create.
pub const MAX_CREATED: usize = 64;

/// Returns the limit of page tables for video memory and imports: two per large page.
///
/// Imports count up to the host's memory, because a sparse file can be of any length.
pub(super) fn max_tables(vram_bytes: u64, imported_bytes: u64) -> u64 {
    let bytes = vram_bytes.saturating_add(imported_bytes.min(host_memory_bytes()));
    bytes.div_ceil(LARGE).saturating_mul(2).saturating_add(SPARE_TABLES)
}

/// Returns the size of the host's memory.
pub(super) fn host_memory_bytes() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| nix::sys::sysinfo::sysinfo().map_or(u64::MAX, |info| info.ram_total()))
}

/// Page tables of a vGPU's address spaces.
#[derive(Debug, Default)]
pub struct SpaceTables {
    default: PageTables,
    created: BTreeMap<u32, PageTables>,
}

impl SpaceTables {
    fn get(&self, space: SpaceId) -> Option<&PageTables> {
        if space == SpaceId::DEFAULT { Some(&self.default) } else { self.created.get(&space.0) }
    }

    fn get_mut(&mut self, space: SpaceId) -> Option<&mut PageTables> {
        if space == SpaceId::DEFAULT {
            Some(&mut self.default)
        } else {
            self.created.get_mut(&space.0)
        }
    }

    /// Returns the number of directories and tables of all address spaces.
    pub(super) fn count(&self) -> u64 {
        self.created.values().map(PageTables::count).sum::<u64>() + self.default.count()
    }

    fn unmap_slot(&mut self, slot: Slot) {
        self.default.unmap_slot(slot);
        self.created.values_mut().for_each(|tables| tables.unmap_slot(slot));
    }
}

/// The address spaces of a vGPU and the memory that they can map.
#[derive(Debug)]
pub struct AddressSpaces {
    pub(super) tables: SpaceTables,
    /// Limit of directories and tables of all address spaces.
    pub(super) max_tables: u64,
    last_id: u32,
    memories: Memories,
    first_touch: FirstTouch,
}

impl AddressSpaces {
    /// Creates the default address space for a partition of video memory, if there is one.
    pub fn new(vram: Option<Arc<Mapping>>, max_import_bytes: u64) -> Self {
        let vram_bytes = vram.as_ref().map_or(0, |vram| vram.len());
        Self {
            tables: SpaceTables::default(),
            max_tables: max_tables(vram_bytes, 0),
            last_id: SpaceId::DEFAULT.0,
            memories: Memories::new(vram, max_import_bytes),
            first_touch: FirstTouch::default(),
        }
    }

    /// Adapts the limit of page tables to the memory that the vGPU has now. Existing tables beyond
    /// a lower limit stay.
    fn update_max_tables(&mut self) {
        let vram_bytes = self.memories.get(Slot::VRAM).map_or(0, |vram| vram.mapping.len());
        self.max_tables = max_tables(vram_bytes, self.imported_bytes());
    }

    /// Returns the bytes of imported guest memory.
    pub fn imported_bytes(&self) -> u64 {
        self.memories.imported_bytes()
    }

    /// Returns imported guest memory.
    pub fn memory(&self, memory: MemoryId) -> Result<&Mapping, Refusal> {
        let found = self.memories.get(Slot::try_from(memory)?);
        found.map(|memory| &*memory.mapping).ok_or(Refusal::NoMemory)
    }

    /// Returns the bytes that may still be imported.
    pub fn import_room(&self) -> u64 {
        self.memories.import_room()
    }

    /// Creates an address space. Ids are not reused, so that a stale id names no address space.
    pub fn create(&mut self) -> Result<SpaceId, Refusal> {
        if self.tables.created.len() >= MAX_CREATED {
            return Err(Refusal::SpaceLimit);
        }
        self.last_id = self.last_id.checked_add(1).ok_or(Refusal::SpaceLimit)?;
        self.tables.created.insert(self.last_id, PageTables::default());
        Ok(SpaceId(self.last_id))
    }

    /// Creates an address space with this id. Later ids are larger.
    pub fn restore(&mut self, space: SpaceId) -> Result<(), Refusal> {
        let used = self.tables.get(space).is_some();
        if used || space.0 == u32::MAX || self.tables.created.len() >= MAX_CREATED {
            return Err(Refusal::SpaceLimit);
        }
        self.last_id = self.last_id.max(space.0);
        self.tables.created.insert(space.0, PageTables::default());
        Ok(())
    }

    /// Returns the ids of the created address spaces.
    pub fn created(&self) -> impl Iterator<Item = SpaceId> {
        self.tables.created.keys().map(|id| SpaceId(*id))
    }

    /// Returns all mappings.
    pub fn mappings(&self) -> Vec<MapRequest> {
        let mut found = Vec::new();
        let spaces = std::iter::once(SpaceId::DEFAULT).chain(self.created());
        for space in spaces {
            let Some(tables) = self.tables.get(space) else { continue };
            tables.for_each(|va, first, len| {
                let offset = first.offset();
                let backing = match first.slot().memory() {
                    None => Backing::Vram { offset },
                    Some(memory) => Backing::Guest { memory, offset },
                };
                let writable = first.writable();
                let mapping = MapRequest { writable, ..MapRequest::new(GpuVa(va), len, backing) };
                found.push(mapping.in_space(space));
            });
        }
        found
    }

    /// Destroys a created address space. The caller should drop the page tables without holding the
    /// vGPU's lock.
    pub fn destroy(&mut self, space: SpaceId) -> Result<PageTables, Refusal> {
        self.tables.created.remove(&space.0).ok_or(Refusal::NoSpace)
    }

    /// Returns an address space.
    #[inline]
    pub fn get(&self, space: SpaceId) -> Option<AddressSpace<'_>> {
        let tables = self.tables.get(space)?;
        Some(AddressSpace { tables, memories: &self.memories })
    }

    /// Replaces video memory, and removes its mappings. The caller should drop the returned memory
    /// without holding the vGPU's lock.
    pub fn replace_vram(&mut self, vram: Arc<Mapping>) -> Option<Memory> {
        self.tables.unmap_slot(Slot::VRAM);
        self.memories.replace_vram(vram)
    }

    /// Adds guest memory.
    pub fn import(&mut self, memory: Memory) -> Result<MemoryId, Refusal> {
        if let Some(file) = &memory.file {
            self.first_touch.set_room(file);
        }
        let id = self.memories.import(memory)?;
        self.update_max_tables();
        Ok(id)
    }

    /// Removes guest memory and all its mappings. The caller should drop the memory without holding
    /// the vGPU's lock.
    pub fn release(&mut self, id: MemoryId) -> Result<Memory, Refusal> {
        let slot = Slot::try_from(id)?;
        let memory = self.memories.remove(slot)?;
        if let Some(file) = &memory.file {
            self.first_touch.add(file);
        }
        self.tables.unmap_slot(slot);
        self.update_max_tables();
        Ok(memory)
    }

    /// Returns the memory of a backing and the offset in it.
    pub fn locate(&self, backing: Backing) -> Result<(&Arc<Mapping>, u64), Refusal> {
        let (slot, offset) = slot_of(backing)?;
        let memory = self.memories.get(slot).ok_or(Refusal::NoMemory)?;
        Ok((&memory.mapping, offset))
    }

    /// Maps memory. An error changes nothing.
    pub fn map(&mut self, request: &MapRequest) -> Result<(), Refusal> {
        let MapRequest { space, va, len, backing, writable, .. } = *request;
        let range = check_range(space, va, len)?;
        let (slot, offset) = slot_of(backing)?;
        let memory = self.memories.get(slot).ok_or(Refusal::NoMemory)?;
        if !is_aligned(offset, PAGE_SIZE) {
            return Err(Refusal::Alignment);
        }
        if offset.checked_add(len).is_none_or(|end| end > memory.mapping.len()) {
            return Err(Refusal::Backing);
        }
        if writable && !memory.mapping.writable() {
            return Err(Refusal::ReadOnly);
        }
        let room = self.table_room();
        let tables = self.tables.get_mut(space).ok_or(Refusal::NoSpace)?;
        if let Some(mapped) = tables.first_mapped(range.clone()) {
            return Err(Refusal::Overlap(GpuVa(mapped)));
        }
        tables.map(range, Pte::new(slot, offset, writable), room)
    }

    /// Unmaps a range. An error, such as a page that is not mapped, changes nothing.
    pub fn unmap(&mut self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), Refusal> {
        let range = check_range(space, va, len)?;
        let room = self.table_room();
        self.tables.get_mut(space).ok_or(Refusal::NoSpace)?.unmap(range, room)
    }

    /// Returns the number of directories and tables that may be added.
    fn table_room(&self) -> u64 {
        self.max_tables.saturating_sub(self.tables.count())
    }

    /// Unmaps all pages, and destroys all created address spaces. The caller should drop the page
    /// tables without holding the vGPU's lock.
    #[must_use = "freeing page tables can take long"]
    pub fn clear(&mut self) -> SpaceTables {
        std::mem::take(&mut self.tables)
    }

    /// Returns true if a guest has truncated a file of imported memory.
    pub fn poisoned(&self) -> bool {
        self.memories.poisoned()
    }

    /// Returns the bytes of imported memory that accesses have allocated, if they exceed the
    /// budget.
    pub fn allocated_beyond_budget(&mut self) -> Option<u64> {
        self.first_touch.count(self.memories.files())
    }

    /// Notices pages of imported memory that the client has taken away.
    pub fn forget_lost_pages(&mut self) {
        first_touch::forget_lost_pages(self.memories.files());
        self.first_touch.update_room(self.memories.files());
    }
}

fn slot_of(backing: Backing) -> Result<(Slot, u64), Refusal> {
    match backing {
        Backing::Vram { offset } => Ok((Slot::VRAM, offset)),
        Backing::Guest { memory, offset } => Ok((Slot::try_from(memory)?, offset)),
        // Only GPUs with a driver have allocations.
        Backing::Allocated { .. } => Err(Refusal::NoMemory),
    }
}

fn check_range(space: SpaceId, va: GpuVa, len: u64) -> Result<Range<u64>, Refusal> {
    if len == 0 || !is_aligned(va.0, PAGE_SIZE) || !is_aligned(len, PAGE_SIZE) {
        return Err(Refusal::Alignment);
    }
    let (first, limit) =
        if space == SpaceId::DEFAULT { (VA_START, VA_END) } else { (PAGE_SIZE, CREATED_VA_END) };
    match va.0.checked_add(len) {
        Some(end) if va.0 >= first && end <= limit => Ok(va.0..end),
        _ => Err(Refusal::VaRange),
    }
}
