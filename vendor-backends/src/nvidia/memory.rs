//! A vGPU's memory: its partition, guest memory, and what is mapped where.

use std::collections::BTreeMap;
use std::sync::Arc;

use mdev_core::abi::mailbox::{VA_END, VA_START};
use mdev_core::gpu::{Backing, GpuError, GuestRam};
use mdev_core::ids::{GpuVa, MemoryId};
use mdev_core::units::{MIB, PAGE_SIZE, is_aligned};

use super::device::Device;
use super::session::{AddressSpace, Object};
use super::sys::numbers::flag;
use crate::mem::Mapping;

/// Pages that video memory consists of. A mapping of it that is aligned to them needs the fewest page table entries.
const HUGE_PAGE: u64 = 2 * MIB;

/// Mappings at a time. Each is an object of the driver's, in the kernel's memory.
const MAX_MAPPINGS: usize = 65_536;

/// Guest memory, pinned for as long as this exists.
#[derive(Debug)]
pub struct Import {
    // Unpinned before it is unmapped from this process.
    object: Arc<Object>,
    /// Our own view of it.
    pub mapping: Arc<Mapping>,
}

/// Something mapped in the GPU's address space.
#[derive(Debug)]
struct Mapped {
    len: u64,
    object: Arc<Object>,
    memory: Option<MemoryId>,
}

/// All memory of a vGPU.
#[derive(Debug)]
pub struct Memory {
    device: Arc<Device>,
    space: Arc<AddressSpace>,
    vram: Arc<Object>,
    vram_bytes: u64,
    max_import_bytes: u64,
    imports: BTreeMap<MemoryId, Import>,
    imported_bytes: u64,
    next: u32,
    mapped: BTreeMap<u64, Mapped>,
}

/// Where a USERD is.
#[derive(Clone, Debug)]
pub struct Place {
    /// The memory that it is in.
    pub object: Arc<Object>,
    /// From where on.
    pub offset: u64,
    /// Which import that is.
    pub memory: Option<MemoryId>,
    /// Our own view of that memory.
    pub view: Option<Arc<Mapping>>,
}

impl Memory {
    /// A partition of video memory, and an empty address space.
    pub fn new(
        device: Arc<Device>,
        space: Arc<AddressSpace>,
        vram: Arc<Object>,
        vram_bytes: u64,
        max_import_bytes: u64,
    ) -> Self {
        Self {
            device,
            space,
            vram,
            vram_bytes,
            max_import_bytes,
            imports: BTreeMap::new(),
            imported_bytes: 0,
            next: 1,
            mapped: BTreeMap::new(),
        }
    }

    /// Guest memory imported, in bytes.
    pub fn imported_bytes(&self) -> u64 {
        self.imported_bytes
    }

    /// Pins guest memory and registers it, all of it at once: pieces of it are mapped later.
    pub fn import(&mut self, ram: &GuestRam<'_>) -> Result<MemoryId, GpuError> {
        if ram.len == 0 || !is_aligned(ram.len, PAGE_SIZE) || !is_aligned(ram.offset, PAGE_SIZE) {
            return Err(GpuError::Invalid("guest memory comes in pages"));
        }
        if !ram.writable {
            return Err(GpuError::Unsupported("guest memory that may only be read"));
        }
        let total = self.imported_bytes.checked_add(ram.len);
        if total.is_none_or(|total| total > self.max_import_bytes) {
            return Err(GpuError::Limit("bytes of guest memory"));
        }
        let id = MemoryId(self.next);
        let mapping = Mapping::new(ram.fd, ram.offset, ram.len, true)?;
        let object = self.device.session.register(&self.device.device, &mapping)?;
        self.next = self.next.checked_add(1).ok_or(GpuError::Limit("imports"))?;
        self.imported_bytes += ram.len;
        self.imports.insert(id, Import { object, mapping });
        Ok(id)
    }

    /// Whether there is such an import.
    pub fn has(&self, memory: MemoryId) -> bool {
        self.imports.contains_key(&memory)
    }

    /// Takes guest memory out of the address space and unpins it. Channels must not use it any more.
    pub fn release(&mut self, memory: MemoryId) -> Result<(), GpuError> {
        let import = self.imports.remove(&memory).ok_or(GpuError::NotFound("memory"))?;
        self.imported_bytes -= import.mapping.len();
        let of_it = |(va, mapped): (&u64, &Mapped)| (mapped.memory == Some(memory)).then_some(*va);
        let vas: Vec<u64> = self.mapped.iter().filter_map(of_it).collect();
        for va in vas {
            self.drop_mapping(va);
        }
        // The last one: unpins the pages.
        drop(import);
        Ok(())
    }

    fn drop_mapping(&mut self, va: u64) {
        if let Some(mapped) = self.mapped.remove(&va) {
            let handle = mapped.object.handle();
            if let Err(error) = self.device.session.unmap_dma(&self.space, handle, va, 0) {
                log::warn!("{error}");
            }
        }
    }

    /// Forgets all mappings.
    pub fn unmap_all(&mut self) {
        while let Some(va) = self.mapped.keys().next().copied() {
            self.drop_mapping(va);
        }
    }

    /// What lies behind an address in a vGPU's terms.
    fn find(&self, backing: Backing, len: u64) -> Result<Place, GpuError> {
        match backing {
            Backing::Guest { memory, offset } => {
                let import = self.imports.get(&memory).ok_or(GpuError::NotFound("memory"))?;
                let end = offset.checked_add(len).filter(|end| *end <= import.mapping.len());
                end.ok_or(GpuError::OutOfRange("guest memory"))?;
                Ok(Place {
                    object: import.object.clone(),
                    offset,
                    memory: Some(memory),
                    view: Some(import.mapping.clone()),
                })
            }
            Backing::Vram { offset } => {
                let end = offset.checked_add(len).filter(|end| *end <= self.vram_bytes);
                end.ok_or(GpuError::OutOfRange("video memory"))?;
                Ok(Place { object: self.vram.clone(), offset, memory: None, view: None })
            }
        }
    }

    /// Where a USERD is, if it lies well.
    pub fn userd(&self, backing: Backing) -> Result<Place, GpuError> {
        let place = self.find(backing, mdev_core::abi::userd::BYTES)?;
        // The driver takes a misaligned one, and the hardware then reads another.
        if !is_aligned(place.offset, mdev_core::abi::userd::BYTES) {
            return Err(GpuError::Invalid("a USERD is 512-byte aligned"));
        }
        Ok(place)
    }

    /// Maps `len` bytes of `backing` at `va`.
    pub fn map(
        &mut self,
        GpuVa(va): GpuVa,
        len: u64,
        backing: Backing,
        writable: bool,
    ) -> Result<(), GpuError> {
        let (Backing::Guest { offset, .. } | Backing::Vram { offset }) = backing;
        if len == 0 || !is_aligned(va | len | offset, PAGE_SIZE) {
            return Err(GpuError::Invalid("GPU memory is mapped in pages"));
        }
        let end = va.checked_add(len).filter(|end| va >= VA_START && *end <= VA_END);
        let end = end.ok_or(GpuError::OutOfRange("GPU virtual address"))?;
        let place = self.find(backing, len)?;
        if let Some((before, mapped)) = self.mapped.range(..end).next_back()
            && before + mapped.len > va
        {
            let first = self.first_overlap(va, end).unwrap_or(*before);
            return Err(GpuError::Overlap(GpuVa(first.max(va))));
        }
        if self.mapped.len() >= MAX_MAPPINGS {
            return Err(GpuError::Limit("mappings"));
        }
        let mut flags = if writable { 0 } else { flag::READ_ONLY };
        match place.memory {
            Some(_) => flags |= flag::PAGE_4K | flag::SNOOP,
            None if is_aligned(va | len | offset, HUGE_PAGE) => {}
            None => flags |= flag::PAGE_4K,
        }
        self.device.session.map_dma(&self.space, &place.object, offset, len, va, flags)?;
        let mapped = Mapped { len, object: place.object, memory: place.memory };
        self.mapped.insert(va, mapped);
        Ok(())
    }

    /// The first mapped address in a range.
    fn first_overlap(&self, va: u64, end: u64) -> Option<u64> {
        let before = self.mapped.range(..=va).next_back();
        let before = before.filter(|(start, mapped)| *start + mapped.len > va);
        before.or_else(|| self.mapped.range(va..end).next()).map(|(start, _)| *start)
    }

    /// Unmaps a range, which may be a part of what was mapped at once.
    pub fn unmap(&mut self, GpuVa(va): GpuVa, len: u64) -> Result<(), GpuError> {
        if len == 0 || !is_aligned(va | len, PAGE_SIZE) {
            return Err(GpuError::Invalid("GPU memory is unmapped in pages"));
        }
        let end = va.checked_add(len).ok_or(GpuError::OutOfRange("GPU virtual address"))?;
        let mut pieces = Vec::new();
        let mut at = va;
        while at < end {
            let found = self.mapped.range(..=at).next_back();
            let Some((start, mapped)) = found.filter(|(start, m)| *start + m.len > at) else {
                return Err(GpuError::NotFound("mapping"));
            };
            let past = end.min(start + mapped.len);
            pieces.push((*start, at, past));
            at = past;
        }
        for (start, from, past) in pieces {
            self.cut(start, from, past)?;
        }
        Ok(())
    }

    /// Unmaps `from..past` of the mapping that begins at `start`.
    fn cut(&mut self, start: u64, from: u64, past: u64) -> Result<(), GpuError> {
        let Some(mapped) = self.mapped.get(&start) else { return Ok(()) };
        let whole = from == start && past == start + mapped.len;
        let size = if whole { 0 } else { past - from };
        let handle = mapped.object.handle();
        self.device.session.unmap_dma(&self.space, handle, from, size)?;
        let Some(mapped) = self.mapped.remove(&start) else { return Ok(()) };
        let Mapped { len, object, memory } = mapped;
        if from > start {
            self.mapped.insert(start, Mapped { len: from - start, object: object.clone(), memory });
        }
        if past < start + len {
            self.mapped.insert(past, Mapped { len: start + len - past, object, memory });
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Out of the address space before it is unpinned or given back.
        self.unmap_all();
    }
}
