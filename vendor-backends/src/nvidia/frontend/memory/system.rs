//! System memory of stores, which programs map.

use std::os::fd::OwnedFd;

use cuda_socket::FileId;
use mdev_core::gpu::GpuError;
use mdev_core::units::PAGE_SIZE;
use nvidia_rm::numbers::status;
use programs::guest_memory::GuestPages;

use super::files::{ArenaPlace, Owner};
use super::{FileMemory, Memories, Place, Stop, Store, StoreId};

/// System memory for a new store.
#[derive(Debug)]
pub enum SystemMemory {
    /// Memory that the worker allocates.
    New,
    /// Memory of the program, in this file.
    Registered(OwnedFd, FileMemory),
    /// Pages of a VM.
    Guest(GuestPages),
}

/// Memory that a program can map.
#[derive(Debug)]
pub enum Mappable {
    /// A file, from an offset in bytes.
    File(OwnedFd, u64),
    /// Pages of a VM, by their id.
    Guest(u64),
}

impl Mappable {
    /// Returns the offset in the memory's file or pages, in bytes.
    pub const fn offset(&self) -> u64 {
        match self {
            Self::File(_, offset) => *offset,
            Self::Guest(_) => 0,
        }
    }
}

impl Memories {
    /// Returns the bytes of system memory that programs may still get.
    fn system_room(&self) -> u64 {
        self.max_system_bytes.saturating_sub(self.files.arena_bytes() + self.given_bytes)
    }

    fn charge_given(&mut self, len: u64) -> Result<(), Stop> {
        if len > self.system_room() {
            return Err(Stop::Status(status::NO_MEMORY));
        }
        self.given_bytes += len;
        Ok(())
    }

    /// Allocates system memory, which the GPU may keep in its own cache. Returns the store and its
    /// length, which is rounded up to pages.
    pub fn allocate_system(
        &mut self,
        owner: Owner,
        len: u64,
        memory: SystemMemory,
        gpu_caches: bool,
    ) -> Result<(StoreId, u64), Stop> {
        let len = len.checked_next_multiple_of(PAGE_SIZE).filter(|len| *len > 0);
        let len = len.ok_or(Stop::Status(status::INVALID_ARGUMENT))?;
        let id = self.add(owner, memory, len)?;
        if let Some(store) = self.stores.get_mut(&id) {
            store.gpu_caches = gpu_caches;
        }
        Ok((id, len))
    }

    /// Adds `len` bytes of system memory, such as a program's.
    pub fn add(&mut self, owner: Owner, memory: SystemMemory, len: u64) -> Result<StoreId, Stop> {
        self.check_room()?;
        let place = self.system_place(owner, memory, len, false)?;
        Ok(self.insert(len, place))
    }

    /// Returns system memory for a store, and charges it. Memory of the worker is in a file of its
    /// own if `is_alone` is true.
    fn system_place(
        &mut self,
        owner: Owner,
        memory: SystemMemory,
        len: u64,
        is_alone: bool,
    ) -> Result<Place, Stop> {
        match memory {
            SystemMemory::New => {
                let room = self.system_room();
                Ok(Place::Arena(self.files.allocate(owner, len, is_alone, room)?))
            }
            SystemMemory::Registered(fd, memory) if memory.bytes() == len => {
                self.charge_given(len)?;
                let file = self.files.add_registered(owner, fd);
                let file = file.inspect_err(|_| self.given_bytes -= len)?;
                Ok(Place::Registered(file, memory))
            }
            SystemMemory::Guest(pages) if pages.bytes() == len => {
                self.charge_given(len)?;
                Ok(Place::Guest(pages))
            }
            SystemMemory::Registered(..) | SystemMemory::Guest(_) => {
                Err(Stop::Status(status::INVALID_ARGUMENT))
            }
        }
    }

    /// Makes video memory that a program is going to map system memory.
    pub fn make_mappable(
        &mut self,
        owner: Owner,
        id: StoreId,
        memory: SystemMemory,
    ) -> Result<(), Stop> {
        let Store { len, references, .. } = *self.store(id)?;
        // Objects of several clients may map it.
        let place = self.system_place(owner, memory, len, references > 1)?;
        if let Some(store) = self.stores.get_mut(&id) {
            store.place = place;
            self.used_video -= len;
        }
        Ok(())
    }

    /// Returns whether programs that have a store may map it. `has` tells whether they have a file
    /// as well, with which other memory was made that they would map, too.
    pub fn may_map(&self, id: StoreId, has: impl FnOnce(FileId) -> bool) -> Result<bool, Stop> {
        Ok(match &self.store(id)?.place {
            Place::Arena(ArenaPlace { file, .. }) | Place::Registered(file, _) => {
                self.files.sole_owner(*file).is_none_or(has)
            }
            _ => true,
        })
    }

    /// Returns the memory of a store that programs can map.
    pub fn mappable(&self, id: StoreId) -> Result<Option<Mappable>, Stop> {
        let (file, start) = match &self.store(id)?.place {
            Place::Arena(ArenaPlace { file, start }) => (*file, Some(*start)),
            Place::Registered(file, memory) => (*file, memory.start()),
            Place::Guest(pages) => return Ok(Some(Mappable::Guest(pages.id()))),
            _ => return Ok(None),
        };
        let Some((file, start)) = self.files.file(file).zip(start) else { return Ok(None) };
        let copy = file.try_clone().map_err(GpuError::from)?;
        Ok(Some(Mappable::File(copy.into(), start)))
    }

    /// Writes to a store in system memory.
    pub fn write(&self, id: StoreId, offset: u64, bytes: &[u8]) {
        let Ok(Store { place, len, .. }) = self.store(id) else { return };
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > *len) {
            return;
        }
        let written = match (place, &self.guest) {
            (Place::Arena(place), _) => self.files.write(*place, offset, bytes),
            (Place::Registered(file, memory), _) => match self.files.file(*file) {
                Some(file) => memory.write(file, offset, bytes),
                None => Ok(()),
            },
            (Place::Guest(pages), Some(memory)) => pages.write(&mut memory.lock(), offset, bytes),
            _ => Ok(()),
        };
        if let Err(error) = written {
            log::debug!("Cannot write to memory of a program: {error}");
        }
    }
}
