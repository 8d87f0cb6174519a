//! Memory of a vGPU: its partition of video memory, allocations, imported guest memory, and address
//! spaces.
//!
//! * `location`: a place in guest memory or video memory
//! * `gpu_mappings`: an address space, and its mappings

mod gpu_mappings;
mod location;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;

use ipc::mem::Mapping;
use mdev_core::gpu::{Backing, ClientSpec, GpuError, GuestRam, MapRequest};
use mdev_core::ids::{GpuVa, MemoryId, SpaceId};
use mdev_core::memory_file::MemoryFile;
use mdev_core::units::{KIB, PAGE_SIZE, is_aligned};
use nvidia_rm::rm_client::{AddressSpace, Object};

pub use self::gpu_mappings::GpuMappings;
pub use self::location::MemoryLocation;
use super::adoption::DAMAGED;
use super::adoption::descriptors::{self, Descriptors};
use super::adoption::state::{
    AllocationState, ImportState, MAX_IMPORTS, MAX_MAPPINGS, MemoryState, ProgramsState, SpaceState,
};
use super::device::Device;

/// Maximum number of address spaces, and of imports and allocations.
const MAX_SPACES: usize = 256;
const MAX_MEMORIES: usize = 65_536;

/// Maximum number of imports. Each is a mapping in this process, and three where its owner has
/// truncated the file. Linux allows a process 65,530 mappings (`vm.max_map_count`).
const MAX_MAPPED: usize = 8192;

/// Maximum size of a region for launches by kernels, in bytes. CUDA's has one page.
const MAX_LAUNCH_REGION: u64 = 64 * KIB;

/// Imported guest memory. Pinned until this is dropped.
#[derive(Debug)]
pub struct Import {
    // Unpinned before it is unmapped from this process.
    object: Arc<Object>,
    /// Mapping in this process.
    pub mapping: Arc<Mapping>,
    /// Offset in the file.
    offset: u64,
    /// The next worker can have it: the anchor keeps a limited number of descriptors.
    is_kept: bool,
}

/// Video memory of a program's own.
#[derive(Debug)]
struct Allocation {
    object: Arc<Object>,
    len: u64,
}

/// Memory of a vGPU.
#[derive(Debug)]
pub struct Memory {
    device: Arc<Device>,
    /// Address spaces. The default one is always there.
    spaces: BTreeMap<SpaceId, GpuMappings>,
    next_space: u32,
    /// Partition. `None` while there are allocations, and until it is used after them.
    vram: Option<Arc<Object>>,
    vram_bytes: u64,
    max_import_bytes: u64,
    imports: BTreeMap<MemoryId, Import>,
    imported_bytes: u64,
    allocations: BTreeMap<MemoryId, Allocation>,
    allocated_bytes: u64,
    next_id: u32,
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
        let default = GpuMappings::new(device.rm_client.clone(), SpaceId::DEFAULT, space);
        Self {
            device,
            spaces: [(SpaceId::DEFAULT, default)].into(),
            next_space: 1,
            vram: Some(vram),
            vram_bytes,
            max_import_bytes,
            imports: BTreeMap::new(),
            imported_bytes: 0,
            allocations: BTreeMap::new(),
            allocated_bytes: 0,
            next_id: 1,
        }
    }

    /// Adopts the memory of an earlier process.
    pub fn adopt(
        device: Arc<Device>,
        state: &MemoryState,
        programs: &ProgramsState,
        spec: &ClientSpec,
        files: &mut Descriptors<'_>,
    ) -> Result<Self, GpuError> {
        let (vram_bytes, max_import_bytes) = (spec.vram_bytes, spec.max_import_bytes);
        let vram = state.vram.map(|handle| device.adopt_object(handle));
        let (mut imports, mut imported_bytes) = (BTreeMap::new(), 0_u64);
        for ImportState { id, object, offset, len } in &state.imports {
            imported_bytes = imported_bytes.saturating_add(*len);
            if imported_bytes > max_import_bytes {
                return Err(DAMAGED);
            }
            let file = files.take(descriptors::import(*id))?;
            let mapping = Mapping::of_guest(&MemoryFile::new(file.as_fd())?, *offset, *len, true);
            foreign_fds::close(file);
            let object = device.adopt_object(*object);
            let (mapping, offset) = (mapping?, *offset);
            imports.insert(*id, Import { object, mapping, offset, is_kept: true });
        }
        let mut allocations = BTreeMap::new();
        for AllocationState { id, object, len } in &programs.allocations {
            let object = device.adopt_object(*object);
            allocations.insert(*id, Allocation { object, len: *len });
        }
        let backing = |memory: Option<MemoryId>| match memory {
            Some(id) => {
                let import = imports.get(&id).map(|i| (i.object.clone(), i.mapping.len()));
                let allocation = allocations.get(&id);
                import.or_else(|| allocation.map(|found| (found.object.clone(), found.len)))
            }
            None => vram.clone().map(|vram| (vram, vram_bytes)),
        };
        let mut regions = BTreeMap::new();
        let mut adopt = |space: &SpaceState| {
            let mut adopted = GpuMappings::adopt(&device, space, backing)?;
            for region in programs.regions.iter().filter(|region| region.space == space.id) {
                let adopt = || device.adopt_object(region.object);
                let object = regions.entry(region.object).or_insert_with(adopt);
                adopted.adopt_region(region, object)?;
            }
            Ok((space.id, adopted))
        };
        let spaces = state.spaces.iter().map(&mut adopt).collect::<Result<_, GpuError>>()?;
        let allocated_bytes = allocations.values().map(|allocation| allocation.len).sum();
        Ok(Self {
            spaces,
            next_space: state.next_space,
            vram,
            vram_bytes,
            max_import_bytes,
            imports,
            imported_bytes,
            allocations,
            allocated_bytes,
            next_id: state.next_id,
            device,
        })
    }

    /// Returns the state for the adopting process, and adds what programs have to `programs`.
    /// `None` if there is too much to be recorded.
    pub fn state(&self, programs: &mut ProgramsState) -> Option<MemoryState> {
        let mappings: usize = self.spaces.values().map(GpuMappings::count).sum();
        if self.imports.values().any(|import| !import.is_kept) || mappings > MAX_MAPPINGS {
            return None;
        }
        let allocations = self.allocations.iter().map(|(id, one)| AllocationState {
            id: *id,
            object: one.object.handle(),
            len: one.len,
        });
        programs.allocations.extend(allocations);
        let is_region = |memory: Option<MemoryId>, object: &Arc<Object>| {
            let is_vram = self.vram.as_ref().is_some_and(|vram| Arc::ptr_eq(vram, object));
            memory.is_none() && !is_vram
        };
        let mut spaces = Vec::new();
        for (id, space) in &self.spaces {
            spaces.push(space.state(*id, is_region, &mut programs.regions));
        }
        let imports = self.imports.iter().map(|(id, import)| ImportState {
            id: *id,
            object: import.object.handle(),
            offset: import.offset,
            len: import.mapping.len(),
        });
        Some(MemoryState {
            vram: self.vram.as_ref().map(|vram| vram.handle()),
            next_id: self.next_id,
            next_space: self.next_space,
            spaces,
            imports: imports.collect(),
        })
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
        if self.imports.len() >= MAX_MAPPED {
            return Err(GpuError::Limit("imports of guest memory"));
        }
        let file = MemoryFile::new(ram.fd)?;
        let mapping = Mapping::of_guest(&file, ram.offset, ram.len, true)?;
        let object = self.device.register(&mapping)?;
        let id = self.new_id()?;
        let is_kept = self.imports.values().filter(|import| import.is_kept).count() < MAX_IMPORTS;
        if is_kept {
            self.device.to_keep.keep_copy(descriptors::import(id), ram.fd)?;
        }
        self.imported_bytes += ram.len;
        self.imports.insert(id, Import { object, mapping, offset: ram.offset, is_kept });
        Ok(id)
    }

    fn new_id(&mut self) -> Result<MemoryId, GpuError> {
        let id = MemoryId(self.next_id);
        let full = self.imports.len() + self.allocations.len() >= MAX_MEMORIES;
        let next = self.next_id.checked_add(1).filter(|_| !full);
        self.next_id = next.ok_or(GpuError::Limit("imports and allocations"))?;
        Ok(id)
    }

    /// Allocates video memory, which the driver has cleared. Gives up the partition first: a GPU
    /// may have no room for both.
    pub fn allocate(&mut self, len: u64) -> Result<MemoryId, GpuError> {
        if len == 0 || !is_aligned(len, PAGE_SIZE) {
            return Err(GpuError::Invalid("an allocation must consist of whole pages"));
        }
        let total = self.allocated_bytes.checked_add(len);
        let total = total.filter(|total| *total <= self.vram_bytes);
        let total = total.ok_or(GpuError::Limit("video memory"))?;
        if self.vram.take().is_some() {
            self.unmap_all();
        }
        let id = self.new_id()?;
        let object = self.device.video_memory(len)?;
        self.allocated_bytes = total;
        self.allocations.insert(id, Allocation { object, len });
        Ok(id)
    }

    /// Frees video memory, which the driver then clears, and allocates a new partition. Channels
    /// must not use it any more.
    pub fn renew_vram(&mut self) -> Result<Arc<Object>, GpuError> {
        self.unmap_all();
        // First, since the GPU may have no room for both.
        self.vram = None;
        self.allocations.clear();
        self.allocated_bytes = 0;
        let vram = self.device.video_memory(self.vram_bytes)?;
        self.vram = Some(vram.clone());
        Ok(vram)
    }

    /// Allocates the partition again if allocations took its place and none is left.
    fn restore_vram(&mut self) -> Result<(), GpuError> {
        if self.vram.is_none() && self.allocations.is_empty() {
            self.vram = Some(self.device.video_memory(self.vram_bytes)?);
        }
        Ok(())
    }

    /// Returns whether guest memory is imported.
    pub fn is_imported(&self, memory: MemoryId) -> bool {
        self.imports.contains_key(&memory)
    }

    /// Unmaps an import or an allocation, and unpins or frees it. Channels must not use it any
    /// more.
    pub fn release(&mut self, memory: MemoryId) -> Result<(), GpuError> {
        let import = self.imports.remove(&memory);
        let allocation = self.allocations.remove(&memory);
        if import.is_none() && allocation.is_none() {
            return Err(GpuError::NotFound("memory"));
        }
        self.imported_bytes -= import.as_ref().map_or(0, |import| import.mapping.len());
        self.allocated_bytes -= allocation.as_ref().map_or(0, |allocation| allocation.len);
        self.spaces.values_mut().for_each(|space| space.forget_memory(memory));
        self.device.to_keep.forget(descriptors::import(memory));
        // The last references: these unpin or free the pages.
        drop((import, allocation));
        Ok(())
    }

    /// Removes all GPU mappings.
    pub fn unmap_all(&mut self) {
        self.spaces.values_mut().for_each(GpuMappings::unmap_all);
    }

    /// Creates an address space.
    pub fn create_space(&mut self) -> Result<SpaceId, GpuError> {
        if self.spaces.len() >= MAX_SPACES {
            return Err(GpuError::Limit("address spaces"));
        }
        let id = SpaceId(self.next_space);
        self.next_space = id.0.checked_add(1).ok_or(GpuError::Limit("address spaces"))?;
        let space = Arc::new(self.device.address_space()?);
        self.spaces.insert(id, GpuMappings::new(self.device.rm_client.clone(), id, space));
        Ok(id)
    }

    /// Destroys a created address space and its mappings. It must have no channels.
    pub fn destroy_space(&mut self, id: SpaceId) -> Result<(), GpuError> {
        if id == SpaceId::DEFAULT {
            return Err(GpuError::Invalid("the default address space"));
        }
        self.spaces.remove(&id).map(drop).ok_or(GpuError::NotFound("address space"))
    }

    /// Destroys all mappings and all created address spaces.
    pub fn reset_spaces(&mut self) {
        self.unmap_all();
        self.spaces.retain(|id, _| *id == SpaceId::DEFAULT);
    }

    /// Returns an address space.
    pub fn space(&mut self, id: SpaceId) -> Result<&mut GpuMappings, GpuError> {
        self.spaces.get_mut(&id).ok_or(GpuError::NotFound("address space"))
    }

    /// Returns guest memory at an address, and the offset in it.
    pub fn guest_memory(&self, space: SpaceId, va: GpuVa) -> Option<(Arc<Mapping>, u64)> {
        let (memory, offset) = self.spaces.get(&space)?.locate(va)?;
        Some((self.imports.get(&memory?)?.mapping.clone(), offset))
    }

    /// Returns the created address spaces and all mappings. `None` if programs have memory of their
    /// own.
    pub fn save(&self) -> Option<(Vec<SpaceId>, Vec<MapRequest>)> {
        if !self.allocations.is_empty() {
            return None;
        }
        let created = self.spaces.keys().copied().filter(|id| *id != SpaceId::DEFAULT);
        let mut mappings = Vec::new();
        for (id, space) in &self.spaces {
            mappings.extend(space.requests(*id, |memory, object| self.is_known(memory, object))?);
        }
        Some((created.collect(), mappings))
    }

    /// Creates an address space with the id of a saved one.
    pub fn restore_space(&mut self, id: SpaceId) -> Result<(), GpuError> {
        if id == SpaceId::DEFAULT || self.spaces.contains_key(&id) || id.0 == u32::MAX {
            return Err(GpuError::Invalid("the id of an address space"));
        }
        if self.spaces.len() >= MAX_SPACES {
            return Err(GpuError::Limit("address spaces"));
        }
        let space = Arc::new(self.device.address_space()?);
        self.spaces.insert(id, GpuMappings::new(self.device.rm_client.clone(), id, space));
        self.next_space = self.next_space.max(id.0 + 1);
        Ok(())
    }

    /// Returns whether an object is an import, or the partition.
    fn is_known(&self, memory: Option<MemoryId>, object: &Arc<Object>) -> bool {
        match memory {
            Some(id) => self.imports.contains_key(&id),
            None => self.vram.as_ref().is_some_and(|vram| Arc::ptr_eq(vram, object)),
        }
    }

    /// Returns the partition of video memory, and its length in bytes.
    pub fn partition(&mut self) -> Result<(Arc<Object>, u64), GpuError> {
        self.restore_vram()?;
        let vram = self.vram.clone().ok_or(GpuError::NotFound("video memory"))?;
        Ok((vram, self.vram_bytes))
    }

    /// Resolves `len` bytes of guest memory or video memory.
    fn resolve(&mut self, backing: Backing, len: u64) -> Result<MemoryLocation, GpuError> {
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
                self.restore_vram()?;
                let vram = self.vram.clone().ok_or(GpuError::NotFound("video memory"))?;
                Ok(MemoryLocation { object: vram, offset, memory: None, mapping: None })
            }
            Backing::Allocated { memory, offset } => {
                let found = self.allocations.get(&memory).ok_or(GpuError::NotFound("memory"))?;
                let end = offset.checked_add(len).filter(|end| *end <= found.len);
                end.ok_or(GpuError::OutOfRange("allocation"))?;
                let (object, memory) = (found.object.clone(), Some(memory));
                Ok(MemoryLocation { object, offset, memory, mapping: None })
            }
        }
    }

    /// Resolves a USERD.
    pub fn userd(&mut self, backing: Backing) -> Result<MemoryLocation, GpuError> {
        self.resolve(backing, mdev_core::abi::userd::BYTES)
    }

    /// Maps memory.
    pub fn map(&mut self, request: &MapRequest) -> Result<(), GpuError> {
        let location = self.resolve(request.backing, request.len)?;
        self.space(request.space)?.map(request, location)
    }

    /// Allocates and maps memory for launches by kernels.
    pub fn map_launch_region(
        &mut self,
        space: SpaceId,
        va: GpuVa,
        len: u64,
    ) -> Result<(), GpuError> {
        if len > MAX_LAUNCH_REGION {
            return Err(GpuError::Limit("bytes of a region for launches by kernels"));
        }
        let object = self.device.launch_region(len)?;
        self.space(space)?.map_launch_region(va, len, object)
    }
}
