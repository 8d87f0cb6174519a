//! State of the memory of programs in a journal, for a process that adopts them.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use mdev_core::gpu::CREATED_VA_END;
use mdev_core::ids::{MemoryId, SpaceId};
use programs::change_map::{ChangeMap, Changed, apply};
use programs::front_end::{Damaged, MemoryFileId};
use programs::guest_memory::{FreedPages, GuestPages};
use serde::{Deserialize, Serialize};

use super::files::{ArenaPlace, FileState};
use super::{MAX_STORES, Mapped, Memories, Place, Store, StoreId};
use crate::nvidia::frontend::extents::Extent;
use crate::nvidia::frontend::file_memory::{FileMemory, FilePart};

const OVERLAP: Damaged = Damaged("mappings overlap");
const WRONG_FILE: Damaged = Damaged("memory is not in its file");
const WRONG_PAGES: Damaged = Damaged("pages of the VM are impossible");
const WRONG_LENGTH: Damaged = Damaged("memory has another length, or is beyond the limit");

/// A store without its references, which objects and mappings determine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreState {
    len: u64,
    place: PlaceState,
    gpu_caches: bool,
}

/// [`Place`] without descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum PlaceState {
    Reserved {
        align: u64,
    },
    Partition(Vec<Extent>),
    Allocated(MemoryId),
    Arena(ArenaPlace),
    Registered(MemoryFileId, Vec<FilePart>),
    /// Id and guest-physical ranges.
    Guest(u64, Vec<(u64, u64)>),
    Doorbell,
    LaunchRegion,
}

/// Changes of stores, their files and mappings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryChanges {
    last_store: u32,
    last_file: u32,
    files: Vec<Changed<MemoryFileId, FileState>>,
    stores: Vec<Changed<StoreId, StoreState>>,
    mappings: Vec<Changed<(SpaceId, u64), Mapped>>,
}

impl MemoryChanges {
    /// Returns the files that have changed.
    pub fn files(&self) -> impl Iterator<Item = MemoryFileId> {
        self.files.iter().map(|(id, _)| *id)
    }
}

/// Stores, their files and mappings that changes lead to.
#[derive(Debug, Default)]
pub struct MemoryState {
    last_store: u32,
    last_file: u32,
    files: BTreeMap<MemoryFileId, FileState>,
    stores: BTreeMap<StoreId, StoreState>,
    mappings: BTreeMap<(SpaceId, u64), Mapped>,
}

/// What a worker needs besides the state of memory.
pub struct MemoryParts<'a> {
    /// Takes a file with system memory.
    pub take_file: &'a mut dyn FnMut(MemoryFileId) -> Option<OwnedFd>,
    /// Where pages of a VM are named when they are no longer used.
    pub freed: &'a FreedPages,
}

impl MemoryState {
    /// Follows changes.
    pub fn apply(&mut self, changes: MemoryChanges) {
        (self.last_store, self.last_file) = (changes.last_store, changes.last_file);
        apply(&mut self.files, changes.files);
        apply(&mut self.stores, changes.stores);
        apply(&mut self.mappings, changes.mappings);
    }
}

impl Store {
    fn state(&self) -> StoreState {
        let place = match &self.place {
            Place::Reserved { align } => PlaceState::Reserved { align: *align },
            Place::Partition(extents) => PlaceState::Partition(extents.clone()),
            Place::Allocated(memory) => PlaceState::Allocated(*memory),
            Place::Arena(place) => PlaceState::Arena(*place),
            Place::Registered(file, memory) => PlaceState::Registered(*file, memory.parts()),
            Place::Guest(pages) => PlaceState::Guest(pages.id(), pages.all_ranges().collect()),
            Place::Doorbell => PlaceState::Doorbell,
            Place::LaunchRegion => PlaceState::LaunchRegion,
        };
        StoreState { len: self.len, place, gpu_caches: self.gpu_caches }
    }
}

impl Memories {
    /// Returns whether something has changed since the last [`Self::take_changes`].
    pub fn has_changes(&self) -> bool {
        self.stores.is_changed() || self.mappings.is_changed() || self.files.is_changed()
    }

    /// Returns what has changed since the last call.
    pub fn take_changes(&mut self) -> MemoryChanges {
        MemoryChanges {
            last_store: self.last_store,
            last_file: self.files.last(),
            files: self.files.take_changes(),
            stores: self.stores.take_changes(Store::state),
            mappings: self.mappings.take_changes(|mapped| *mapped),
        }
    }

    /// Returns all of the state.
    pub fn all(&self) -> MemoryChanges {
        MemoryChanges {
            last_store: self.last_store,
            last_file: self.files.last(),
            files: self.files.all(),
            stores: self.stores.all(Store::state),
            mappings: self.mappings.all(|mapped| *mapped),
        }
    }

    /// Returns a file with system memory.
    pub fn file(&self, id: MemoryFileId) -> Option<BorrowedFd<'_>> {
        self.files.file(id).map(AsFd::as_fd)
    }

    /// Returns ids and numbers of ranges of a VM's pages that are in use.
    pub fn guest_pages(&self) -> impl Iterator<Item = (u64, usize)> {
        self.stores.values().filter_map(|store| match &store.place {
            Place::Guest(pages) => Some((pages.id(), pages.ranges_count())),
            _ => None,
        })
    }

    /// Adopts the stores and mappings of another process. `objects` are the stores of all
    /// memory objects.
    pub fn adopt(
        &mut self,
        state: MemoryState,
        objects: impl Iterator<Item = StoreId>,
        parts: &mut MemoryParts<'_>,
    ) -> Result<(), Damaged> {
        let MemoryState { last_store, last_file, files, stores, mappings } = state;
        if stores.len() > MAX_STORES || mappings.len() > MAX_STORES {
            return Err(Damaged("it has too much memory"));
        }
        let last = stores.keys().next_back().map_or(0, |StoreId(last)| *last);
        self.last_store = last_store.max(last);
        self.files.adopt(last_file, files, parts.take_file)?;
        let mut references = BTreeMap::<StoreId, u32>::new();
        for store in objects.chain(mappings.values().map(|mapped| mapped.store)) {
            *references.entry(store).or_default() += 1;
        }
        let mut adopted = BTreeMap::new();
        for (id, state) in stores {
            let references =
                references.remove(&id).ok_or(Damaged("memory belongs to no object"))?;
            adopted.insert(id, self.adopt_store(state, references, parts)?);
        }
        if !references.is_empty() {
            return Err(Damaged("an object has no memory"));
        }
        self.files.check_adopted()?;
        let mut end_before = (SpaceId::DEFAULT, 0);
        for (&(space, va), Mapped { len, .. }) in &mappings {
            let end = va.checked_add(*len).filter(|end| *len > 0 && *end <= CREATED_VA_END);
            let end = end.filter(|_| space != end_before.0 || va >= end_before.1).ok_or(OVERLAP)?;
            end_before = (space, end);
        }
        self.stores = ChangeMap::unchanged(adopted);
        self.mappings = ChangeMap::unchanged(mappings);
        Ok(())
    }

    fn adopt_store(
        &mut self,
        state: StoreState,
        references: u32,
        parts: &mut MemoryParts<'_>,
    ) -> Result<Store, Damaged> {
        let StoreState { len, place, gpu_caches } = state;
        let (mut video, mut given) = (0, 0);
        let place = match place {
            PlaceState::Reserved { align } => {
                video = len;
                Place::Reserved { align }
            }
            PlaceState::Partition(extents) => {
                video = len;
                let total = extents.iter().try_fold(0_u64, |sum, part| sum.checked_add(part.len));
                let taken = extents.iter().all(|extent| self.partition.take_again(*extent));
                if total != Some(len) || !taken {
                    return Err(Damaged("video memory is used twice"));
                }
                Place::Partition(extents)
            }
            PlaceState::Allocated(memory) => {
                video = len;
                Place::Allocated(memory)
            }
            PlaceState::Arena(place) => {
                let fits = self.files.adopt_place(place, len);
                fits.then_some(Place::Arena(place)).ok_or(WRONG_FILE)?
            }
            PlaceState::Registered(id, ranges) => {
                given = len;
                let file = self.files.adopt_registered(id).ok_or(WRONG_FILE)?;
                Place::Registered(id, FileMemory::adopt(file, &ranges).ok_or(WRONG_FILE)?)
            }
            PlaceState::Guest(id, ranges) => {
                given = len;
                Place::Guest(GuestPages::new(id, ranges, parts.freed).ok_or(WRONG_PAGES)?)
            }
            PlaceState::Doorbell => Place::Doorbell,
            PlaceState::LaunchRegion => Place::LaunchRegion,
        };
        let bytes = match &place {
            Place::Registered(_, memory) => memory.bytes(),
            Place::Guest(pages) => pages.bytes(),
            _ => len,
        };
        let used = self.used_video.checked_add(video).filter(|used| *used <= self.video_bytes());
        self.used_video = used.filter(|_| bytes == len).ok_or(WRONG_LENGTH)?;
        self.given_bytes = self.given_bytes.checked_add(given).ok_or(WRONG_LENGTH)?;
        let used = self.given_bytes.checked_add(self.files.arena_bytes());
        used.filter(|used| *used <= self.max_system_bytes).ok_or(WRONG_LENGTH)?;
        Ok(Store { references, len, place, gpu_caches })
    }
}
