//! State of a front end, for a process that continues with its programs.
//!
//! The state is recorded as changes: those of one request, or all of it. Identity, recorded answers
//! and the GPU's generation are not part of it, since the next process has them from elsewhere. Nor
//! are the samples of utilization, and the list of refusals that were logged.
//!
//! A worker that a guest has compromised may have written the state. Its values can harm that vGPU
//! only; the checks here keep the next worker's own view consistent.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};

use cuda_socket::FileId;
use serde::{Deserialize, Serialize};

use super::FrontEnd;
use super::files::{File, MAX_FILES, MAX_RANGES};
use super::guest_memory::FreedPages;
use super::memory::StoreId;
use super::memory::running::{MemoryChanges, MemoryParts, RunningMemory};
use super::objects::{Clients, Kind, MAX_CLIENTS, MAX_OBJECTS, Object, RmClient};
use super::tracked::{Changed, Tracked, apply};

/// A recorded state contradicts itself, or is beyond a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("The recorded state of the programs is damaged")]
pub struct Damaged;

/// Changes of a front end since others were taken, or all of its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    last_group: u32,
    next_client: u32,
    files: Vec<Changed<FileId, File>>,
    empty: Vec<Changed<(FileId, u64), u64>>,
    external: Vec<Changed<(FileId, u64), u64>>,
    clients: Vec<Changed<u32, RmClient>>,
    objects: Vec<Changed<(u32, u32), Object>>,
    memory: MemoryChanges,
}

impl Changes {
    /// Returns the stores of memory that have changed. [`FrontEnd::file`] returns their files.
    pub fn stores(&self) -> impl Iterator<Item = StoreId> {
        self.memory.stores()
    }
}

/// State that changes lead to.
#[derive(Debug, Default)]
pub struct RunningPrograms {
    last_group: u32,
    next_client: u32,
    files: BTreeMap<FileId, File>,
    empty: BTreeMap<(FileId, u64), u64>,
    external: BTreeMap<(FileId, u64), u64>,
    clients: BTreeMap<u32, RmClient>,
    objects: BTreeMap<(u32, u32), Object>,
    memory: RunningMemory,
}

impl RunningPrograms {
    /// Follows changes.
    pub fn apply(&mut self, changes: Changes) {
        (self.last_group, self.next_client) = (changes.last_group, changes.next_client);
        apply(&mut self.files, changes.files);
        apply(&mut self.empty, changes.empty);
        apply(&mut self.external, changes.external);
        apply(&mut self.clients, changes.clients);
        apply(&mut self.objects, changes.objects);
        self.memory.apply(changes.memory);
    }

    fn is_valid(&self) -> bool {
        let has_file = |(file, _): &(FileId, u64)| self.files.contains_key(file);
        self.files.len() <= MAX_FILES
            && self.empty.len() <= MAX_RANGES
            && self.external.len() <= MAX_RANGES
            && self.clients.len() <= MAX_CLIENTS
            && self.objects.len() <= MAX_OBJECTS
            && self.empty.keys().chain(self.external.keys()).all(has_file)
            && self.empty.iter().all(|((_, at), len)| at.checked_add(*len).is_some())
            && self.objects.keys().all(|(root, _)| self.clients.contains_key(root))
    }
}

impl FrontEnd {
    /// Returns what has changed since the last call, if something has.
    pub fn take_changes(&mut self) -> Option<Changes> {
        let Self { files, clients, memories, .. } = self;
        let changed = files.open.is_changed()
            || files.empty.is_changed()
            || files.external.is_changed()
            || clients.by_root.is_changed()
            || clients.objects.is_changed()
            || memories.has_changes();
        changed.then(|| Changes {
            last_group: self.last_group,
            next_client: clients.next,
            files: files.open.take_changes(File::clone),
            empty: files.empty.take_changes(|len| *len),
            external: files.external.take_changes(|len| *len),
            clients: clients.by_root.take_changes(RmClient::clone),
            objects: clients.objects.take_changes(Object::clone),
            memory: memories.take_changes(),
        })
    }

    /// Returns all of the state.
    pub fn all(&self) -> Changes {
        let Self { files, clients, memories, .. } = self;
        Changes {
            last_group: self.last_group,
            next_client: clients.next,
            files: files.open.all(File::clone),
            empty: files.empty.all(|len| *len),
            external: files.external.all(|len| *len),
            clients: clients.by_root.all(RmClient::clone),
            objects: clients.objects.all(Object::clone),
            memory: memories.all(),
        }
    }

    /// Returns the file of a store in system memory.
    pub fn file(&self, store: StoreId) -> Option<BorrowedFd<'_>> {
        self.memories.file(store)
    }

    /// Returns the open files.
    pub fn open_files(&self) -> impl Iterator<Item = FileId> {
        self.files.open.keys().copied()
    }

    /// Returns ids and numbers of ranges of a VM's pages that are in use.
    pub fn guest_pages(&self) -> impl Iterator<Item = (u64, usize)> {
        self.memories.guest_pages()
    }

    /// Continues with the programs of another process. Nothing may have used this front end.
    /// `take_file` returns the files of stores in system memory. Makes no request to the GPU.
    ///
    /// # Errors
    ///
    /// Fails if the state is damaged.
    pub fn resume(
        &mut self,
        state: RunningPrograms,
        freed: &FreedPages,
        take_file: &mut dyn FnMut(StoreId) -> Option<OwnedFd>,
    ) -> Result<(), Damaged> {
        if !state.is_valid() {
            return Err(Damaged);
        }
        let RunningPrograms { files, empty, external, clients, objects, memory, .. } = state;
        let stores = objects.values().filter_map(|object| match object.kind {
            Kind::Memory(store) => Some(store),
            _ => None,
        });
        self.memories.resume(memory, stores, &mut MemoryParts { take_file, freed })?;
        self.files.open = Tracked::unchanged(files);
        self.files.empty = Tracked::unchanged(empty);
        self.files.external = Tracked::unchanged(external);
        self.clients = Clients {
            by_root: Tracked::unchanged(clients),
            objects: Tracked::unchanged(objects),
            next: state.next_client,
        };
        self.last_group = state.last_group;
        Ok(())
    }
}
