//! Memory of a vGPU: its partition of video memory, imported guest memory, and GPU mappings.

use std::collections::BTreeMap;
use std::sync::Arc;

use mdev_core::abi::mailbox::{VA_END, VA_START};
use mdev_core::gpu::{Backing, GpuError, GuestRam};
use mdev_core::ids::{GpuVa, MemoryId};
use mdev_core::memory_file::MemoryFile;
use mdev_core::units::{MIB, PAGE_SIZE, is_aligned};

use super::device::Device;
use super::rm_client::{AddressSpace, Object};
use super::sys::numbers::flag;
use crate::mem::Mapping;

/// Page size of video memory. Mappings aligned to it need the fewest page table entries.
const HUGE_PAGE: u64 = 2 * MIB;

/// Maximum number of mappings, and of the pieces that partial unmaps leave of them. Each is an
/// object of the driver, in kernel memory.
const MAX_MAPPINGS: usize = 65_536;

/// Imported guest memory. Pinned until this is dropped.
#[derive(Debug)]
pub struct Import {
    // Unpinned before it is unmapped from this process.
    object: Arc<Object>,
    /// Mapping in this process.
    pub mapping: Arc<Mapping>,
}

/// Mapping in the GPU's address space.
#[derive(Debug)]
struct GpuMapping {
    len: u64,
    object: Arc<Object>,
    memory: Option<MemoryId>,
}

/// Memory of a vGPU.
#[derive(Debug)]
pub struct Memory {
    device: Arc<Device>,
    space: Arc<AddressSpace>,
    /// `None` after an allocation of new video memory failed.
    vram: Option<Arc<Object>>,
    vram_bytes: u64,
    max_import_bytes: u64,
    imports: BTreeMap<MemoryId, Import>,
    imported_bytes: u64,
    next_id: u32,
    /// GPU mappings by their virtual address.
    mappings: BTreeMap<u64, GpuMapping>,
}

/// Location in guest memory or video memory, such as that of a USERD.
#[derive(Clone, Debug)]
pub struct MemoryLocation {
    /// Memory object.
    pub object: Arc<Object>,
    /// Offset in the object, in bytes.
    pub offset: u64,
    /// Import, for guest memory.
    pub memory: Option<MemoryId>,
    /// Mapping of the object in this process, for guest memory.
    pub mapping: Option<Arc<Mapping>>,
}

impl Memory {
    /// Creates the memory of a vGPU with a partition of video memory and an empty address space.
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
            vram: Some(vram),
            vram_bytes,
            max_import_bytes,
            imports: BTreeMap::new(),
            imported_bytes: 0,
            next_id: 1,
            mappings: BTreeMap::new(),
        }
    }

    /// Returns the size of imported guest memory, in bytes.
    pub fn imported_bytes(&self) -> u64 {
        self.imported_bytes
    }

    /// Pins guest memory and registers it as one object, parts of which are mapped later.
    pub fn import(&mut self, ram: &GuestRam<'_>) -> Result<MemoryId, GpuError> {
        if ram.len == 0 || !is_aligned(ram.len, PAGE_SIZE) || !is_aligned(ram.offset, PAGE_SIZE) {
            return Err(GpuError::Invalid("guest memory must consist of whole pages"));
        }
        if !ram.writable {
            return Err(GpuError::Unsupported("read-only guest memory"));
        }
        let total = self.imported_bytes.checked_add(ram.len);
        if total.is_none_or(|total| total > self.max_import_bytes) {
            return Err(GpuError::Limit("bytes of guest memory"));
        }
        let id = MemoryId(self.next_id);
        let file = MemoryFile::new(ram.fd)?;
        let mapping = Mapping::of_guest(&file, ram.offset, ram.len, true)?;
        let object = self.device.rm_client.register(&self.device.device, &mapping)?;
        self.next_id = self.next_id.checked_add(1).ok_or(GpuError::Limit("imports"))?;
        self.imported_bytes += ram.len;
        self.imports.insert(id, Import { object, mapping });
        Ok(id)
    }

    /// Frees video memory, which the driver then clears, and allocates as much again. Channels must
    /// not use it any more.
    pub fn renew_vram(&mut self) -> Result<Arc<Object>, GpuError> {
        self.unmap_all();
        // First, since the GPU may have no room for both.
        self.vram = None;
        let vram = self.device.video_memory(self.vram_bytes)?;
        self.vram = Some(vram.clone());
        Ok(vram)
    }

    /// Returns whether guest memory is imported.
    pub fn is_imported(&self, memory: MemoryId) -> bool {
        self.imports.contains_key(&memory)
    }

    /// Unmaps and unpins guest memory. Channels must not use it any more.
    pub fn release(&mut self, memory: MemoryId) -> Result<(), GpuError> {
        let import = self.imports.remove(&memory).ok_or(GpuError::NotFound("memory"))?;
        self.imported_bytes -= import.mapping.len();
        let of_import = self.mappings.iter().filter(|(_, mapping)| mapping.memory == Some(memory));
        let vas: Vec<u64> = of_import.map(|(va, _)| *va).collect();
        for va in vas {
            self.drop_mapping(va);
        }
        // The last reference: unpins the pages.
        drop(import);
        Ok(())
    }

    fn drop_mapping(&mut self, va: u64) {
        if let Some(mapping) = self.mappings.remove(&va) {
            let handle = mapping.object.handle();
            if let Err(error) = self.device.rm_client.unmap_dma(&self.space, handle, va, 0) {
                log::warn!("{error}");
            }
        }
    }

    /// Removes all GPU mappings.
    pub fn unmap_all(&mut self) {
        while let Some(va) = self.mappings.keys().next().copied() {
            self.drop_mapping(va);
        }
    }

    /// Resolves `len` bytes of guest memory or video memory.
    fn resolve(&self, backing: Backing, len: u64) -> Result<MemoryLocation, GpuError> {
        match backing {
            Backing::Guest { memory, offset } => {
                let import = self.imports.get(&memory).ok_or(GpuError::NotFound("memory"))?;
                let end = offset.checked_add(len).filter(|end| *end <= import.mapping.len());
                end.ok_or(GpuError::OutOfRange("guest memory"))?;
                Ok(MemoryLocation {
                    object: import.object.clone(),
                    offset,
                    memory: Some(memory),
                    mapping: Some(import.mapping.clone()),
                })
            }
            Backing::Vram { offset } => {
                let end = offset.checked_add(len).filter(|end| *end <= self.vram_bytes);
                end.ok_or(GpuError::OutOfRange("video memory"))?;
                let vram = self.vram.clone().ok_or(GpuError::NotFound("video memory"))?;
                Ok(MemoryLocation { object: vram, offset, memory: None, mapping: None })
            }
        }
    }

    /// Resolves a USERD.
    pub fn userd(&self, backing: Backing) -> Result<MemoryLocation, GpuError> {
        self.resolve(backing, mdev_core::abi::userd::BYTES)
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
            return Err(GpuError::Invalid("a GPU mapping must consist of whole pages"));
        }
        let end = va.checked_add(len).filter(|end| va >= VA_START && *end <= VA_END);
        let end = end.ok_or(GpuError::OutOfRange("GPU virtual address"))?;
        let location = self.resolve(backing, len)?;
        if let Some((last, mapping)) = self.mappings.range(..end).next_back()
            && last + mapping.len > va
        {
            let first = self.first_overlap(va, end).unwrap_or(*last);
            return Err(GpuError::Overlap(GpuVa(first.max(va))));
        }
        if self.mappings.len() >= MAX_MAPPINGS {
            return Err(GpuError::Limit("mappings"));
        }
        let mut flags = if writable { 0 } else { flag::READ_ONLY };
        match location.memory {
            Some(_) => flags |= flag::PAGE_4K | flag::SNOOP,
            None if is_aligned(va | len | offset, HUGE_PAGE) => {}
            None => flags |= flag::PAGE_4K,
        }
        self.device.rm_client.map_dma(&self.space, &location.object, offset, len, va, flags)?;
        let mapping = GpuMapping { len, object: location.object, memory: location.memory };
        self.mappings.insert(va, mapping);
        Ok(())
    }

    /// Returns the start of the first mapping that overlaps a range.
    fn first_overlap(&self, va: u64, end: u64) -> Option<u64> {
        let before = self.mappings.range(..=va).next_back();
        let before = before.filter(|(start, mapping)| *start + mapping.len > va);
        before.or_else(|| self.mappings.range(va..end).next()).map(|(start, _)| *start)
    }

    /// Unmaps a range, which may cover parts of mappings.
    pub fn unmap(&mut self, GpuVa(va): GpuVa, len: u64) -> Result<(), GpuError> {
        if len == 0 || !is_aligned(va | len, PAGE_SIZE) {
            return Err(GpuError::Invalid("a GPU mapping must be removed in whole pages"));
        }
        let end = va.checked_add(len).ok_or(GpuError::OutOfRange("GPU virtual address"))?;
        let mut parts = Vec::new();
        let mut at = va;
        while at < end {
            let found = self.mappings.range(..=at).next_back();
            let Some((start, mapping)) = found.filter(|(start, m)| *start + m.len > at) else {
                return Err(GpuError::NotFound("mapping"));
            };
            let part_end = end.min(start + mapping.len);
            // Only a hole within one mapping leaves more pieces than there were.
            let is_hole = at > *start && part_end < start + mapping.len;
            if is_hole && self.mappings.len() >= MAX_MAPPINGS {
                return Err(GpuError::Limit("mappings: unmap whole mappings"));
            }
            parts.push((*start, at, part_end));
            at = part_end;
        }
        for (start, from, to) in parts {
            self.unmap_part(start, from, to)?;
        }
        Ok(())
    }

    /// Unmaps `from..to` of the mapping that begins at `start`.
    fn unmap_part(&mut self, start: u64, from: u64, to: u64) -> Result<(), GpuError> {
        let Some(mapping) = self.mappings.get(&start) else { return Ok(()) };
        let whole = from == start && to == start + mapping.len;
        let size = if whole { 0 } else { to - from };
        let handle = mapping.object.handle();
        self.device.rm_client.unmap_dma(&self.space, handle, from, size)?;
        let Some(mapping) = self.mappings.remove(&start) else { return Ok(()) };
        let GpuMapping { len, object, memory } = mapping;
        if from > start {
            let before = GpuMapping { len: from - start, object: object.clone(), memory };
            self.mappings.insert(start, before);
        }
        if to < start + len {
            self.mappings.insert(to, GpuMapping { len: start + len - to, object, memory });
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Memory must be unmapped before it is unpinned or freed.
        self.unmap_all();
    }
}
