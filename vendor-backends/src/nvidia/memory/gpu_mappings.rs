//! Address space of a vGPU, and its mappings.

use std::collections::BTreeMap;
use std::sync::Arc;

use mdev_core::abi::mailbox::{VA_END, VA_START};
use mdev_core::gpu::{Backing, CREATED_VA_END, GpuError, MapRequest};
use mdev_core::ids::{GpuVa, MemoryId, SpaceId};
use mdev_core::units::{MIB, PAGE_SIZE, is_aligned};
use nvidia_rm::numbers::flag;
use nvidia_rm::rm_client::{AddressSpace, Object, RmClient};

use super::location::MemoryLocation;
use crate::nvidia::adoption::DAMAGED;
use crate::nvidia::adoption::state::{MappingState, RegionState, SpaceState};
use crate::nvidia::device::Device;

/// Page size of video memory. Mappings aligned to it need the fewest page table entries.
const HUGE_PAGE: u64 = 2 * MIB;

/// Maximum number of mappings of an address space, and of the pieces that partial unmaps leave of
/// them. Each is an object of the driver, in kernel memory.
const MAX_MAPPINGS: usize = 65_536;

/// Mapping in an address space.
#[derive(Debug)]
struct GpuMapping {
    len: u64,
    object: Arc<Object>,
    memory: Option<MemoryId>,
    /// Offset in the memory.
    offset: u64,
    writable: bool,
}

/// Address space with its mappings by their virtual address.
#[derive(Debug)]
pub struct GpuMappings {
    rm_client: Arc<RmClient>,
    space: Arc<AddressSpace>,
    range: (u64, u64),
    mappings: BTreeMap<u64, GpuMapping>,
}

impl GpuMappings {
    /// Creates an address space without mappings.
    pub fn new(rm_client: Arc<RmClient>, id: SpaceId, space: Arc<AddressSpace>) -> Self {
        let default = id == SpaceId::DEFAULT;
        let range = if default { (VA_START, VA_END) } else { (PAGE_SIZE, CREATED_VA_END) };
        Self { rm_client, space, range, mappings: BTreeMap::new() }
    }

    /// Adopts the mappings of an earlier process. `object` returns the memory of a mapping
    /// and its length.
    pub fn adopt(
        device: &Device,
        state: &SpaceState,
        object: impl Fn(Option<MemoryId>) -> Option<(Arc<Object>, u64)>,
    ) -> Result<Self, GpuError> {
        let space = Arc::new(device.adopt_space(state.space, state.range));
        let mut adopted = Self::new(device.rm_client.clone(), state.id, space);
        for MappingState { va, len, memory, offset, writable } in &state.mappings {
            adopted.check_free(GpuVa(*va), *len, 0)?;
            let (object, bytes) = object(*memory).ok_or(DAMAGED)?;
            if offset.checked_add(*len).is_none_or(|end| end > bytes) {
                return Err(DAMAGED);
            }
            let (len, memory, offset, writable) = (*len, *memory, *offset, *writable);
            adopted.mappings.insert(*va, GpuMapping { len, object, memory, offset, writable });
        }
        Ok(adopted)
    }

    /// Adopts the mapping of a region for launches by kernels.
    pub fn adopt_region(
        &mut self,
        region: &RegionState,
        object: &Arc<Object>,
    ) -> Result<(), GpuError> {
        let RegionState { va, len, .. } = *region;
        self.check_free(GpuVa(va), len, 0)?;
        let object = object.clone();
        let mapping = GpuMapping { len, object, memory: None, offset: 0, writable: true };
        self.mappings.insert(va, mapping);
        Ok(())
    }

    /// Returns the state for the adopting process. Adds regions for launches by kernels, of
    /// which `is_region` tells by their objects, to `regions`.
    pub fn state(
        &self,
        id: SpaceId,
        is_region: impl Fn(Option<MemoryId>, &Arc<Object>) -> bool,
        regions: &mut Vec<RegionState>,
    ) -> SpaceState {
        let mut mappings = Vec::new();
        for (va, mapping) in &self.mappings {
            let GpuMapping { len, object, memory, offset, writable } = mapping;
            let (va, len, memory) = (*va, *len, *memory);
            if is_region(memory, object) {
                regions.push(RegionState { space: id, va, len, object: object.handle() });
            } else {
                mappings.push(MappingState {
                    va,
                    len,
                    memory,
                    offset: *offset,
                    writable: *writable,
                });
            }
        }
        let AddressSpace { space, range, .. } = &*self.space;
        SpaceState { id, space: space.handle(), range: range.handle(), mappings }
    }

    /// Returns the requests that make the mappings again. `None` if there is memory that a saved
    /// client cannot have: `is_known` tells by the object.
    pub fn requests(
        &self,
        space: SpaceId,
        is_known: impl Fn(Option<MemoryId>, &Arc<Object>) -> bool,
    ) -> Option<Vec<MapRequest>> {
        let request = |(va, mapping): (&u64, &GpuMapping)| {
            let GpuMapping { len, object, memory, offset, writable } = mapping;
            let backing = match *memory {
                Some(memory) => Backing::Guest { memory, offset: *offset },
                None => Backing::Vram { offset: *offset },
            };
            let request = MapRequest::new(GpuVa(*va), *len, backing).in_space(space);
            let request = MapRequest { writable: *writable, ..request };
            is_known(*memory, object).then_some(request)
        };
        self.mappings.iter().map(request).collect()
    }

    /// Returns the memory at an address, and the offset in it.
    pub fn locate(&self, GpuVa(va): GpuVa) -> Option<(Option<MemoryId>, u64)> {
        let (start, mapping) = self.mappings.range(..=va).next_back()?;
        (va - start < mapping.len).then_some((mapping.memory, mapping.offset + (va - start)))
    }

    /// Returns the number of mappings.
    pub fn count(&self) -> usize {
        self.mappings.len()
    }

    /// Returns the driver's address space.
    pub fn space(&self) -> &Arc<AddressSpace> {
        &self.space
    }

    /// Removes the mappings of an import or an allocation.
    pub fn forget_memory(&mut self, memory: MemoryId) {
        let of_memory = self.mappings.iter().filter(|(_, mapping)| mapping.memory == Some(memory));
        let vas: Vec<u64> = of_memory.map(|(va, _)| *va).collect();
        for va in vas {
            self.drop_mapping(va);
        }
    }

    fn drop_mapping(&mut self, va: u64) {
        if let Some(mapping) = self.mappings.remove(&va) {
            let handle = mapping.object.handle();
            if let Err(error) = self.rm_client.unmap_dma(&self.space, handle, va, 0) {
                log::warn!("{error}");
            }
        }
    }

    /// Removes all mappings.
    pub fn unmap_all(&mut self) {
        while let Some(va) = self.mappings.keys().next().copied() {
            self.drop_mapping(va);
        }
    }

    /// Maps `location` as a request says.
    pub fn map(&mut self, request: &MapRequest, location: MemoryLocation) -> Result<(), GpuError> {
        let MapRequest { va, len, writable, gpu_caches, .. } = *request;
        self.check_free(va, len, location.offset)?;
        let GpuVa(va) = va;
        let MemoryLocation { object, offset, memory, mapping } = location;
        let mut flags = if writable { 0 } else { flag::READ_ONLY };
        match mapping {
            Some(_) if gpu_caches => flags |= flag::PAGE_4K | flag::SNOOP | flag::GPU_CACHES,
            Some(_) => flags |= flag::PAGE_4K | flag::SNOOP,
            None if is_aligned(va | len | offset, HUGE_PAGE) => {}
            None => flags |= flag::PAGE_4K,
        }
        let mapped = self.rm_client.map_dma(&self.space, &object, offset, len, va, flags);
        mapped.map_err(|error| {
            let kind = if mapping.is_some() { "guest" } else { "video" };
            error.about(format_args!(
                "{len:#x} bytes of {kind} memory from {offset:#x}, at {va:#x}, flags {flags:#x}"
            ))
        })?;
        self.mappings.insert(va, GpuMapping { len, object, memory, offset, writable });
        Ok(())
    }

    /// Maps the whole of `object`, whose content belongs to the GPU's launches by kernels.
    pub fn map_launch_region(
        &mut self,
        va: GpuVa,
        len: u64,
        object: Arc<Object>,
    ) -> Result<(), GpuError> {
        self.check_free(va, len, 0)?;
        self.rm_client.map_launch_region(&self.space, &object, len, va.0)?;
        let mapping = GpuMapping { len, object, memory: None, offset: 0, writable: true };
        self.mappings.insert(va.0, mapping);
        Ok(())
    }

    /// Checks that a mapping at `va` is possible.
    fn check_free(&self, GpuVa(va): GpuVa, len: u64, offset: u64) -> Result<(), GpuError> {
        if len == 0 || !is_aligned(va | len | offset, PAGE_SIZE) {
            return Err(GpuError::Invalid("a GPU mapping must consist of whole pages"));
        }
        let (first, limit) = self.range;
        let end = va.checked_add(len).filter(|end| va >= first && *end <= limit);
        let end = end.ok_or(GpuError::OutOfRange("GPU virtual address"))?;
        if let Some((last, mapping)) = self.mappings.range(..end).next_back()
            && last + mapping.len > va
        {
            let first = self.first_overlap(va, end).unwrap_or(*last);
            return Err(GpuError::Overlap(GpuVa(first.max(va))));
        }
        if self.mappings.len() >= MAX_MAPPINGS {
            return Err(GpuError::Limit("mappings"));
        }
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
        self.rm_client.unmap_dma(&self.space, handle, from, size)?;
        let Some(mapping) = self.mappings.remove(&start) else { return Ok(()) };
        let GpuMapping { len, object, memory, offset, writable } = mapping;
        if from > start {
            let (object, len) = (object.clone(), from - start);
            self.mappings.insert(start, GpuMapping { len, object, memory, offset, writable });
        }
        if to < start + len {
            let (len, offset) = (start + len - to, offset + (to - start));
            self.mappings.insert(to, GpuMapping { len, object, memory, offset, writable });
        }
        Ok(())
    }
}

impl Drop for GpuMappings {
    fn drop(&mut self) {
        // Memory must be unmapped before it is unpinned or freed.
        if self.rm_client.frees_objects() {
            self.unmap_all();
        }
    }
}
