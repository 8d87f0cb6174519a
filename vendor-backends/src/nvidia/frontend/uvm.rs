//! Ioctls of `/dev/nvidia-uvm` (`uvm_ioctl.h`).
//!
//! Programs let nvidia-uvm manage the address space in which their channels run. Here the vGPU
//! manages it, and nvidia-uvm's requests become mappings of the vGPU; no file of nvidia-uvm is
//! opened. Managed memory, which nvidia-uvm moves between GPU and CPU, is system memory that does
//! not move (`managed`).

use cuda_socket::{FileId, MapRequest, Range};
use mdev_core::gpu::Client;
use mdev_core::ids::SpaceId;
use mdev_core::units::{PAGE_SIZE, is_aligned};
use nix::errno::Errno;
use nvidia_rm::abi::uvm::{
    CreateRangeGroup, MapExternal, PageableMemAccess, PageableMemAccessOnGpu, RegisterGpu,
    RegisterSpace,
};
use nvidia_rm::numbers::status;
use nvidia_rm::table::{Form, find};
use nvidia_rm::uvm::{self, Uvm};

use super::NvidiaFrontEnd;
use super::call::{Call, Stop};
use super::files::{File, MAX_RANGES};
use super::memory::{StoreId, SystemMemory};
use super::objects::Kind;

impl NvidiaFrontEnd {
    /// Returns the form of the argument of an ioctl.
    pub(super) fn uvm_form(&self, number: u32) -> Option<&'static Form> {
        find(uvm::ROWS, number)?.form(self.layout.series)
    }

    /// Carries out an ioctl of a file of nvidia-uvm.
    pub(super) fn uvm_ioctl(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        let request = ("ioctl of nvidia-uvm", call.request());
        let Some(handler) = self.refusals.handler(uvm::ROWS, request, Stop::INVALID)? else {
            return Ok(());
        };
        match handler {
            Uvm::CreateRangeGroup => self.create_range_group(call),
            Uvm::RegisterSpace => self.register_space(gpu, call),
            // The GPU's memory is no NUMA node.
            Uvm::RegisterGpu => call.change(|argument: &mut RegisterGpu| {
                (argument.is_numa_node, argument.numa_node) = (0, -1);
            }),
            Uvm::PageableMemAccess => call.change(|argument: &mut PageableMemAccess| {
                (argument.access, argument.pad0) = (0, [0; 3]);
            }),
            Uvm::PageableMemAccessOnGpu => call.change(|argument: &mut PageableMemAccessOnGpu| {
                (argument.access, argument.pad0) = (0, [0; 3]);
            }),
            Uvm::MapExternal => self.map_external(gpu, call),
            Uvm::CreateExternalRange => self.create_external_range(gpu, call),
            Uvm::Free => self.free_range(gpu, call),
            Uvm::UnmapExternal => {
                let (_, len) = call.range()?;
                self.unmap(gpu, call, len)
            }
            Uvm::AllocSemaphorePool => self.semaphore_pool(gpu, call),
            Uvm::MapDynamicParallelism => self.dynamic_parallelism(gpu, call),
            Uvm::ManagedRange => self.managed_range(gpu, call),
            Uvm::Migrate => self.migrate(gpu, call),
        }
    }

    /// Returns the memory that a mapping of a file of nvidia-uvm shows: the offset is an address.
    /// An address range without memory is no error for the program.
    pub(super) fn pool(&self, file: &File, request: &MapRequest) -> Result<Option<StoreId>, Errno> {
        let spaces = &file.uvm.spaces;
        let mut stores =
            spaces.iter().filter_map(|space| self.memories.mapped_at(*space, request.offset));
        let Some(store) = stores.next() else { return Ok(None) };
        // Memory of another program may be mapped for the GPU there.
        let has = |owner| {
            let is_of_file =
                |kind: &Kind| matches!(kind, Kind::Space(Some(space)) if spaces.contains(space));
            let mut objects = self.clients.with_files();
            owner == request.file
                || objects.any(|(file, object)| file == owner && is_of_file(&object.kind))
        };
        match self.memories.may_map(store, has) {
            Ok(true) => Ok(Some(store)),
            Ok(false) => Err(Errno::EACCES),
            Err(_) => Err(Errno::EINVAL),
        }
    }

    fn create_range_group(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        let file = &mut self.files.get_mut(call.file())?.uvm;
        file.range_groups += 1;
        call.change(|argument: &mut CreateRangeGroup| argument.group = file.range_groups)
    }

    /// Returns the control file of a descriptor in the argument.
    fn control_in(&self, call: &Call<'_>, fd: i32) -> Result<FileId, Stop> {
        self.files.control_of(call.file_of(fd)?)
    }

    fn register_space(&mut self, gpu: &mut dyn Client, call: &mut Call<'_>) -> Result<(), Stop> {
        let RegisterSpace { control, client, space, .. } = call.read()?;
        let control = self.control_in(call, control)?;
        let space = self.space(gpu, control, client, space)?;
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
        let argument: MapExternal = call.read()?;
        let MapExternal { base: va, length: len, offset, client, memory, .. } = argument;
        let control = self.control_in(call, argument.control)?;
        let store = self.store(control, client, memory)?;
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
        let (va, len) = call.range()?;
        self.clear(gpu, call)?;
        if self.files.external.len() >= MAX_RANGES {
            return Err(Stop::Status(status::INSUFFICIENT_RESOURCES));
        }
        self.files.external.insert((call.file(), va), len);
        Ok(())
    }

    /// Removes earlier mappings in a range before its next use. nvidia-uvm refuses a range that
    /// overlaps another one. It sees when a program unmaps managed memory; the front end does not,
    /// because no request reports it.
    fn clear(&mut self, gpu: &mut dyn Client, call: &Call<'_>) -> Result<(), Stop> {
        let (va, len) = call.range()?;
        for space in self.files.get(call.file())?.uvm.spaces.clone() {
            self.memories.unmap_overlapping(gpu, space, va, len)?;
        }
        Ok(())
    }

    /// Removes an external range with the mappings in it, or the mapping at an address.
    fn free_range(&mut self, gpu: &mut dyn Client, call: &mut Call<'_>) -> Result<(), Stop> {
        let len = self.files.external.remove(&(call.file(), call.base()?)).unwrap_or(1);
        self.unmap(gpu, call, len)
    }

    /// Removes the mappings that begin in `len` bytes from an address.
    fn unmap(&mut self, gpu: &mut dyn Client, call: &Call<'_>, len: u64) -> Result<(), Stop> {
        let va = call.base()?;
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
        let (va, len) = call.range()?;
        let spaces = self.spaces(call)?;
        self.clear(gpu, call)?;
        let store = self.memories.add(self.owner(call.file())?, memory, len)?;
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
        let (va, len) = call.range()?;
        self.clear(gpu, call)?;
        for space in self.spaces(call)? {
            if !self.memories.map_launch_region(gpu, (space, va), len)? {
                // Kernels launch none here, so it is ordinary memory.
                let memory = call.new_memory(len)?;
                let store = self.memories.add(self.owner(call.file())?, memory, len)?;
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
    let (va, len) = call.range()?;
    if len == 0 || !is_aligned(va | len, PAGE_SIZE) {
        return Err(Stop::Status(status::INVALID_ARGUMENT));
    }
    call.new_memory(len)
}
