//! The tree of objects, and what may hang where.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use mdev_core::abi::{compute, copy, host};

use crate::nvidia::sys::numbers::{class, engine, flag, status};

/// Where the GPU's clock is in its usermode page.
pub const CLOCK: u64 = 0x80;

/// A status of the driver's, when it is not a good one.
pub type Refusal = u32;

#[derive(Debug, Default)]
pub struct Object {
    pub client: u32,
    pub parent: u32,
    pub class: u32,
    /// Of memory, in bytes.
    pub len: u64,
    /// Memory that user space may only read.
    pub read_only: bool,
    /// Of a group or channel.
    pub engine: u32,
    /// Of a channel.
    pub token: u32,
    pub scheduled: bool,
    /// Of a group, in microseconds.
    pub slice_us: u64,
    /// Memory, address spaces and so on that it needs for as long as it exists.
    pub uses: Vec<u32>,
    /// What was mapped of it: for a notifier, where errors go.
    pub view: Option<File>,
    pub faulted: bool,
    /// How often a channel was disabled and not enabled again.
    pub disabled: u32,
}

#[derive(Debug)]
pub struct Mapping {
    pub client: u32,
    pub space: u32,
    pub memory: u32,
    pub va: u64,
    pub len: u64,
}

#[derive(Debug, Default)]
pub struct Objects {
    all: BTreeMap<(u32, u32), Object>,
    mappings: Vec<Mapping>,
    clients: u32,
    tokens: u32,
    pub violations: Vec<String>,
    /// What the GPU's clock says.
    pub clock_ns: u64,
}

impl Objects {
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// A new client's handle.
    pub fn new_client(&mut self) -> u32 {
        self.clients += 1;
        let handle = 0xc1d0_0000 + self.clients;
        let root = Object { client: handle, class: class::CLIENT, ..Default::default() };
        self.all.insert((handle, handle), root);
        handle
    }

    pub fn get(&self, client: u32, handle: u32) -> Result<&Object, Refusal> {
        self.all.get(&(client, handle)).ok_or(status::OBJECT_NOT_FOUND)
    }

    pub fn get_mut(&mut self, client: u32, handle: u32) -> Result<&mut Object, Refusal> {
        self.all.get_mut(&(client, handle)).ok_or(status::OBJECT_NOT_FOUND)
    }

    /// One of that class, or why not.
    pub fn of_class(&self, client: u32, handle: u32, class: u32) -> Result<&Object, Refusal> {
        let object = self.get(client, handle).map_err(|_| status::INVALID_OBJECT_HANDLE)?;
        if object.class == class { Ok(object) } else { Err(status::INVALID_OBJECT_HANDLE) }
    }

    /// Video memory that is taken.
    pub fn video_memory(&self) -> u64 {
        let of_it = |object: &&Object| object.class == class::VIDEO_MEMORY;
        self.all.values().filter(of_it).map(|object| object.len).sum()
    }

    pub fn insert(&mut self, handle: u32, mut object: Object) -> Result<(), Refusal> {
        let parent =
            self.get(object.client, object.parent).map_err(|_| status::INVALID_OBJECT_PARENT)?;
        if parent_class(object.class).is_none_or(|class| class != parent.class) {
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

    /// Frees an object and everything below it.
    pub fn free(&mut self, client: u32, handle: u32) -> Result<(), Refusal> {
        self.get(client, handle)?;
        let mut gone = vec![handle];
        let mut at = 0;
        while let Some(parent) = gone.get(at).copied() {
            let below = self.all.iter().filter(|((owner, own), object)| {
                *owner == client && object.parent == parent && *own != parent
            });
            gone.extend(below.map(|((_, own), _)| *own));
            at += 1;
        }
        for freed in &gone {
            for ((owner, own), object) in &self.all {
                if *owner == client && object.uses.contains(freed) && !gone.contains(own) {
                    let line = format!(
                        "{freed:#x} was freed while {own:#x} ({:#x}) uses it",
                        object.class
                    );
                    self.violations.push(line);
                }
            }
            if handle != client
                && self.mappings.iter().any(|m| m.client == client && m.memory == *freed)
            {
                self.violations.push(format!("{freed:#x} was freed while it is mapped"));
            }
        }
        self.all.retain(|(owner, own), _| *owner != client || !gone.contains(own));
        self.mappings.retain(|mapping| {
            mapping.client != client
                || !gone.contains(&mapping.memory) && !gone.contains(&mapping.space)
        });
        Ok(())
    }

    pub fn map(&mut self, mapping: Mapping) -> Result<(), Refusal> {
        let memory = self.get(mapping.client, mapping.memory)?;
        self.of_class(mapping.client, mapping.space, class::VIRTUAL)?;
        let end = mapping.va.checked_add(mapping.len).ok_or(status::INVALID_ARGUMENT)?;
        if mapping.len == 0
            || mapping.len > memory.len
            || !(mapping.va | mapping.len).is_multiple_of(4096)
        {
            return Err(status::INVALID_ARGUMENT);
        }
        let overlaps = self.mappings.iter().any(|other| {
            (other.client, other.space) == (mapping.client, mapping.space)
                && other.va < end
                && mapping.va < other.va + other.len
        });
        // The first 4 GiB are the driver's own.
        if overlaps || mapping.va < 4 << 30 {
            return Err(status::NO_MEMORY);
        }
        self.mappings.push(mapping);
        Ok(())
    }

    pub fn unmap(
        &mut self,
        client: u32,
        space: u32,
        memory: u32,
        va: u64,
        size: u64,
    ) -> Result<(), Refusal> {
        let same = |m: &Mapping| (m.client, m.space, m.memory) == (client, space, memory);
        let inside = |m: &Mapping| {
            if size == 0 { m.va == va } else { m.va <= va && va + size <= m.va + m.len }
        };
        let found = self.mappings.iter().position(|m| same(m) && inside(m));
        let mapping = self.mappings.swap_remove(found.ok_or(status::OBJECT_NOT_FOUND)?);
        let past = if size == 0 { mapping.va + mapping.len } else { va + size };
        for (start, end) in [(mapping.va, va), (past, mapping.va + mapping.len)] {
            if start < end {
                self.mappings.push(Mapping { client, space, memory, va: start, len: end - start });
            }
        }
        Ok(())
    }

    /// Reports an error on a channel and on those of its group.
    pub fn fault(&mut self, token: u32, code: u32) {
        let group = |object: &Object| (object.client, object.parent);
        let Some(group_of_it) = self.all.values().find(|o| o.token == token).map(group) else {
            return;
        };
        let mut told = Vec::new();
        for object in self.all.values_mut() {
            if object.class == host::CLASS && group(object) == group_of_it {
                object.faulted = true;
                told.extend(object.uses.first().map(|notifier| (object.client, *notifier)));
            }
        }
        for (client, notifier) in told {
            if let Ok(Object { view: Some(view), .. }) = self.get(client, notifier) {
                let words = [code.to_le_bytes(), 0xffff_0000u32.to_le_bytes()].concat();
                // A file of the test's own memory.
                let _ = view.write_at(&words, 8);
            }
        }
    }

    /// Disables or enables a channel: each time counts.
    pub fn disable(&mut self, client: u32, handle: u32, disable: bool) -> Result<(), Refusal> {
        self.token(client, handle)?;
        let channel = self.get_mut(client, handle)?;
        match channel.disabled.checked_add_signed(if disable { 1 } else { -1 }) {
            Some(disabled) => channel.disabled = disabled,
            None => self.violations.push(format!("{handle:#x} was enabled and is not disabled")),
        }
        Ok(())
    }

    /// Whether a channel of that group has the compute class.
    pub fn computes(&self, client: u32, group: u32) -> bool {
        let classes = self.all.values().filter(|o| o.client == client && o.class == compute::CLASS);
        classes
            .map(|o| self.get(client, o.parent))
            .any(|channel| channel.is_ok_and(|c| c.parent == group))
    }

    fn of_token(&self, token: u32) -> Option<&Object> {
        self.all.values().find(|object| object.class == host::CLASS && object.token == token)
    }

    /// Whether the channel with that token may run.
    pub fn may_run(&self, token: u32) -> bool {
        self.of_token(token).is_some_and(|channel| channel.disabled == 0)
    }

    /// The slice of the group that the channel with that token is in, in microseconds.
    pub fn slice_us(&self, token: u32) -> Option<u64> {
        let channel = self.of_token(token)?;
        Some(self.get(channel.client, channel.parent).ok()?.slice_us)
    }

    /// Lets the GPU's clock say `now_ns`.
    pub fn set_clock(&mut self, now_ns: u64) {
        self.clock_ns = now_ns;
        for object in self.all.values().filter(|object| object.class == class::USERMODE) {
            if let Some(view) = &object.view {
                let _ = view.write_at(&now_ns.to_le_bytes(), CLOCK);
            }
        }
    }

    /// The token that was last written to a doorbell.
    pub fn last_bell(&self) -> Option<u32> {
        let mut pages = self.all.values().filter(|object| object.class == class::USERMODE);
        let mut token = [0; 4];
        let view = pages.find_map(|object| object.view.as_ref())?;
        view.read_exact_at(&mut token, mdev_core::abi::doorbell::TOKEN).ok()?;
        Some(u32::from_le_bytes(token))
    }

    /// Adds a record to every log of switches.
    pub fn log_switch(&mut self, tag: u8, process: u64, at_ns: u64) {
        const RECORD_BYTES: u64 = 32;
        let record = [0, u64::from(tag), process, at_ns].map(u64::to_le_bytes).concat();
        let logs = self.all.values_mut().filter(|object| object.class == class::EVENT_BUFFER);
        let mut places = Vec::new();
        for log in logs {
            places
                .extend(log.uses.first_chunk().map(|uses: &[u32; 2]| (log.client, *uses, log.len)));
            log.len += 1;
        }
        for (client, [header, records], number) in places {
            let view =
                |handle| self.get(client, handle).ok().and_then(|memory| memory.view.as_ref());
            if let (Some(header), Some(records)) = (view(header), view(records)) {
                let _ = records.write_at(&record, number * RECORD_BYTES);
                let _ = header.write_at(&(number as u32 + 1).to_le_bytes(), 4);
            }
        }
    }

    /// The token of a channel.
    pub fn token(&self, client: u32, handle: u32) -> Result<u32, Refusal> {
        Ok(self.of_class(client, handle, host::CLASS)?.token)
    }
}

/// Below what an object of that class may be made.
fn parent_class(of: u32) -> Option<u32> {
    Some(match of {
        class::DEVICE | class::EVENT_BUFFER => class::CLIENT,
        class::SUBDEVICE
        | class::VA_SPACE
        | class::VIRTUAL
        | class::OS_DESCRIPTOR
        | class::SYSTEM_MEMORY
        | class::VIDEO_MEMORY
        | class::GROUP => class::DEVICE,
        class::USERMODE | class::OS_EVENT => class::SUBDEVICE,
        host::CLASS => class::GROUP,
        copy::CLASS | compute::CLASS => host::CLASS,
        _ => return None,
    })
}

/// Whether there is such an engine.
pub fn is_engine(number: u32) -> bool {
    number == engine::GRAPHICS || (engine::COPY0..engine::COPY0 + 5).contains(&number)
}

/// What a channel must have been made with: the driver takes others, and we do not.
pub fn is_harmless(flags: u32) -> bool {
    flags & (flag::DENY_PHYSICAL | flag::DENY_PRIVILEGE)
        == flag::DENY_PHYSICAL | flag::DENY_PRIVILEGE
}
