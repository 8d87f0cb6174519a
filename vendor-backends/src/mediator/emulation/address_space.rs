//! A vGPU's GPU virtual address spaces: page tables of 4 KiB and 2 MiB pages, and the memory behind
//! them.
//!
//! The default address space has 40 bits. A worker can create others, of 47 bits. Control requests
//! write the page tables and the engine reads them, both under the vGPU's lock.
//!
//! * `spaces`: all address spaces of a vGPU
//! * [`memory`]: video memory and imports
//! * [`first_touch`]: budget of host memory that accesses allocate
//! * `page_table`: page tables
//! * `access`: loads, stores and copies

mod access;
pub mod first_touch;
pub mod memory;
mod page_table;
mod spaces;
#[cfg(test)]
mod tests;

use mdev_core::units::PAGE_SIZE;

use self::memory::Memories;
pub use self::page_table::PageTables;
pub use self::spaces::{AddressSpaces, SpaceTables};
use crate::mediator::fault::Fault;
use crate::mediator::hardware::MemoryRange;

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

/// One address space, as the engine uses it.
#[derive(Clone, Copy, Debug)]
pub struct AddressSpace<'a> {
    tables: &'a PageTables,
    memories: &'a Memories,
}

impl<'a> AddressSpace<'a> {
    /// Translates an address. Returns as much of `len` bytes as is contiguous in one memory.
    pub fn resolve(self, va: u64, len: u64, access: Access) -> Result<MemoryRange<'a>, MmuFault> {
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
            file.touch(&memory.mapping, start, covered.min(len)).map_err(|_| MmuFault(va))?;
        }
        let bus = memory.attachment.as_ref().map(|attached| attached.address + start);
        Ok(MemoryRange { mapping: &memory.mapping, offset: start, len: covered.min(len), bus })
    }
}
