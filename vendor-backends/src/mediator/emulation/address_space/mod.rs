//! A vGPU's GPU virtual address space: 40 bits, page tables of 4 KiB and 2 MiB pages, and the
//! memory behind them.
//!
//! Control requests write the page tables and the engine reads them, both under the vGPU's lock.
//!
//! * [`memory`]: video memory and imports
//! * [`first_touch`]: budget of host memory that accesses allocate
//! * `page_table`: page tables
//! * `access`: loads, stores and copies

mod access;
pub mod first_touch;
pub mod memory;
mod page_table;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use mdev_core::abi::mailbox::{VA_END, VA_START};
use mdev_core::ids::{GpuVa, MemoryId};
use mdev_core::units::{PAGE_SIZE, is_aligned};

use self::first_touch::FirstTouch;
use self::memory::{Memories, Memory, Slot};
pub use self::page_table::PageTables;
use self::page_table::{LARGE, Pte};
use crate::mediator::fault::Fault;
use crate::mediator::hardware::MemoryRange;
use crate::mediator::wire::Refusal;
use crate::mem::Mapping;

/// Page tables that every vGPU may have in addition to those that its memory needs.
const SPARE_TABLES: u64 = 1024;

/// Returns the limit of page tables for video memory and imports: two per large page.
///
/// Imports count up to the host's memory, because a sparse file can be of any length.
fn max_tables(vram_bytes: u64, imported_bytes: u64) -> u64 {
    let bytes = vram_bytes.saturating_add(imported_bytes.min(host_memory_bytes()));
    bytes.div_ceil(LARGE).saturating_mul(2).saturating_add(SPARE_TABLES)
}

/// Returns the size of the host's memory.
fn host_memory_bytes() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| nix::sys::sysinfo::sysinfo().map_or(u64::MAX, |info| info.ram_total()))
}

/// Fault of an access to an address that is not mapped, or not mapped for this access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmuFault(pub u64);

impl From<MmuFault> for Fault {
    fn from(MmuFault(va): MmuFault) -> Self {
        Self::mmu(va)
    }
}

/// Kind of a memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A read.
    Read,
    /// A write, or a read followed by a write.
    Write,
}

/// An address space and the memory that it can map.
#[derive(Debug)]
pub struct AddressSpace {
    tables: PageTables,
    memories: Memories,
    first_touch: FirstTouch,
}

impl AddressSpace {
    /// Creates an empty address space for a partition of video memory, if there is one.
    pub fn new(vram: Option<Arc<Mapping>>, max_import_bytes: u64) -> Self {
        let vram_bytes = vram.as_ref().map_or(0, |vram| vram.len());
        Self {
            tables: PageTables::new(max_tables(vram_bytes, 0)),
            memories: Memories::new(vram, max_import_bytes),
            first_touch: FirstTouch::default(),
        }
    }

    /// Adapts the limit of page tables to the memory that the vGPU has now.
    fn update_max_tables(&mut self) {
        let vram_bytes = self.memories.get(Slot::VRAM).map_or(0, |vram| vram.mapping.len());
        self.tables.set_max_count(max_tables(vram_bytes, self.imported_bytes()));
    }

    /// Returns the bytes of imported guest memory.
    pub fn imported_bytes(&self) -> u64 {
        self.memories.imported_bytes()
    }

    /// Returns the bytes that may still be imported.
    pub fn import_room(&self) -> u64 {
        self.memories.import_room()
    }

    /// Replaces video memory, and removes its mappings. The caller should drop the returned memory
    /// without holding the vGPU's lock.
    pub fn replace_vram(&mut self, vram: Arc<Mapping>) -> Option<Memory> {
        self.tables.unmap_slot(Slot::VRAM);
        self.memories.replace_vram(vram)
    }

    /// Adds guest memory.
    pub fn import(&mut self, memory: Memory) -> Result<MemoryId, Refusal> {
        let id = self.memories.import(memory)?;
        self.update_max_tables();
        Ok(id)
    }

    /// Removes guest memory and all its mappings. The caller should drop the memory without holding
    /// the vGPU's lock.
    pub fn release(&mut self, id: MemoryId) -> Result<Memory, Refusal> {
        let slot = Slot::try_from(id)?;
        let memory = self.memories.remove(slot)?;
        self.tables.unmap_slot(slot);
        self.update_max_tables();
        Ok(memory)
    }

    /// Returns the slot and mapping of imported memory.
    pub fn memory(&self, id: MemoryId) -> Result<(Slot, &Arc<Mapping>), Refusal> {
        self.mapping_of(Slot::try_from(id)?)
    }

    /// Returns the slot and mapping of video memory.
    pub fn vram(&self) -> Result<(Slot, &Arc<Mapping>), Refusal> {
        self.mapping_of(Slot::VRAM)
    }

    fn mapping_of(&self, slot: Slot) -> Result<(Slot, &Arc<Mapping>), Refusal> {
        let memory = self.memories.get(slot).ok_or(Refusal::NoMemory)?;
        Ok((slot, &memory.mapping))
    }

    /// Maps `len` bytes of a memory from `offset` at `va`. An error changes nothing.
    pub fn map(
        &mut self,
        va: GpuVa,
        len: u64,
        slot: Slot,
        offset: u64,
        writable: bool,
    ) -> Result<(), Refusal> {
        let range = check_range(va, len)?;
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
        if let Some(mapped) = self.tables.first_mapped(range.clone()) {
            return Err(Refusal::Overlap(GpuVa(mapped)));
        }
        self.tables.map(range, Pte::new(slot, offset, writable))
    }

    /// Unmaps a range. An error, such as a page that is not mapped, changes nothing.
    pub fn unmap(&mut self, va: GpuVa, len: u64) -> Result<(), Refusal> {
        self.tables.unmap(check_range(va, len)?)
    }

    /// Unmaps all pages. The caller should drop the page tables without holding the vGPU's lock.
    pub fn unmap_all(&mut self) -> PageTables {
        self.tables.unmap_all()
    }

    /// Returns true if a guest has truncated a file of imported memory.
    pub fn poisoned(&self) -> bool {
        self.memories.poisoned()
    }

    /// Returns the bytes of imported memory that accesses have allocated, if they exceed the budget.
    pub fn allocated_beyond_budget(&mut self) -> Option<u64> {
        self.first_touch.count(self.memories.files())
    }

    /// Notices pages of imported memory that the client has taken away.
    pub fn forget_lost_pages(&self) {
        first_touch::forget_lost_pages(self.memories.files());
    }

    /// Translates an address. Returns as much of `len` bytes as is contiguous in one memory.
    pub fn resolve(&self, va: u64, len: u64, access: Access) -> Result<MemoryRange<'_>, MmuFault> {
        let (first, mut covered) = self.tables.translate(va, access).ok_or(MmuFault(va))?;
        let start = first.offset() + va % PAGE_SIZE;
        while covered < len {
            match self.tables.translate(va + covered, access) {
                Some((next, more))
                    if next.slot() == first.slot() && next.offset() == start + covered =>
                {
                    covered += more;
                }
                _ => break,
            }
        }
        let memory = self.memories.get(first.slot()).ok_or(MmuFault(va))?;
        if let Some(file) = &memory.file {
            file.touch(&memory.mapping, start, covered.min(len));
        }
        let bus = memory.attachment.as_ref().map(|attached| attached.address + start);
        Ok(MemoryRange { mapping: &memory.mapping, offset: start, len: covered.min(len), bus })
    }
}

fn check_range(va: GpuVa, len: u64) -> Result<Range<u64>, Refusal> {
    if len == 0 || !is_aligned(va.0, PAGE_SIZE) || !is_aligned(len, PAGE_SIZE) {
        return Err(Refusal::Alignment);
    }
    match va.0.checked_add(len) {
        Some(end) if va.0 >= VA_START && end <= VA_END => Ok(va.0..end),
        _ => Err(Refusal::VaRange),
    }
}
