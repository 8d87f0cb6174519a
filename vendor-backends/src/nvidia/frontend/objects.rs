//! The tree of objects that programs have created with the resource manager.

use std::collections::BTreeMap;

use cuda_socket::FileId;
use mdev_core::gpu::ChannelHandle;
use mdev_core::ids::{ChannelId, SpaceId};
use nvidia_rm::numbers::{class, status};
use programs::change_map::ChangeMap;
use programs::front_end::Opener;
use serde::{Deserialize, Serialize};

use super::call::Stop;
use super::files::Files;
use super::memory::StoreId;
use super::share_policy::{self, Change, DEFAULT, OWN_RIGHTS, Pair, Policy, ShareList, Sharers};

/// First handle of a client. The driver chooses handles of clients from this range.
const FIRST_CLIENT: u32 = 0xc1d0_0001;

/// Maximum number of clients. A process has two or three.
pub const MAX_CLIENTS: usize = 1024;

/// Maximum number of objects of all clients together.
pub const MAX_OBJECTS: usize = 65_536;

/// What an object stands for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Nothing of the vGPU: an object that only answers queries.
    Passive,
    /// An address space, once it was needed.
    Space(Option<SpaceId>),
    /// A memory object.
    Memory(StoreId),
    /// A channel group.
    Group {
        /// Number of its channels' engine (`NV2080_ENGINE_TYPE_*`).
        engine: u32,
        /// Number of the group on the vGPU.
        number: u32,
        /// Handle of its address space, or 0.
        space: u32,
    },
    /// A context share: the address space of channels in a group.
    ContextShare {
        /// Handle of the address space.
        space: u32,
    },
    /// An object of a channel: the number of its engine (`NV2080_ENGINE_TYPE_*`).
    Engine(u32),
    /// A channel.
    Channel {
        /// Its ids on the vGPU.
        handle: ChannelHandle,
        /// Number of its engine (`NV2080_ENGINE_TYPE_*`).
        engine: u32,
        /// Its address space.
        space: SpaceId,
        /// It has ended before its object: by a reset, or with its address space.
        ended: bool,
        /// Memory of its error notifier.
        notifier: Option<StoreId>,
        /// Its error was written to the notifier.
        failed: bool,
    },
    /// An event.
    Event {
        /// File that polls readable.
        file: FileId,
        /// What it stands for.
        source: EventSource,
    },
    /// A debugger, which tells of exceptions.
    Debugger {
        /// Handle of the channel whose object it debugs.
        channel: u32,
    },
}

/// What an event stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventSource {
    /// Interrupts of the GPU.
    Interrupts,
    /// Exceptions and errors of the channel to which the event's parent belongs.
    Exceptions {
        /// Number of the parent's notifier.
        notifier: u32,
    },
}

/// An object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    /// Handle of the parent, or of the client.
    pub parent: u32,
    /// Class.
    pub class: u32,
    /// What it stands for.
    pub kind: Kind,
}

/// A client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RmClient {
    /// Control file on which it was made.
    pub file: FileId,
}

/// All clients of a vGPU's programs.
#[derive(Debug)]
pub struct Clients {
    pub(super) by_root: ChangeMap<u32, RmClient>,
    /// Objects by client and handle.
    pub(super) objects: ChangeMap<(u32, u32), Object>,
    /// Share policies by client and handle, of objects and clients that have lists of their own.
    pub(super) shares: ChangeMap<(u32, u32), ShareList>,
    pub(super) next: u32,
}

impl Default for Clients {
    fn default() -> Self {
        Self {
            by_root: ChangeMap::default(),
            objects: ChangeMap::default(),
            shares: ChangeMap::default(),
            next: FIRST_CLIENT,
        }
    }
}

impl Clients {
    /// Creates a client for a control file. Returns its handle.
    pub fn create(&mut self, file: FileId) -> Result<u32, Stop> {
        if self.by_root.len() >= MAX_CLIENTS {
            return Err(Stop::Status(status::INSUFFICIENT_RESOURCES));
        }
        self.next = self.next.max(FIRST_CLIENT);
        while self.by_root.contains_key(&self.next) {
            self.next = self.next.checked_add(1).unwrap_or(FIRST_CLIENT);
        }
        self.by_root.insert(self.next, RmClient { file });
        Ok(self.next)
    }

    fn client(&self, file: FileId, root: u32) -> Result<&RmClient, Stop> {
        // Another file's client is as good as none.
        let client = self.by_root.get(&root).filter(|client| client.file == file);
        client.ok_or(Stop::Status(status::INVALID_CLIENT))
    }

    /// Checks that a client belongs to a control file.
    pub fn check(&self, file: FileId, root: u32) -> Result<(), Stop> {
        self.client(file, root).map(drop)
    }

    /// Returns an object of a client that belongs to a control file.
    pub fn object(&self, file: FileId, root: u32, handle: u32) -> Result<&Object, Stop> {
        self.check(file, root)?;
        self.objects.get(&(root, handle)).ok_or(Stop::Status(status::OBJECT_NOT_FOUND))
    }

    /// Changes the share policies of an object, or of the client itself. An error changes nothing.
    ///
    /// Unlike in the driver, a client cannot take away its own rights.
    pub fn share(
        &mut self,
        file: FileId,
        root: u32,
        handle: u32,
        change: &Change,
    ) -> Result<(), Stop> {
        self.class_of(file, root, handle)?;
        if matches!(change.policy.whose, Sharers::Client(it) if !self.by_root.contains_key(&it)) {
            return Err(Stop::Status(status::INVALID_CLIENT));
        }
        if !change.revokes && change.policy.rights & !OWN_RIGHTS != 0 {
            return Err(Stop::Status(status::INSUFFICIENT_PERMISSIONS));
        }
        let list = share_policy::changed(self.active_shares(root, handle), change)?;
        self.shares.insert((root, handle), list);
        Ok(())
    }

    /// Returns the share policies in force for an object: its own, or those of the nearest object
    /// above it.
    fn active_shares(&self, root: u32, handle: u32) -> &[Policy] {
        let mut at = handle;
        // A damaged journal may have objects above themselves.
        for _ in 0..=self.objects.len() {
            if let Some(list) = self.shares.get(&(root, at)) {
                return list;
            }
            let Some(object) = self.objects.get(&(root, at)) else { break };
            at = object.parent;
        }
        self.shares.get(&(root, root)).map_or(DEFAULT, |list| list)
    }

    /// Returns an object of `source` that the client `root` may make an own object of.
    pub fn accessible(
        &self,
        files: &Files,
        root: u32,
        source: u32,
        handle: u32,
    ) -> Result<&Object, Stop> {
        let opener = |root: u32| -> Result<Opener, Stop> {
            let client = self.by_root.get(&root);
            Ok(files.get(client.ok_or(Stop::Status(status::INVALID_CLIENT))?.file)?.opener)
        };
        let pair = Pair { owner: opener(source)?, other: opener(root)?, client: root };
        let object = self.objects.get(&(source, handle));
        let object = object.ok_or(Stop::Status(status::OBJECT_NOT_FOUND))?;
        let rights = share_policy::rights(self.active_shares(source, handle), &pair);
        if root != source && rights & share_policy::DUP_OBJECT == 0 {
            return Err(Stop::Status(status::INSUFFICIENT_PERMISSIONS));
        }
        Ok(object)
    }

    /// Returns an object for a change.
    pub fn object_mut(
        &mut self,
        file: FileId,
        root: u32,
        handle: u32,
    ) -> Result<&mut Object, Stop> {
        self.check(file, root)?;
        self.objects.get_mut(&(root, handle)).ok_or(Stop::Status(status::OBJECT_NOT_FOUND))
    }

    /// Returns a channel of a channel group.
    pub fn channel_of_group(&self, root: u32, group: u32) -> Option<ChannelId> {
        self.of_client(root).find_map(|(_, object)| match object.kind {
            Kind::Channel { handle, ended: false, .. } if object.parent == group => Some(handle.id),
            _ => None,
        })
    }

    /// Returns the channel that an object belongs to, and the handle of the channel's group.
    pub fn channel_of_object(&self, root: u32, object: u32) -> Option<(ChannelId, u32)> {
        let parent = self.objects.get(&(root, object))?.parent;
        let channel = self.objects.get(&(root, parent))?;
        match channel.kind {
            Kind::Channel { handle, .. } => Some((handle.id, channel.parent)),
            _ => None,
        }
    }

    /// Returns the class of an object, or of the client itself.
    pub fn class_of(&self, file: FileId, root: u32, handle: u32) -> Result<u32, Stop> {
        if handle == root {
            return self.check(file, root).map(|()| class::CLIENT);
        }
        Ok(self.object(file, root, handle)?.class)
    }

    /// Checks that an object can be created below `parent`.
    pub fn check_new(&self, file: FileId, root: u32, parent: u32, handle: u32) -> Result<(), Stop> {
        self.check(file, root)?;
        if parent != root && !self.objects.contains_key(&(root, parent)) {
            Err(Stop::Status(status::INVALID_OBJECT_PARENT))
        } else if handle == 0 || handle == root || self.objects.contains_key(&(root, handle)) {
            Err(Stop::Status(status::DUPLICATE))
        } else if self.objects.len() >= MAX_OBJECTS {
            Err(Stop::Status(status::INSUFFICIENT_RESOURCES))
        } else {
            Ok(())
        }
    }

    /// Adds an object that [`Self::check_new`] allowed.
    pub fn insert(&mut self, root: u32, handle: u32, object: Object) {
        self.objects.insert((root, handle), object);
    }

    /// Removes an object with everything below it, or a client with all of its objects. Returns
    /// them in the order in which they have to end: channels, then children before parents.
    pub fn remove(&mut self, file: FileId, root: u32, handle: u32) -> Result<Vec<Object>, Stop> {
        self.check(file, root)?;
        let mut handles = vec![handle];
        if handle == root {
            handles = self.of_client(root).map(|(handle, _)| handle).collect();
        } else {
            if !self.objects.contains_key(&(root, handle)) {
                return Err(Stop::Status(status::OBJECT_NOT_FOUND));
            }
            // One pass over all objects: a program may have very many.
            let mut below = BTreeMap::<u32, Vec<u32>>::new();
            for (handle, object) in self.of_client(root) {
                below.entry(object.parent).or_default().push(handle);
            }
            let mut at = 0;
            while let Some(parent) = handles.get(at) {
                handles.extend(below.remove(parent).unwrap_or_default());
                at += 1;
            }
        }
        for handle in &handles {
            self.shares.remove(&(root, *handle));
        }
        let mut removed = Vec::new();
        for handle in handles.iter().rev() {
            removed.extend(self.objects.remove(&(root, *handle)));
        }
        removed.sort_by_key(|object| match object.kind {
            Kind::Channel { .. } => 0,
            Kind::Space(_) => 2,
            _ => 1,
        });
        if handle == root {
            self.by_root.remove(&root);
            self.shares.remove(&(root, root));
            self.forget_sharer(root);
        }
        Ok(removed)
    }

    /// Removes the policies that name a client: another client may get its handle.
    fn forget_sharer(&mut self, root: u32) {
        let names = |policy: &Policy| policy.whose == Sharers::Client(root);
        let naming = self.shares.iter().filter(|(_, list)| list.iter().any(names));
        for key in naming.map(|(key, _)| *key).collect::<Vec<_>>() {
            if let Some(list) = self.shares.get_mut(&key) {
                list.retain(|policy| !names(policy));
            }
        }
    }

    /// Returns the clients of a control file.
    pub fn of_file(&self, file: FileId) -> Vec<u32> {
        let clients = self.by_root.iter().filter(|(_, client)| client.file == file);
        clients.map(|(root, _)| *root).collect()
    }

    /// Returns the objects of a client, by handle.
    fn of_client(&self, root: u32) -> impl Iterator<Item = (u32, &Object)> {
        let objects = self.objects.range((root, 0)..=(root, u32::MAX));
        objects.map(|((_, handle), object)| (*handle, object))
    }

    /// Notes that an address space has ended, and with it its channels.
    pub fn end_channels(&mut self, of: SpaceId) {
        let is_of = |object: &Object| matches!(object.kind, Kind::Channel { space, ended: false, .. } if space == of);
        self.change_where(is_of, |kind| {
            if let Kind::Channel { ended, .. } = kind {
                *ended = true;
            }
        });
    }

    /// Notes that a channel has failed.
    pub fn fail_channel(&mut self, channel: ChannelId) {
        let is_channel = |object: &Object| matches!(object.kind, Kind::Channel { handle, ended: false, .. } if handle.id == channel);
        self.change_where(is_channel, |kind| {
            if let Kind::Channel { failed, .. } = kind {
                *failed = true;
            }
        });
    }

    /// Changes some objects.
    fn change_where(&mut self, is_one: impl Fn(&Object) -> bool, change: impl Fn(&mut Kind)) {
        let found = self.objects.iter().filter(|(_, object)| is_one(object));
        for key in found.map(|(key, _)| *key).collect::<Vec<_>>() {
            if let Some(object) = self.objects.get_mut(&key) {
                change(&mut object.kind);
            }
        }
    }

    /// Returns all objects with their clients.
    pub fn with_roots(&self) -> impl Iterator<Item = (u32, &Object)> {
        self.objects.iter().map(|((root, _), object)| (*root, object))
    }

    /// Returns all objects.
    pub fn all(&self) -> impl Iterator<Item = &Object> {
        self.with_roots().map(|(_, object)| object)
    }

    /// Returns all objects with the control files of their clients.
    pub fn with_files(&self) -> impl Iterator<Item = (FileId, &Object)> {
        let objects = self.with_roots();
        objects.filter_map(|(root, object)| Some((self.by_root.get(&root)?.file, object)))
    }

    /// Returns the number of clients and of objects.
    pub fn counts(&self) -> (usize, usize) {
        (self.by_root.len(), self.objects.len())
    }
}
