//! Object tree of the fake driver, and its rules.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use crate::numbers::{class, engine, event, flag, status};
use mdev_core::abi::{compute, copy, host};

use super::FileId;
use super::engines::Ring;

/// Offset of the GPU's clock in the usermode page.
pub const CLOCK: u64 = 0x80;

/// First address of an address space whose creator has not chosen one.
pub const DEFAULT_BASE: u64 = 1 << 20;

/// Addresses that the driver keeps for itself in each address space.
const OWN_RANGE: Range<u64> = 4 << 30..(4 << 30) + (512 << 20);

/// `NV_STATUS` of a refused call.
pub type Refusal = u32;

/// Object of a client.
#[derive(Debug, Default)]
pub struct Object {
    pub client: u32,
    pub parent: u32,
    pub class: u32,
    /// Length of memory, in bytes.
    pub len: u64,
    /// First address of an address space.
    pub base: u64,
    /// Memory is read-only for user space.
    pub read_only: bool,
    /// Engine of a group or channel.
    pub engine: u32,
    /// A channel is on the second runqueue of its engine.
    pub second_runqueue: bool,
    /// Token of a channel.
    pub token: u32,
    /// Address of a channel's ring, and number of its entries.
    pub gpfifo: (u64, u32),
    /// Offset of a channel's USERD in its memory.
    pub userd_offset: u64,
    /// A channel or group is on the runlist.
    pub scheduled: bool,
    /// Time slice of a group, in microseconds.
    pub timeslice_us: u64,
    /// Handles of objects that must outlive this one, such as memory and address spaces.
    pub uses: Vec<u32>,
    /// File that is mapped in place of memory. Errors are written to that of a notifier.
    pub mapped_file: Option<File>,
    pub faulted: bool,
    /// Number of times that a channel was disabled and not enabled again.
    pub disabled: u32,
    /// File of an event, and the event's index.
    pub event: Option<(FileId, u32)>,
    /// Exceptions that a debugger watches.
    pub exception_mask: u32,
    /// Address of the pages of guest memory in this process.
    pub address: u64,
    /// Contents of video memory.
    pub contents: Option<File>,
    /// Work of a channel.
    pub ring: Ring,
    /// File and process of a client.
    pub owner: Option<(FileId, u32)>,
}

/// Mapping at a GPU virtual address.
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    pub client: u32,
    pub space: u32,
    pub memory: u32,
    pub va: u64,
    pub len: u64,
    /// Offset in the memory.
    pub offset: u64,
    /// The GPU may keep the memory in its own cache.
    pub gpu_caches: bool,
}

/// Objects of all clients.
#[derive(Debug, Default)]
pub struct Objects {
    pub(super) all: BTreeMap<(u32, u32), Object>,
    /// Mappings by client, address space and address.
    pub(super) mappings: BTreeMap<(u32, u32, u64), Mapping>,
    clients: u32,
    tokens: u32,
    pub violations: Vec<String>,
    /// Tokens of the channels that were enabled when their group was scheduled.
    pub started: Vec<u32>,
    /// Time of the GPU's clock.
    pub clock_ns: u64,
    /// The compute engine executes a kernel that does not end.
    pub engine_held: bool,
    /// Number of entries that the GPU has fetched from rings in system memory.
    pub fetched: u64,
    /// Time of a kernel of guests.
    pub kernel_time: Duration,
}

impl Objects {
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Creates a client and returns its handle.
    pub fn new_client(&mut self, file: FileId, process: u32) -> u32 {
        self.clients += 1;
        let handle = 0xc1d0_0000 + self.clients;
        let owner = Some((file, process));
        let root = Object { client: handle, class: class::CLIENT, owner, ..Default::default() };
        self.all.insert((handle, handle), root);
        handle
    }

    pub fn get(&self, client: u32, handle: u32) -> Result<&Object, Refusal> {
        self.all.get(&(client, handle)).ok_or(status::OBJECT_NOT_FOUND)
    }

    /// Checks that a client belongs to a file. The process does not matter.
    pub fn check_file(&self, client: u32, file: FileId) -> Result<(), Refusal> {
        let owner = self.get(client, client).ok().and_then(|root| root.owner);
        if owner.is_some_and(|(own, _)| own == file) { Ok(()) } else { Err(status::INVALID_CLIENT) }
    }

    /// Returns whether a process has made a client.
    pub fn is_made_by(&self, client: u32, process: u32) -> bool {
        let owner = self.get(client, client).ok().and_then(|root| root.owner);
        owner.is_some_and(|(_, maker)| maker == process)
    }

    pub fn get_mut(&mut self, client: u32, handle: u32) -> Result<&mut Object, Refusal> {
        self.all.get_mut(&(client, handle)).ok_or(status::OBJECT_NOT_FOUND)
    }

    /// Returns an object of a class.
    pub fn of_class(&self, client: u32, handle: u32, class: u32) -> Result<&Object, Refusal> {
        let object = self.get(client, handle).map_err(|_| status::INVALID_OBJECT_HANDLE)?;
        if object.class == class { Ok(object) } else { Err(status::INVALID_OBJECT_HANDLE) }
    }

    /// Describes all objects and mappings, without tokens.
    pub fn describe(&self) -> Vec<String> {
        let objects = self.all.iter().map(|((client, handle), object)| {
            let Object { parent, class, len, engine, gpfifo, .. } = object;
            let Object { scheduled, disabled, faulted, timeslice_us, .. } = object;
            format!(
                "{client:#x} {handle:#x} below {parent:#x}: {class:#x}, {len} bytes, engine {engine}, \
                 ring {gpfifo:x?}, scheduled {scheduled}, disabled {disabled}, faulted {faulted}, \
                 {timeslice_us} us"
            )
        });
        let mappings = self.mappings.values().map(|mapping| format!("{mapping:x?}"));
        objects.chain(mappings).collect()
    }

    /// Returns the size of allocated video memory, in bytes.
    pub fn video_memory(&self) -> u64 {
        let allocated = self.all.values().filter(|object| object.class == class::VIDEO_MEMORY);
        allocated.map(|object| object.len).sum()
    }

    /// Inserts an object below its parent.
    pub fn insert(&mut self, handle: u32, mut object: Object) -> Result<(), Refusal> {
        let parent =
            self.get(object.client, object.parent).map_err(|_| status::INVALID_OBJECT_PARENT)?;
        if !may_be_below(object.class, parent.class) {
            return Err(status::INVALID_OBJECT_PARENT);
        }
        if handle == 0 || self.all.contains_key(&(object.client, handle)) {
            return Err(status::DUPLICATE);
        }
        for used in &object.uses {
            self.get(object.client, *used).map_err(|_| status::INVALID_OBJECT_HANDLE)?;
        }
        if object.class == host::CLASS {
            if object.engine != parent.engine {
                return Err(status::INVALID_ARGUMENT);
            }
            self.tokens += 1;
            object.token = object.engine << 16 | self.tokens;
        }
        self.all.insert((object.client, handle), object);
        Ok(())
    }

    /// Frees an object and its children.
    pub fn free(&mut self, client: u32, handle: u32) -> Result<(), Refusal> {
        self.get(client, handle)?;
        let mut freed = vec![handle];
        let mut next = 0;
        while let Some(parent) = freed.get(next).copied() {
            let children = self.all.iter().filter(|((of_client, own), object)| {
                *of_client == client && object.parent == parent && *own != parent
            });
            freed.extend(children.map(|((_, own), _)| *own));
            next += 1;
        }
        for gone in &freed {
            for ((of_client, own), object) in &self.all {
                if *of_client == client && object.uses.contains(gone) && !freed.contains(own) {
                    let class = object.class;
                    let line = format!("{gone:#x} was freed while {own:#x} ({class:#x}) uses it");
                    self.violations.push(line);
                }
            }
            if handle != client
                && self.mappings.values().any(|m| m.client == client && m.memory == *gone)
            {
                self.violations.push(format!("{gone:#x} was freed while it is mapped"));
            }
        }
        self.all.retain(|(of_client, own), _| *of_client != client || !freed.contains(own));
        self.mappings.retain(|_, mapping| {
            mapping.client != client
                || !freed.contains(&mapping.memory) && !freed.contains(&mapping.space)
        });
        Ok(())
    }

    fn insert_mapping(&mut self, mapping: Mapping) {
        self.mappings.insert((mapping.client, mapping.space, mapping.va), mapping);
    }

    /// Maps memory.
    pub fn map(&mut self, mapping: Mapping) -> Result<(), Refusal> {
        let memory = self.get(mapping.client, mapping.memory)?;
        let range = self.of_class(mapping.client, mapping.space, class::VIRTUAL)?;
        let space = *range.uses.first().ok_or(status::INVALID_ARGUMENT)?;
        let base = self.of_class(mapping.client, space, class::VA_SPACE)?.base;
        let end = mapping.va.checked_add(mapping.len).ok_or(status::INVALID_ARGUMENT)?;
        if mapping.len == 0
            || mapping.len > memory.len
            || !(mapping.va | mapping.len).is_multiple_of(4096)
            || mapping.va < base
        {
            return Err(status::INVALID_ARGUMENT);
        }
        let key = |va: u64| (mapping.client, mapping.space, va);
        let before = self.mappings.range(key(0)..key(end)).next_back();
        let overlaps = before.is_some_and(|(_, other)| mapping.va < other.va + other.len);
        if overlaps || (mapping.va < OWN_RANGE.end && end > OWN_RANGE.start) {
            return Err(status::NO_MEMORY);
        }
        self.insert_mapping(mapping);
        Ok(())
    }

    /// Unmaps `size` bytes at `va`, or with size 0 the mapping that begins there.
    pub fn unmap(
        &mut self,
        client: u32,
        space: u32,
        memory: u32,
        va: u64,
        size: u64,
    ) -> Result<(), Refusal> {
        let inside = |m: &Mapping| {
            m.memory == memory && if size == 0 { m.va == va } else { va + size <= m.va + m.len }
        };
        let before = self.mappings.range((client, space, 0)..=(client, space, va)).next_back();
        let found = before.filter(|(_, mapping)| inside(mapping)).map(|(key, _)| *key);
        let mapping = found.and_then(|key| self.mappings.remove(&key));
        let mapping = mapping.ok_or(status::OBJECT_NOT_FOUND)?;
        let unmapped_end = if size == 0 { mapping.va + mapping.len } else { va + size };
        for (start, end) in [(mapping.va, va), (unmapped_end, mapping.va + mapping.len)] {
            if start < end {
                let (len, offset) = (end - start, mapping.offset + (start - mapping.va));
                self.insert_mapping(Mapping { va: start, len, offset, ..mapping });
            }
        }
        Ok(())
    }

    /// Reports an error on all channels in the group of the channel with a token.
    pub fn fault(&mut self, token: u32, code: u32) {
        let group_of = |object: &Object| (object.client, object.parent);
        let Some(group) = self.all.values().find(|o| o.token == token).map(group_of) else {
            return;
        };
        let mut notifiers = Vec::new();
        for object in self.all.values_mut() {
            if object.class == host::CLASS && group_of(object) == group {
                object.faulted = true;
                notifiers.extend(object.uses.first().map(|notifier| (object.client, *notifier)));
            }
        }
        for (client, notifier) in notifiers {
            if let Ok(Object { mapped_file: Some(file), .. }) = self.get(client, notifier) {
                let words = [code.to_le_bytes(), 0xffff_0000u32.to_le_bytes()].concat();
                let _ = file.write_at(&words, 8);
            }
        }
    }

    /// Returns the events with data that a kernel's exception in the channel with a token raises:
    /// their files, handles and notifiers. None if no debugger watches the exception.
    pub fn exception_events(&self, token: u32, notifier: u32) -> Vec<(FileId, u32, u32)> {
        let channel = self.all.iter().find(|(_, object)| object.token == token);
        let Some((&(client, channel), _)) = channel else { return Vec::new() };
        let of_client = || self.all.iter().filter(move |((owner, _), _)| *owner == client);
        let computes = |o: &Object| o.parent == channel && o.class == compute::CLASS;
        let compute = of_client().find(|(_, object)| computes(object)).map(|((_, own), _)| *own);
        let Some(compute) = compute else { return Vec::new() };
        let watches = |o: &Object| o.exception_mask >> notifier & 1 != 0 && o.uses == [compute];
        if !of_client().any(|(_, object)| object.class == class::DEBUGGER && watches(object)) {
            return Vec::new();
        }
        let events = of_client().filter(|(_, object)| object.parent == compute);
        let with_data = events.filter_map(|((_, handle), object)| {
            let (file, index) = object.event?;
            let due = index & event::INDEX == notifier && index & event::WITHOUT_DATA == 0;
            due.then_some((file, *handle, notifier))
        });
        with_data.collect()
    }

    /// Disables or enables a channel. Each disabling needs one enabling.
    /// An adopting process cannot know whether the one before has done it.
    pub fn disable(
        &mut self,
        client: u32,
        handle: u32,
        (disable, rewind): (bool, bool),
        process: u32,
    ) -> Result<(), Refusal> {
        self.token(client, handle)?;
        if disable {
            self.end_kernel(client, handle);
        }
        let continued = !self.is_made_by(client, process);
        let channel = self.get_mut(client, handle)?;
        if rewind {
            channel.ring.rewind();
        }
        match channel.disabled.checked_add_signed(if disable { 1 } else { -1 }) {
            Some(disabled) => channel.disabled = disabled,
            None if continued => {}
            None => self.violations.push(format!("{handle:#x} was enabled without being disabled")),
        }
        Ok(())
    }

    /// Returns whether a channel of a group has the compute class.
    pub fn computes(&self, client: u32, group: u32) -> bool {
        let classes = self.all.values().filter(|o| o.client == client && o.class == compute::CLASS);
        classes
            .map(|o| self.get(client, o.parent))
            .any(|channel| channel.is_ok_and(|c| c.parent == group))
    }

    fn of_token(&self, token: u32) -> Option<&Object> {
        self.all.values().find(|object| object.class == host::CLASS && object.token == token)
    }

    /// Returns whether the channel with a token is on the runlist and enabled.
    pub fn may_run(&self, token: u32) -> bool {
        self.of_token(token).is_some_and(|channel| channel.scheduled && channel.disabled == 0)
    }

    /// Schedules a group with the channels that it has now, or takes it off the runlist.
    pub fn schedule(&mut self, client: u32, group: u32, scheduled: bool) -> Result<(), Refusal> {
        self.get_mut(client, group)?.scheduled = scheduled;
        let of_group =
            |o: &&mut Object| (o.client, o.parent, o.class) == (client, group, host::CLASS);
        let mut at_once = Vec::new();
        for channel in self.all.values_mut().filter(of_group) {
            channel.scheduled = scheduled;
            at_once.extend((scheduled && channel.disabled == 0).then_some(channel.token));
        }
        self.started.extend(at_once);
        Ok(())
    }

    /// Returns the time slice of the group of the channel with a token, in microseconds.
    pub fn timeslice_us(&self, token: u32) -> Option<u64> {
        let channel = self.of_token(token)?;
        Some(self.get(channel.client, channel.parent).ok()?.timeslice_us)
    }

    /// Returns the engine of the channel with a token, and whether the channel is on the second
    /// runqueue.
    pub fn placement(&self, token: u32) -> Option<(u32, bool)> {
        self.of_token(token).map(|channel| (channel.engine, channel.second_runqueue))
    }

    /// Returns whether the GPU may cache what is mapped at an address in any address space.
    pub fn gpu_caches(&self, va: u64) -> Option<bool> {
        self.mappings.values().find(|mapping| mapping.va == va).map(|mapping| mapping.gpu_caches)
    }

    /// Sets the GPU's clock.
    pub fn set_clock(&mut self, now_ns: u64) {
        self.clock_ns = now_ns;
        for object in self.all.values().filter(|object| object.class == class::USERMODE) {
            if let Some(file) = &object.mapped_file {
                let _ = file.write_at(&now_ns.to_le_bytes(), CLOCK);
            }
        }
    }

    /// Returns the token that was written to the doorbell last.
    pub fn last_ring(&self) -> Option<u32> {
        let mut pages = self.all.values().filter(|object| object.class == class::USERMODE);
        let mut token = [0; 4];
        let file = pages.find_map(|object| object.mapped_file.as_ref())?;
        file.read_exact_at(&mut token, mdev_core::abi::doorbell::TOKEN).ok()?;
        Some(u32::from_le_bytes(token))
    }

    /// Adds a record to every context switch log.
    pub fn log_context_switch(&mut self, tag: u8, context: u32, process: u64, at_ns: u64) {
        const RECORD_BYTES: u64 = 32;
        let tag = u64::from(context) << 32 | u64::from(tag);
        let record = [0, tag, process, at_ns].map(u64::to_le_bytes).concat();
        let buffers = self.all.values_mut().filter(|object| object.class == class::EVENT_BUFFER);
        let mut logs = Vec::new();
        for buffer in buffers {
            let memory = buffer.uses.first_chunk::<2>();
            logs.extend(memory.map(|memory| (buffer.client, *memory, buffer.len)));
            buffer.len += 1;
        }
        for (client, [header, records], number) in logs {
            let file = |handle| {
                self.get(client, handle).ok().and_then(|memory| memory.mapped_file.as_ref())
            };
            if let (Some(header), Some(records)) = (file(header), file(records)) {
                let _ = records.write_at(&record, number * RECORD_BYTES);
                let _ = header.write_at(&(number as u32 + 1).to_le_bytes(), 4);
            }
        }
    }

    /// Returns the token of a channel.
    pub fn token(&self, client: u32, handle: u32) -> Result<u32, Refusal> {
        Ok(self.of_class(client, handle, host::CLASS)?.token)
    }
}

/// Returns whether objects of a class can be below objects of another class.
fn may_be_below(class: u32, parent: u32) -> bool {
    let expected = match class {
        class::OS_EVENT => return [class::SUBDEVICE, compute::CLASS].contains(&parent),
        class::DEVICE | class::EVENT_BUFFER => class::CLIENT,
        class::SUBDEVICE
        | class::VA_SPACE
        | class::VIRTUAL
        | class::OS_DESCRIPTOR
        | class::SYSTEM_MEMORY
        | class::VIDEO_MEMORY
        | class::DEBUGGER
        | class::GROUP => class::DEVICE,
        class::USERMODE => class::SUBDEVICE,
        host::CLASS | class::CONTEXT_SHARE => class::GROUP,
        copy::CLASS | compute::CLASS => host::CLASS,
        _ => return false,
    };
    parent == expected
}

/// Returns whether the fake GPU has an engine.
pub fn is_engine(number: u32) -> bool {
    number == engine::GRAPHICS || (engine::COPY0..engine::COPY0 + 5).contains(&number)
}

/// Returns whether the flags of a channel deny physical addresses and privileges. The driver also
/// accepts other flags.
pub fn denies_privileges(flags: u32) -> bool {
    flags & (flag::DENY_PHYSICAL | flag::DENY_PRIVILEGE)
        == flag::DENY_PHYSICAL | flag::DENY_PRIVILEGE
}
