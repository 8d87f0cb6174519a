//! Ioctls of `/dev/nvidia-uvm` (`uvm_ioctl.h`).
//!
//! Programs let nvidia-uvm manage the address space in which their channels run. Here the vGPU
//! manages it, and nvidia-uvm's requests become mappings of the vGPU. Memory that moves between GPU
//! and CPU by itself (managed memory) does not exist.

use cuda_socket::{FileId, MapRequest, Range};
use mdev_core::gpu::Client;
use mdev_core::ids::SpaceId;
use mdev_core::units::{PAGE_SIZE, is_aligned};

use super::FrontEnd;
use super::call::{Call, Stop, put_u64};
use super::files::{File, MAX_RANGES};
use super::managed::RANGE_REQUESTS;
use super::memory::{StoreId, SystemMemory};
use crate::nvidia::sys::numbers::{status, uvm};
use crate::nvidia::version::Layout;

/// Offset of the status in the argument of requests that do nothing else than to succeed.
const SUCCEED: &[(u32, usize)] = &[
    (uvm::INITIALIZE, 8),
    (uvm::MM_INITIALIZE, 4),
    (uvm::DESTROY_RANGE_GROUP, 8),
    (uvm::UNREGISTER_GPU_VASPACE, 16),
    (uvm::REGISTER_CHANNEL, 48),
    (uvm::UNREGISTER_CHANNEL, 24),
    (uvm::SET_RANGE_GROUP, 24),
    (uvm::UNREGISTER_GPU, 16),
    (uvm::VALIDATE_VA_RANGE, 16),
    (uvm::DISABLE_PEER_ACCESS, 32),
];

/// Number of the last GPU in the arguments' arrays, and thereby the length of these arrays.
const GPUS: usize = 256;

/// Length of an element of these arrays, in bytes.
const ATTRIBUTES: usize = 36;

/// Offsets in `UVM_MAP_EXTERNAL_ALLOCATION_PARAMS`, behind the array.
mod external {
    use super::{ATTRIBUTES, GPUS};

    pub const END: usize = 24 + GPUS * ATTRIBUTES;
    pub const FD: usize = END + 8;
    pub const CLIENT: usize = END + 12;
    pub const MEMORY: usize = END + 16;
    pub const STATUS: usize = END + 20;
}

/// Offset of the status in `UVM_ALLOC_SEMAPHORE_POOL_PARAMS`, behind the array.
const POOL_STATUS: usize = 16 + GPUS * ATTRIBUTES + 8;

/// Lengths of most arguments, which requests of nvidia-uvm do not encode.
const LENGTHS: &[(u32, u32)] = &[
    (uvm::INITIALIZE, 16),
    (uvm::DEINITIALIZE, 0),
    (uvm::CREATE_RANGE_GROUP, 16),
    (uvm::DESTROY_RANGE_GROUP, 16),
    (uvm::REGISTER_GPU_VASPACE, 32),
    (uvm::UNREGISTER_GPU_VASPACE, 20),
    (uvm::REGISTER_CHANNEL, 56),
    (uvm::UNREGISTER_CHANNEL, 28),
    (uvm::DISABLE_PEER_ACCESS, 36),
    (uvm::SET_RANGE_GROUP, 32),
    (uvm::MAP_EXTERNAL, external::STATUS as u32 + 4),
    (uvm::SET_PREFERRED_LOCATION, 40),
    (uvm::UNSET_PREFERRED_LOCATION, 24),
    (uvm::ENABLE_READ_DUPLICATION, 24),
    (uvm::DISABLE_READ_DUPLICATION, 24),
    (uvm::SET_ACCESSED_BY, 40),
    (uvm::UNSET_ACCESSED_BY, 40),
    (uvm::MIGRATE, 80),
    (uvm::REGISTER_GPU, 40),
    (uvm::UNREGISTER_GPU, 20),
    (uvm::PAGEABLE_MEM_ACCESS, 8),
    (uvm::MAP_DYNAMIC_PARALLELISM, 40),
    (uvm::UNMAP_EXTERNAL, 40),
    (uvm::ALLOC_SEMAPHORE_POOL, POOL_STATUS as u32 + 8),
    (uvm::PAGEABLE_MEM_ACCESS_ON_GPU, 24),
    (uvm::VALIDATE_VA_RANGE, 24),
    (uvm::CREATE_EXTERNAL_RANGE, 24),
    (uvm::MM_INITIALIZE, 8),
];

/// Returns the lengths of the arguments of all requests.
pub fn lengths(layout: &Layout) -> impl Iterator<Item = (u32, u32)> {
    LENGTHS.iter().copied().chain([(uvm::FREE, layout.uvm_free)])
}

impl FrontEnd {
    /// Carries out an ioctl of a file of nvidia-uvm.
    pub(super) fn uvm_ioctl(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        let request = call.request();
        if let Some((_, status_at)) = SUCCEED.iter().find(|(number, _)| *number == request) {
            return call.set_u32(*status_at, status::OK);
        }
        let (status_at, result) = match request {
            uvm::DEINITIALIZE => return Ok(()),
            uvm::CREATE_RANGE_GROUP => (8, self.create_range_group(call)),
            uvm::REGISTER_GPU_VASPACE => (28, self.register_space(gpu, call)),
            uvm::REGISTER_GPU => (36, register_gpu(call)),
            uvm::PAGEABLE_MEM_ACCESS => (4, call.set_u32(0, 0)),
            uvm::PAGEABLE_MEM_ACCESS_ON_GPU => (20, call.set_u32(16, 0)),
            uvm::MAP_EXTERNAL => (external::STATUS, self.map_external(gpu, call)),
            uvm::CREATE_EXTERNAL_RANGE => (16, self.create_external_range(gpu, call)),
            uvm::FREE => (self.layout.uvm_free as usize - 8, self.free_range(gpu, call)),
            uvm::UNMAP_EXTERNAL => (32, self.unmap(gpu, call, call.u64(8)?)),
            uvm::ALLOC_SEMAPHORE_POOL => (POOL_STATUS, self.semaphore_pool(gpu, call)),
            uvm::MAP_DYNAMIC_PARALLELISM => (32, self.dynamic_parallelism(gpu, call)),
            number => {
                let managed = RANGE_REQUESTS.iter().find(|(request, _)| *request == number);
                let Some((_, status_at)) = managed else {
                    self.refusals.note("ioctl of nvidia-uvm", number);
                    return Err(Stop::INVALID);
                };
                (*status_at, self.managed_range(gpu, call))
            }
        };
        match result {
            Ok(()) => call.set_u32(status_at, status::OK),
            Err(Stop::Status(status)) => {
                log::debug!("Request {request} of nvidia-uvm ends with status {status:#x}");
                call.set_u32(status_at, status)
            }
            Err(stop) => Err(stop),
        }
    }

    /// Returns the memory that a mapping of a file of nvidia-uvm shows: the offset is an address. An
    /// address range without memory is no error for the program.
    pub(super) fn pool(&self, file: &File, request: &MapRequest) -> Option<StoreId> {
        let spaces = file.uvm.spaces.iter();
        let mut stores = spaces.filter_map(|space| self.memories.mapped_at(*space, request.offset));
        stores.next()
    }

    fn create_range_group(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        let file = &mut self.files.get_mut(call.file())?.uvm;
        file.range_groups += 1;
        put_u64(&mut call.argument, 0, file.range_groups).ok_or(Stop::INVALID)
    }

    /// Returns the control file of a descriptor in the argument.
    fn control_in(&self, call: &Call<'_>, at: usize) -> Result<FileId, Stop> {
        self.files.control_of(call.file_of(call.u32(at)?.cast_signed())?)
    }

    fn register_space(&mut self, gpu: &mut dyn Client, call: &mut Call<'_>) -> Result<(), Stop> {
        let control = self.control_in(call, 16)?;
        let space = self.space(gpu, control, call.u32(20)?, call.u32(24)?)?;
        self.files.get_mut(call.file())?.uvm.spaces.insert(space);
        Ok(())
    }

    /// Returns the address spaces of the file. There is one for each GPU, so one.
    pub(super) fn spaces(&self, call: &Call<'_>) -> Result<Vec<SpaceId>, Stop> {
        let spaces = &self.files.get(call.file())?.uvm.spaces;
        if spaces.is_empty() {
            return Err(Stop::Status(status::INVALID_STATE));
        }
        Ok(spaces.iter().copied().collect())
    }

    fn map_external(&mut self, gpu: &mut dyn Client, call: &mut Call<'_>) -> Result<(), Stop> {
        let (va, len, offset) = (call.u64(0)?, call.u64(8)?, call.u64(16)?);
        let control = self.control_in(call, external::FD)?;
        let store =
            self.store(control, call.u32(external::CLIENT)?, call.u32(external::MEMORY)?)?;
        // Lengths are those that the program asked for; objects consist of whole pages.
        let len = len.checked_next_multiple_of(PAGE_SIZE).ok_or(Stop::INVALID)?;
        for space in self.spaces(call)? {
            self.memories.map(gpu, (space, va), store, offset, len)?;
        }
        Ok(())
    }

    /// Notes a range whose mappings end together.
    fn create_external_range(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        let (va, len) = (call.u64(0)?, call.u64(8)?);
        self.clear(gpu, call)?;
        if self.files.external.len() >= MAX_RANGES {
            return Err(Stop::Status(status::INSUFFICIENT_RESOURCES));
        }
        self.files.external.insert((call.file(), va), len);
        Ok(())
    }

    /// Removes what is left in a range that gets a new use. nvidia-uvm refuses a range that overlaps
    /// another, but it sees when a program unmaps managed memory, of which no request tells.
    fn clear(&mut self, gpu: &mut dyn Client, call: &Call<'_>) -> Result<(), Stop> {
        let (va, len) = (call.u64(0)?, call.u64(8)?);
        for space in self.files.get(call.file())?.uvm.spaces.clone() {
            self.memories.unmap_overlapping(gpu, space, va, len)?;
        }
        Ok(())
    }

    /// Removes an external range with the mappings in it, or the mapping at an address.
    fn free_range(&mut self, gpu: &mut dyn Client, call: &mut Call<'_>) -> Result<(), Stop> {
        let len = self.files.external.remove(&(call.file(), call.u64(0)?)).unwrap_or(1);
        self.unmap(gpu, call, len)
    }

    /// Removes the mappings that begin in `len` bytes from an address.
    fn unmap(&mut self, gpu: &mut dyn Client, call: &Call<'_>, len: u64) -> Result<(), Stop> {
        let va = call.u64(0)?;
        for space in self.spaces(call)? {
            self.memories.unmap(gpu, space, va, len)?;
        }
        Ok(())
    }

    fn semaphore_pool(&mut self, gpu: &mut dyn Client, call: &mut Call<'_>) -> Result<(), Stop> {
        self.spaces(call)?;
        let memory = pool_memory(call)?;
        self.map_pool(gpu, call, memory)
    }

    /// Maps memory at the same address for CPU and GPU.
    pub(super) fn map_pool(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
        memory: SystemMemory,
    ) -> Result<(), Stop> {
        let (va, len) = (call.u64(0)?, call.u64(8)?);
        let spaces = self.spaces(call)?;
        self.clear(gpu, call)?;
        let store = self.memories.adopt(memory, len)?;
        let mapped =
            spaces.iter().try_for_each(|space| self.memories.map(gpu, (*space, va), store, 0, len));
        let memory = self.memories.mappable(store);
        // The mappings keep the memory.
        self.memories.release(gpu, store);
        mapped?;
        if let Some(memory) = memory? {
            call.place(Range { address: va, len }, memory);
        }
        Ok(())
    }

    /// Maps the region through which kernels launch others.
    fn dynamic_parallelism(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        let (va, len) = (call.u64(0)?, call.u64(8)?);
        self.clear(gpu, call)?;
        for space in self.spaces(call)? {
            if !self.memories.map_launch_region(gpu, (space, va), len)? {
                // Kernels launch none here, so it is ordinary memory.
                let memory = call.new_memory(len)?;
                let store = self.memories.adopt(memory, len)?;
                let mapped = self.memories.map(gpu, (space, va), store, 0, len);
                self.memories.release(gpu, store);
                mapped?;
            }
        }
        Ok(())
    }
}

/// Returns memory for the range in the argument.
pub fn pool_memory(call: &mut Call<'_>) -> Result<SystemMemory, Stop> {
    let (va, len) = (call.u64(0)?, call.u64(8)?);
    if len == 0 || !is_aligned(va | len, PAGE_SIZE) {
        return Err(Stop::Status(status::INVALID_ARGUMENT));
    }
    call.new_memory(len)
}

/// Answers that the GPU's memory is no NUMA node.
fn register_gpu(call: &mut Call<'_>) -> Result<(), Stop> {
    let enabled = call.argument.get_mut(16).ok_or(Stop::INVALID)?;
    *enabled = 0;
    call.set_u32(20, u32::MAX)
}
