//! Memory of programs: where each memory object's bytes are, and where they are mapped for the GPU.
//!
//! A store is referred to by its memory object and by its mappings. It lives until all are gone, as
//! with nvidia-uvm, which keeps memory of its mappings after the object was freed.
//!
//! * `mappings`: mappings for the GPU
//! * `journal`: state in a journal

pub mod journal;
mod mappings;

use std::os::fd::OwnedFd;

use ipc::mem::sealed_memfd;
use mdev_core::gpu::{Backing, Client, GpuError};
use mdev_core::ids::{MemoryId, SpaceId};
use mdev_core::mem::SharedGuestMemory;
use mdev_core::units::PAGE_SIZE;
use nvidia_rm::numbers::status;
use programs::change_map::ChangeMap;
use programs::front_end::{NewFiles, StoreId};
use programs::guest_memory::GuestPages;
use serde::{Deserialize, Serialize};

use super::call::Stop;
use super::file_memory::FileMemory;
use super::video_memory::{self, Extent, GRANULE, VideoMemory};

/// Maximum number of stores and of mappings, each.
const MAX_STORES: usize = 65_536;

/// Where the bytes of a memory object are.
#[derive(Debug)]
pub enum Place {
    /// Video memory that was not needed yet: a program may map it for the CPU first, which makes it
    /// system memory.
    Reserved {
        /// Alignment in bytes.
        align: u64,
    },
    /// Parts of the vGPU's video memory. No program can map it.
    Partition(Vec<Extent>),
    /// Video memory that the GPU's driver has allocated. No program can map it.
    Allocated(MemoryId),
    /// A file that programs map.
    System(FileMemory),
    /// Pages of a VM.
    Guest(GuestPages),
    /// The doorbell page.
    Doorbell,
    /// A region for launches by kernels, which belongs to its mapping.
    LaunchRegion,
}

/// System memory for a new store.
#[derive(Debug)]
pub enum SystemMemory {
    /// A file that the worker creates.
    New,
    /// Memory of the program.
    File(FileMemory),
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

/// Bytes of a memory object.
#[derive(Debug)]
struct Store {
    references: u32,
    len: u64,
    place: Place,
    /// The GPU may keep system memory in its own cache.
    gpu_caches: bool,
}

/// A mapping for the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapped {
    len: u64,
    store: StoreId,
}

/// Stores and mappings of a vGPU.
#[derive(Debug)]
pub struct Memories {
    partition: VideoMemory,
    /// Video memory of all stores, in bytes.
    used_video: u64,
    system_bytes: u64,
    max_system_bytes: u64,
    stores: ChangeMap<StoreId, Store>,
    last_store: u32,
    mappings: ChangeMap<(SpaceId, u64), Mapped>,
    /// Memory of the VM.
    guest: Option<SharedGuestMemory>,
    /// Maker of files, if they are not this process' own.
    files: Option<Box<dyn NewFiles>>,
}

impl Memories {
    /// Creates the memory of a vGPU with `vram_bytes` of video memory, whose programs may have
    /// `max_system_bytes` of system memory.
    pub fn new(vram_bytes: u64, max_system_bytes: u64) -> Self {
        Self {
            partition: VideoMemory::new(vram_bytes),
            used_video: 0,
            system_bytes: 0,
            max_system_bytes,
            stores: ChangeMap::default(),
            last_store: 0,
            mappings: ChangeMap::default(),
            guest: None,
            files: None,
        }
    }

    /// Sets the maker of files.
    pub fn set_files(&mut self, files: Box<dyn NewFiles>) {
        self.files = Some(files);
    }

    /// Sets the memory of the VM whose programs use the vGPU.
    pub fn set_guest(&mut self, memory: SharedGuestMemory) {
        self.guest = Some(memory);
    }

    /// Returns the size of video memory, in bytes.
    pub fn video_bytes(&self) -> u64 {
        self.partition.total()
    }

    /// Returns the free video memory, in bytes.
    pub fn free_video_bytes(&self) -> u64 {
        self.video_bytes().saturating_sub(self.used_video)
    }

    /// Returns the number of the next store.
    fn next_store(&self) -> StoreId {
        StoreId(self.last_store.saturating_add(1))
    }

    fn insert(&mut self, len: u64, place: Place) -> StoreId {
        let id = self.next_store();
        self.last_store = id.0;
        self.stores.insert(id, Store { references: 1, len, place, gpu_caches: false });
        id
    }

    fn check_room(&self) -> Result<(), Stop> {
        let full = self.stores.len() >= MAX_STORES || self.last_store == u32::MAX;
        if full { Err(Stop::Status(status::INSUFFICIENT_RESOURCES)) } else { Ok(()) }
    }

    /// Allocates video memory. Returns the store and its length, which is rounded up.
    pub fn allocate_video(&mut self, len: u64, align: u64) -> Result<(StoreId, u64), Stop> {
        self.check_room()?;
        let unit = align.clamp(GRANULE, 2 << 20).next_power_of_two();
        let len = len.checked_next_multiple_of(unit).filter(|len| *len > 0);
        let len = len.ok_or(Stop::Status(status::INVALID_ARGUMENT))?;
        if len > self.free_video_bytes() {
            return Err(Stop::Status(status::NO_MEMORY));
        }
        self.used_video += len;
        Ok((self.insert(len, Place::Reserved { align }), len))
    }

    fn charge_system(&mut self, len: u64) -> Result<(), Stop> {
        let total = self.system_bytes.checked_add(len).filter(|all| *all <= self.max_system_bytes);
        self.system_bytes = total.ok_or(Stop::Status(status::NO_MEMORY))?;
        Ok(())
    }

    fn new_file(&mut self, store: StoreId, len: u64) -> Result<OwnedFd, Stop> {
        self.charge_system(len)?;
        let file = match &mut self.files {
            Some(files) => files.create(store, len),
            None => sealed_memfd(c"cuda", len),
        };
        file.map_err(|error| {
            self.system_bytes -= len;
            Stop::from(GpuError::from(error))
        })
    }

    /// Allocates system memory, which the GPU may keep in its own cache. Returns the store and its
    /// length, which is rounded up to pages.
    pub fn allocate_system(
        &mut self,
        len: u64,
        memory: SystemMemory,
        gpu_caches: bool,
    ) -> Result<(StoreId, u64), Stop> {
        let len = len.checked_next_multiple_of(PAGE_SIZE).filter(|len| *len > 0);
        let len = len.ok_or(Stop::Status(status::INVALID_ARGUMENT))?;
        let id = self.add(memory, len)?;
        if let Some(store) = self.stores.get_mut(&id) {
            store.gpu_caches = gpu_caches;
        }
        Ok((id, len))
    }

    /// Adds `len` bytes of system memory, such as a program's.
    pub fn add(&mut self, memory: SystemMemory, len: u64) -> Result<StoreId, Stop> {
        self.check_room()?;
        let place = self.system_place(self.next_store(), memory, len)?;
        Ok(self.insert(len, place))
    }

    /// Returns system memory for a store, and charges it.
    fn system_place(
        &mut self,
        store: StoreId,
        memory: SystemMemory,
        len: u64,
    ) -> Result<Place, Stop> {
        match memory {
            SystemMemory::New => {
                Ok(Place::System(FileMemory::own(self.new_file(store, len)?, len)))
            }
            SystemMemory::File(memory) if memory.bytes() == len => {
                self.charge_system(len)?;
                Ok(Place::System(memory))
            }
            SystemMemory::Guest(pages) if pages.bytes() == len => {
                self.charge_system(len)?;
                Ok(Place::Guest(pages))
            }
            SystemMemory::File(_) | SystemMemory::Guest(_) => {
                Err(Stop::Status(status::INVALID_ARGUMENT))
            }
        }
    }

    /// Adds the doorbell page.
    pub fn doorbell(&mut self, len: u64) -> Result<StoreId, Stop> {
        self.check_room()?;
        Ok(self.insert(len, Place::Doorbell))
    }

    fn store(&self, id: StoreId) -> Result<&Store, Stop> {
        self.stores.get(&id).ok_or(Stop::Status(status::OBJECT_NOT_FOUND))
    }

    /// Returns the length of a store, in bytes.
    pub fn len(&self, id: StoreId) -> Result<u64, Stop> {
        Ok(self.store(id)?.len)
    }

    /// Returns the bytes of video memory of a store.
    pub fn video_len(&self, id: StoreId) -> u64 {
        match self.store(id) {
            Ok(Store { place: Place::System(_) | Place::Guest(_) | Place::Doorbell, .. })
            | Err(_) => 0,
            Ok(store) => store.len,
        }
    }

    /// Returns true if the store is the doorbell page.
    pub fn is_doorbell(&self, id: StoreId) -> bool {
        self.store(id).is_ok_and(|store| matches!(store.place, Place::Doorbell))
    }

    /// Returns whether [`Self::make_mappable`] has something to do. Fails if the GPU uses the
    /// memory already.
    pub fn must_become_mappable(&self, id: StoreId) -> Result<bool, Stop> {
        match self.store(id)?.place {
            Place::System(_) | Place::Guest(_) | Place::Doorbell => Ok(false),
            Place::Partition(_) | Place::Allocated(_) | Place::LaunchRegion => {
                Err(Stop::Status(status::NOT_SUPPORTED))
            }
            Place::Reserved { .. } => Ok(true),
        }
    }

    /// Makes video memory that a program is going to map system memory.
    pub fn make_mappable(&mut self, id: StoreId, memory: SystemMemory) -> Result<(), Stop> {
        let len = self.len(id)?;
        let place = self.system_place(id, memory, len)?;
        if let Some(store) = self.stores.get_mut(&id) {
            store.place = place;
            self.used_video -= len;
        }
        Ok(())
    }

    /// Gives video memory to a store that has none yet: of the driver, or a part of the partition.
    /// It is filled with zeros.
    fn place_video(&mut self, gpu: &mut dyn Client, id: StoreId) -> Result<(), Stop> {
        let Store { len, place: Place::Reserved { align }, .. } = *self.store(id)? else {
            return Ok(());
        };
        // A VM may have mapped the partition, which an allocation would give up.
        let is_mapped = self.guest.is_some() && gpu.apertures().vram.is_some();
        let allocated = if is_mapped {
            Err(GpuError::Unsupported("allocations beside a mapped partition"))
        } else {
            gpu.require_programs().and_then(|gpu| gpu.allocate(len))
        };
        let place = match allocated {
            Ok(memory) => Place::Allocated(memory),
            Err(GpuError::Unsupported(_)) => {
                Place::Partition(self.take_from_partition(gpu, len, align)?)
            }
            Err(GpuError::Limit(_)) => return Err(Stop::Status(status::NO_MEMORY)),
            Err(error) => return Err(error.into()),
        };
        if let Some(store) = self.stores.get_mut(&id) {
            store.place = place;
        }
        Ok(())
    }

    /// Takes parts of the partition, and clears what programs have left there.
    fn take_from_partition(
        &mut self,
        gpu: &dyn Client,
        len: u64,
        align: u64,
    ) -> Result<Vec<Extent>, Stop> {
        let vram = gpu.apertures().vram.as_ref();
        let vram = vram.ok_or(GpuError::Unsupported("video memory that cannot be cleared"))?;
        let extents = self.partition.allocate(len, align);
        let extents = extents.ok_or(Stop::Status(status::NO_MEMORY))?;
        let mut cleared = extents.iter().map(|part| video_memory::clear(vram, *part));
        if let Some(Err(error)) = cleared.find(Result::is_err) {
            self.partition.release(&extents);
            return Err(GpuError::from(error).into());
        }
        Ok(extents)
    }

    /// Returns the memory of a store that programs can map.
    pub fn mappable(&self, id: StoreId) -> Result<Option<Mappable>, Stop> {
        match &self.store(id)?.place {
            Place::System(memory) => {
                let found = memory.mappable().map_err(GpuError::from)?;
                Ok(found.map(|(file, start)| Mappable::File(file, start)))
            }
            Place::Guest(pages) => Ok(Some(Mappable::Guest(pages.id()))),
            _ => Ok(None),
        }
    }

    /// Writes to a store in system memory.
    pub fn write(&self, id: StoreId, offset: u64, bytes: &[u8]) {
        let Ok(Store { place, len, .. }) = self.store(id) else { return };
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > *len) {
            return;
        }
        let written = match (place, &self.guest) {
            (Place::System(memory), _) => memory.write(offset, bytes),
            (Place::Guest(pages), Some(memory)) => pages.write(&mut memory.lock(), offset, bytes),
            _ => Ok(()),
        };
        if let Err(error) = written {
            log::debug!("Cannot write to memory of a program: {error}");
        }
    }

    /// Returns where `len` bytes of a store are for the GPU, in pieces.
    pub fn backing(
        &mut self,
        gpu: &mut dyn Client,
        id: StoreId,
        offset: u64,
        len: u64,
    ) -> Result<Vec<(Backing, u64)>, Stop> {
        self.place_video(gpu, id)?;
        // Of a file, parts that the GPU has not used yet are imported.
        let store = match self.store(id)?.place {
            Place::System(_) => self.stores.get_mut(&id),
            _ => self.stores.get_mut_unnoted(&id),
        };
        let store = store.ok_or(Stop::Status(status::OBJECT_NOT_FOUND))?;
        if offset.checked_add(len).is_none_or(|end| end > store.len) {
            return Err(Stop::Status(status::INVALID_ARGUMENT));
        }
        match &mut store.place {
            Place::System(memory) => Ok(memory.import(gpu, offset, len)?),
            Place::Allocated(memory) => {
                Ok(vec![(Backing::Allocated { memory: *memory, offset }, len)])
            }
            Place::Partition(extents) => {
                let mut pieces = Vec::new();
                let (mut skip, mut missing) = (offset, len);
                for extent in extents.iter() {
                    let from = skip.min(extent.len);
                    skip -= from;
                    let piece = (extent.len - from).min(missing);
                    if piece > 0 {
                        pieces.push((Backing::Vram { offset: extent.offset + from }, piece));
                        missing -= piece;
                    }
                }
                Ok(pieces)
            }
            Place::Guest(pages) => {
                let memory = self.guest.as_ref().ok_or(Stop::INVALID)?;
                Ok(pages.import(&mut memory.lock(), gpu, offset, len)?)
            }
            Place::Reserved { .. } | Place::Doorbell | Place::LaunchRegion => {
                Err(Stop::Status(status::INVALID_ARGUMENT))
            }
        }
    }

    /// Adds a reference to a store.
    pub fn retain(&mut self, id: StoreId) -> Result<(), Stop> {
        let store = self.stores.get_mut_unnoted(&id);
        let store = store.ok_or(Stop::Status(status::OBJECT_NOT_FOUND))?;
        let references = store.references.checked_add(1);
        store.references = references.ok_or(Stop::Status(status::INSUFFICIENT_RESOURCES))?;
        Ok(())
    }

    /// Drops a reference to a store. Frees it with the last one.
    pub fn release(&mut self, gpu: &mut dyn Client, id: StoreId) {
        let Some(store) = self.stores.get_mut_unnoted(&id) else { return };
        store.references -= 1;
        if store.references > 0 {
            return;
        }
        let Some(Store { len, place, .. }) = self.stores.remove(&id) else { return };
        let memories: Vec<_> = match place {
            Place::Reserved { .. } => {
                self.used_video -= len;
                Vec::new()
            }
            Place::Partition(extents) => {
                self.used_video -= len;
                self.partition.release(&extents);
                Vec::new()
            }
            Place::Allocated(memory) => {
                self.used_video -= len;
                vec![memory]
            }
            Place::System(memory) => {
                self.system_bytes -= len;
                memory.into_imports().collect()
            }
            Place::Guest(_) => {
                self.system_bytes -= len;
                Vec::new()
            }
            Place::Doorbell | Place::LaunchRegion => Vec::new(),
        };
        for memory in memories {
            if let Err(error) = gpu.release(memory) {
                log::warn!("{error}");
            }
        }
    }

    /// Returns the number of stores and of mappings.
    pub fn counts(&self) -> (usize, usize) {
        (self.stores.len(), self.mappings.len())
    }
}
