//! Memory of programs: where each memory object's bytes are, and where they are mapped for the GPU.
//!
//! A store is referred to by its memory object and by its mappings. It lives until all are gone, as
//! with nvidia-uvm, which keeps memory of its mappings after the object was freed.
//!
//! * `system`: system memory, which programs map
//! * [`files`]: files with system memory, and arenas in them
//! * `mappings`: mappings for the GPU
//! * `journal`: state in a journal

pub mod files;
pub mod journal;
mod mappings;
mod system;

use std::os::fd::AsFd;

use mdev_core::gpu::{Backing, Client, GpuCapabilities, GpuError};
use mdev_core::ids::{MemoryId, SpaceId};
use mdev_core::mem::SharedGuestMemory;
use nvidia_rm::numbers::status;
use programs::change_map::ChangeMap;
use programs::front_end::{MemoryFileId, NewFiles};
use programs::guest_memory::GuestPages;
use serde::{Deserialize, Serialize};

use self::files::{ArenaPlace, Files};
pub use self::system::{Mappable, SystemMemory};
use super::call::Stop;
use super::extents::{Extent, Extents};
use super::file_memory::FileMemory;
use super::video_memory::{self, GRANULE};

/// Maximum number of stores and of mappings, each.
const MAX_STORES: usize = 65_536;

/// Number of the bytes of memory objects, which several objects may share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StoreId(u32);

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
    /// A place in a file of the worker's, which programs map.
    Arena(ArenaPlace),
    /// Parts of a program's file.
    Registered(MemoryFileId, FileMemory),
    /// Pages of a VM.
    Guest(GuestPages),
    /// The doorbell page.
    Doorbell,
    /// A region for launches by kernels, which belongs to its mapping.
    LaunchRegion,
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
    partition: Extents,
    /// Video memory of all stores, in bytes.
    used_video: u64,
    /// Memory that programs have registered, and pages of a VM, in bytes.
    given_bytes: u64,
    max_system_bytes: u64,
    files: Files,
    stores: ChangeMap<StoreId, Store>,
    last_store: u32,
    mappings: ChangeMap<(SpaceId, u64), Mapped>,
    /// Memory of the VM.
    guest: Option<SharedGuestMemory>,
}

impl Memories {
    /// Creates the memory of a vGPU with `vram_bytes` of video memory, whose programs may have
    /// `max_system_bytes` of system memory.
    pub fn new(vram_bytes: u64, max_system_bytes: u64) -> Self {
        Self {
            partition: Extents::new(vram_bytes, GRANULE),
            used_video: 0,
            given_bytes: 0,
            max_system_bytes,
            files: Files::default(),
            stores: ChangeMap::default(),
            last_store: 0,
            mappings: ChangeMap::default(),
            guest: None,
        }
    }

    /// Sets the maker of files.
    pub fn set_files(&mut self, files: Box<dyn NewFiles>) {
        self.files.set_maker(files);
    }

    /// Sets the memory of the VM whose programs use the vGPU.
    pub fn set_guest(&mut self, memory: SharedGuestMemory) {
        self.guest = Some(memory);
    }

    /// Returns whether the programs are those of a VM.
    pub fn are_of_guest(&self) -> bool {
        self.guest.is_some()
    }

    /// Returns the processes of the files with system memory, one for each.
    pub fn file_processes(&self) -> impl Iterator<Item = i32> {
        self.files.processes()
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
            Ok(Store {
                place: Place::Arena(_) | Place::Registered(..) | Place::Guest(_) | Place::Doorbell,
                ..
            })
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
            Place::Arena(_) | Place::Registered(..) | Place::Guest(_) | Place::Doorbell => {
                Ok(false)
            }
            Place::Partition(_) | Place::Allocated(_) | Place::LaunchRegion => {
                Err(Stop::Status(status::NOT_SUPPORTED))
            }
            Place::Reserved { .. } => Ok(true),
        }
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
            Place::Registered(..) => self.stores.get_mut(&id),
            _ => self.stores.get_mut_unnoted(&id),
        };
        let store = store.ok_or(Stop::Status(status::OBJECT_NOT_FOUND))?;
        if offset.checked_add(len).is_none_or(|end| end > store.len) {
            return Err(Stop::Status(status::INVALID_ARGUMENT));
        }
        match &mut store.place {
            Place::Arena(ArenaPlace { file, start }) => {
                let memory = self.files.import(gpu, *file)?;
                Ok(vec![(Backing::Guest { memory, offset: *start + offset }, len)])
            }
            Place::Registered(file, memory) => {
                let file = self.files.file(*file).ok_or(Stop::Status(status::OBJECT_NOT_FOUND))?;
                Ok(memory.import(file.as_fd(), gpu, offset, len)?)
            }
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
            Place::Arena(place) => {
                let pins = gpu.gpu().capabilities.contains(GpuCapabilities::PINS);
                self.files.free(place, len, pins).into_iter().collect()
            }
            Place::Registered(file, memory) => {
                self.given_bytes -= len;
                self.files.release_registered(file);
                memory.into_imports().collect()
            }
            Place::Guest(_) => {
                self.given_bytes -= len;
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
