//! State of a front end in a journal, for a process that adopts its programs.
//!
//! The journal has changes: those of one request, or all of the state. Identity, recorded answers
//! and the GPU's generation are not part of it, since the next process has them from elsewhere. Nor
//! are the samples of utilization, and the list of refusals that were logged.
//!
//! A worker that a guest has compromised may have written the state. Its values can harm that vGPU
//! only; the checks here keep the next worker's own view consistent.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use cuda_socket::FileId;
use programs::change_map::{ChangeMap, Changed, apply};
use programs::front_end::{Changes, Damaged, MemoryFileId};
use programs::guest_memory::FreedPages;
use serde::{Deserialize, Serialize};

use super::NvidiaFrontEnd;
use super::files::{File, MAX_FILES, MAX_RANGES};
use super::memory::journal::{MemoryChanges, MemoryParts, MemoryState};
use super::objects::{Clients, Kind, MAX_CLIENTS, MAX_OBJECTS, Object, RmClient};
use super::share_policy::{MAX_POLICIES, ShareList};

/// Changes of a front end since others were taken, or all of its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StateChanges {
    last_group: u32,
    next_client: u32,
    files: Vec<Changed<FileId, File>>,
    empty: Vec<Changed<(FileId, u64), u64>>,
    external: Vec<Changed<(FileId, u64), u64>>,
    clients: Vec<Changed<u32, RmClient>>,
    objects: Vec<Changed<(u32, u32), Object>>,
    shares: Vec<Changed<(u32, u32), ShareList>>,
    memory: MemoryChanges,
}

impl StateChanges {
    /// Returns the changes in the form in which a journal has them.
    pub(super) fn encode(&self) -> Changes {
        let files = self.memory.files().collect();
        // Writing to memory cannot fail.
        Changes { bytes: postcard::to_stdvec(self).unwrap_or_default(), files }
    }
}

/// State that changes lead to.
#[derive(Debug, Default)]
pub(super) struct State {
    last_group: u32,
    next_client: u32,
    files: BTreeMap<FileId, File>,
    empty: BTreeMap<(FileId, u64), u64>,
    external: BTreeMap<(FileId, u64), u64>,
    clients: BTreeMap<u32, RmClient>,
    objects: BTreeMap<(u32, u32), Object>,
    shares: BTreeMap<(u32, u32), ShareList>,
    memory: MemoryState,
}

impl State {
    /// Returns the state that changes lead to, from that of a new front end.
    pub(super) fn follow(changes: &[Vec<u8>]) -> Result<Self, Damaged> {
        let mut state = Self::default();
        for one in changes {
            state.apply(postcard::from_bytes(one).map_err(|_| Damaged("it cannot be read"))?);
        }
        Ok(state)
    }

    fn apply(&mut self, changes: StateChanges) {
        (self.last_group, self.next_client) = (changes.last_group, changes.next_client);
        apply(&mut self.files, changes.files);
        apply(&mut self.empty, changes.empty);
        apply(&mut self.external, changes.external);
        apply(&mut self.clients, changes.clients);
        apply(&mut self.objects, changes.objects);
        apply(&mut self.shares, changes.shares);
        self.memory.apply(changes.memory);
    }

    /// Returns whether there is such an object, or client.
    fn has(&self, (root, handle): (u32, u32)) -> bool {
        let is_client = root == handle && self.clients.contains_key(&root);
        is_client || self.objects.contains_key(&(root, handle))
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
            && self.shares.iter().all(|(key, list)| self.has(*key) && list.len() <= MAX_POLICIES)
    }
}

impl NvidiaFrontEnd {
    /// Returns whether something has changed since the last [`Self::changed_state`].
    pub(super) fn has_changed(&self) -> bool {
        let Self { files, clients, memories, .. } = self;
        files.open.is_changed()
            || files.empty.is_changed()
            || files.external.is_changed()
            || clients.by_root.is_changed()
            || clients.objects.is_changed()
            || clients.shares.is_changed()
            || memories.has_changes()
    }

    /// Returns what has changed since the last call.
    pub(super) fn changed_state(&mut self) -> StateChanges {
        let Self { files, clients, memories, .. } = self;
        StateChanges {
            last_group: self.last_group,
            next_client: clients.next,
            files: files.open.take_changes(File::clone),
            empty: files.empty.take_changes(|len| *len),
            external: files.external.take_changes(|len| *len),
            clients: clients.by_root.take_changes(RmClient::clone),
            objects: clients.objects.take_changes(Object::clone),
            shares: clients.shares.take_changes(ShareList::clone),
            memory: memories.take_changes(),
        }
    }

    /// Returns all of the state.
    pub(super) fn whole_state(&self) -> StateChanges {
        let Self { files, clients, memories, .. } = self;
        StateChanges {
            last_group: self.last_group,
            next_client: clients.next,
            files: files.open.all(File::clone),
            empty: files.empty.all(|len| *len),
            external: files.external.all(|len| *len),
            clients: clients.by_root.all(RmClient::clone),
            objects: clients.objects.all(Object::clone),
            shares: clients.shares.all(ShareList::clone),
            memory: memories.all(),
        }
    }

    /// Adopts the state. See [`FrontEnd::adopt`](programs::FrontEnd::adopt).
    pub(super) fn adopt_state(
        &mut self,
        state: State,
        freed: &FreedPages,
        take_file: &mut dyn FnMut(MemoryFileId) -> Option<OwnedFd>,
    ) -> Result<(), Damaged> {
        if !state.is_valid() {
            return Err(Damaged("its files and objects do not belong together"));
        }
        let State { files, empty, external, clients, objects, shares, memory, .. } = state;
        let stores = objects.values().filter_map(|object| match object.kind {
            Kind::Memory(store) => Some(store),
            _ => None,
        });
        self.memories.adopt(memory, stores, &mut MemoryParts { take_file, freed })?;
        self.files.open = ChangeMap::unchanged(files);
        self.files.empty = ChangeMap::unchanged(empty);
        self.files.external = ChangeMap::unchanged(external);
        self.clients = Clients {
            by_root: ChangeMap::unchanged(clients),
            objects: ChangeMap::unchanged(objects),
            shares: ChangeMap::unchanged(shares),
            next: state.next_client,
        };
        self.last_group = state.last_group;
        Ok(())
    }
}
