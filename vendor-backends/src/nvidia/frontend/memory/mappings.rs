//! Mappings of stores for the GPU.

use mdev_core::gpu::{CREATED_VA_END, Client, GpuError, MapRequest};
use mdev_core::ids::{GpuVa, SpaceId};
use mdev_core::units::{PAGE_SIZE, is_aligned};
use nvidia_rm::numbers::status;

use super::{MAX_STORES, Mapped, Memories, Place, Stop, StoreId};

impl Memories {
    /// Maps `len` bytes of a store for the GPU.
    pub fn map(
        &mut self,
        gpu: &mut dyn Client,
        (space, va): (SpaceId, u64),
        id: StoreId,
        offset: u64,
        len: u64,
    ) -> Result<(), Stop> {
        self.check_free(space, va, len)?;
        if !is_aligned(offset, PAGE_SIZE) {
            return Err(Stop::Status(status::INVALID_ARGUMENT));
        }
        let pieces = self.backing(gpu, id, offset, len)?;
        let gpu_caches = self.store(id)?.gpu_caches;
        let mut at = va;
        for (backing, piece) in pieces {
            let request = MapRequest::new(GpuVa(at), piece, backing);
            let spec = MapRequest { space, gpu_caches, ..request };
            if let Err(error) = gpu.map(&spec) {
                if at > va {
                    let _ = gpu.unmap(space, GpuVa(va), at - va);
                }
                return Err(error.into());
            }
            at += piece;
        }
        if let Some(store) = self.stores.get_mut_unnoted(&id) {
            store.references += 1;
        }
        self.mappings.insert((space, va), Mapped { len, store: id });
        Ok(())
    }

    /// Checks that a mapping is possible.
    fn check_free(&self, space: SpaceId, va: u64, len: u64) -> Result<(), Stop> {
        let end = va.checked_add(len).filter(|end| *end <= CREATED_VA_END);
        let end = end.ok_or(Stop::Status(status::INVALID_ARGUMENT))?;
        if len == 0 || !is_aligned(va | len, PAGE_SIZE) {
            return Err(Stop::Status(status::INVALID_ARGUMENT));
        }
        if self.mappings.len() >= MAX_STORES {
            return Err(Stop::Status(status::INSUFFICIENT_RESOURCES));
        }
        if self.reaching(space, va, end).is_some() {
            return Err(Stop::Status(status::INVALID_ARGUMENT));
        }
        Ok(())
    }

    /// Returns the start of the last mapping that begins before `end`, if it reaches beyond `va`.
    fn reaching(&self, space: SpaceId, va: u64, end: u64) -> Option<u64> {
        let ((_, start), mapped) = self.mappings.range((space, 0)..(space, end)).next_back()?;
        (start + mapped.len > va).then_some(*start)
    }

    /// Maps a region for launches by kernels. Returns false on a GPU whose kernels launch none.
    pub fn map_launch_region(
        &mut self,
        gpu: &mut dyn Client,
        (space, va): (SpaceId, u64),
        len: u64,
    ) -> Result<bool, Stop> {
        self.check_free(space, va, len)?;
        self.check_room()?;
        let mapped =
            gpu.require_programs().and_then(|gpu| gpu.map_launch_region(space, GpuVa(va), len));
        match mapped {
            Ok(()) => {
                let store = self.insert(len, Place::LaunchRegion);
                self.mappings.insert((space, va), Mapped { len, store });
                Ok(true)
            }
            Err(GpuError::Unsupported(_)) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns whether an address is mapped.
    pub fn is_mapped(&self, space: SpaceId, va: u64) -> bool {
        self.reaching(space, va, va.saturating_add(1)).is_some()
    }

    /// Returns the store of the mapping that begins at an address.
    pub fn mapped_at(&self, space: SpaceId, va: u64) -> Option<StoreId> {
        self.mappings.get(&(space, va)).map(|mapped| mapped.store)
    }

    /// Removes the mappings that begin in a range.
    pub fn unmap(
        &mut self,
        gpu: &mut dyn Client,
        space: SpaceId,
        va: u64,
        len: u64,
    ) -> Result<(), Stop> {
        let end = va.checked_add(len).ok_or(Stop::Status(status::INVALID_ARGUMENT))?;
        let range = self.mappings.range((space, va)..(space, end));
        let found: Vec<_> = range.map(|((_, va), mapped)| (*va, *mapped)).collect();
        for (va, mapped) in found {
            gpu.unmap(space, GpuVa(va), mapped.len)?;
            self.mappings.remove(&(space, va));
            self.release(gpu, mapped.store);
        }
        Ok(())
    }

    /// Removes the mappings that overlap a range.
    pub fn unmap_overlapping(
        &mut self,
        gpu: &mut dyn Client,
        space: SpaceId,
        va: u64,
        len: u64,
    ) -> Result<(), Stop> {
        let end = va.checked_add(len).ok_or(Stop::Status(status::INVALID_ARGUMENT))?;
        let first = self.reaching(space, va, va).unwrap_or(va);
        self.unmap(gpu, space, first, end - first)
    }

    /// Forgets the mappings of a space that was destroyed.
    pub fn forget_space(&mut self, gpu: &mut dyn Client, space: SpaceId) {
        let range = self.mappings.range((space, 0)..=(space, u64::MAX));
        let found: Vec<_> = range.map(|((_, va), mapped)| (*va, mapped.store)).collect();
        for (va, store) in found {
            self.mappings.remove(&(space, va));
            self.release(gpu, store);
        }
    }
}
