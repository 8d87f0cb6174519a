//! State of a client that changes by requests only: its objects, memory and channels.
//!
//! A worker that a guest has taken over may have written it. Its values can harm that vGPU only: the
//! driver checks handles, and refuses what the client does not own. The checks here keep the next
//! worker's own view consistent.

use std::collections::BTreeSet;

use mdev_core::abi::control::VECTORS;
use mdev_core::gpu::{ChannelSpec, EngineKind, GpuError, Preamble};
use mdev_core::ids::{ChannelId, MemoryId, SpaceId, Token};
use serde::{Deserialize, Serialize};

use super::DAMAGED;
use crate::nvidia::device::MAX_CHANNELS;
use crate::nvidia::rm_client::FIRST_HANDLE;
use crate::nvidia::sys::numbers::engine;
use crate::nvidia::wire::{self, Grant};

/// Limit of recorded mappings in all address spaces. A vGPU with more cannot be continued.
pub const MAX_MAPPINGS: usize = 8192;
/// Limit of recorded imports: each keeps a descriptor.
pub const MAX_IMPORTS: usize = 1024;

/// State of a client. Handles are those of the driver's objects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientState {
    /// What the manager has granted.
    pub grant: Grant,
    /// Version of the driver.
    pub driver: String,
    /// Process that made the client, which records of the context switch log name.
    pub process: u32,
    /// The client.
    pub root: u32,
    /// Handle of the next object.
    pub next_handle: u32,
    /// Objects that the client has from the start.
    pub fixed: FixedObjects,
    /// Memory.
    pub memory: MemoryState,
    /// Channels.
    pub channels: ChannelsState,
}

/// Objects that a client has from the start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "named as the objects are")]
pub struct FixedObjects {
    pub device: u32,
    pub subdevice: u32,
    pub usermode: u32,
    /// Events for faults and interrupts.
    pub events: [u32; 2],
    /// Numbers of the copy engines, the fastest first.
    pub copy_engines: Vec<u32>,
    /// Error notifiers, by index.
    pub notifiers: Vec<u32>,
    pub log: Option<LogObjects>,
    pub probe: Option<ProbeObjects>,
}

/// Objects of the context switch log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "named as the objects are")]
pub struct LogObjects {
    pub buffer: u32,
    pub header: u32,
    pub records: u32,
}

/// Objects of the switch probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "named as the objects are")]
pub struct ProbeObjects {
    pub space: u32,
    pub range: u32,
    pub memory: u32,
    pub notifier: u32,
    pub group: u32,
    pub channel: u32,
    pub class: u32,
    pub token: Token,
}

/// Memory of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryState {
    /// The partition of video memory, if it is there.
    pub vram: Option<u32>,
    /// Id of the next import or allocation.
    pub next_id: u32,
    /// Id of the next address space.
    pub next_space: u32,
    /// Address spaces, the default one first.
    pub spaces: Vec<SpaceState>,
    /// Imported guest memory.
    pub imports: Vec<ImportState>,
}

/// Address space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceState {
    /// Its id.
    pub id: SpaceId,
    /// Page tables.
    pub space: u32,
    /// Range that contains all addresses.
    pub range: u32,
    /// Mappings, by address.
    pub mappings: Vec<MappingState>,
}

/// Mapping in an address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappingState {
    /// GPU virtual address.
    pub va: u64,
    /// Length in bytes.
    pub len: u64,
    /// The import, or the partition of video memory.
    pub memory: Option<MemoryId>,
    /// Offset in the memory, in bytes.
    pub offset: u64,
    /// False if the GPU may only read the memory.
    pub writable: bool,
}

/// Imported guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportState {
    /// Its id.
    pub id: MemoryId,
    /// The memory object.
    pub object: u32,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Channels of a client, with their groups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelsState {
    /// Id of the next channel.
    pub next_id: u32,
    /// Number of the last group.
    pub last_group: u32,
    /// Groups.
    pub groups: Vec<GroupState>,
    /// Channels, by id.
    pub channels: Vec<ChannelState>,
}

/// Channel group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupState {
    /// Its number.
    pub number: u32,
    /// The group object.
    pub object: u32,
    /// Address space of the channels.
    pub space: SpaceId,
    /// Engine.
    pub engine: EngineKind,
    /// Number of the engine (`NV2080_ENGINE_TYPE_*`).
    pub engine_number: u32,
    /// Time of creation, in nanoseconds of the GPU's clock.
    pub created_ns: u64,
}

/// Channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelState {
    /// Its id.
    pub id: ChannelId,
    /// The channel object, then its classes. Empty after a teardown.
    pub objects: Vec<u32>,
    /// The group object, if there is one.
    pub group_object: Option<u32>,
    /// Number of the group.
    pub group: u32,
    /// Parameters, without the preamble.
    pub spec: ChannelSpec,
    /// Preamble.
    pub preamble: Option<Preamble>,
    /// Number of the engine (`NV2080_ENGINE_TYPE_*`).
    pub engine_number: u32,
    /// Token that the guest rings.
    pub token: Token,
    /// Token of the GPU.
    pub gpu_token: Token,
    /// USERD: an import or the partition, and the offset in it. None after a teardown.
    pub userd: Option<(Option<MemoryId>, u64)>,
    /// Index of the error notifier.
    pub notifier: u32,
}

impl ClientState {
    /// Checks the state as far as the driver does not.
    pub fn check(&self) -> Result<(), GpuError> {
        if self.grant.version != wire::VERSION
            || !self.handles_are_valid()
            || !self.memory.is_valid()
            || !self.channels_are_valid()
        {
            return Err(DAMAGED);
        }
        Ok(())
    }

    /// Returns whether all handles are those of different objects that this client has made.
    fn handles_are_valid(&self) -> bool {
        let FixedObjects { device, subdevice, usermode, events, notifiers, log, probe, .. } =
            &self.fixed;
        let mut all = vec![*device, *subdevice, *usermode];
        all.extend(events.iter().chain(notifiers));
        all.extend(log.iter().flat_map(|log| [log.buffer, log.header, log.records]));
        all.extend(probe.iter().flat_map(|probe| {
            let ProbeObjects { space, range, memory, notifier, group, channel, class, .. } = *probe;
            [space, range, memory, notifier, group, channel, class]
        }));
        all.extend(self.memory.vram);
        all.extend(self.memory.spaces.iter().flat_map(|space| [space.space, space.range]));
        all.extend(self.memory.imports.iter().map(|import| import.object));
        all.extend(self.channels.channels.iter().flat_map(|channel| &channel.objects));
        let groups = self.channels.groups.iter().map(|group| (group.number, group.object));
        let lost = self.channels.channels.iter();
        let lost = lost.filter_map(|channel| Some((channel.group, channel.group_object?)));
        let groups: BTreeSet<(u32, u32)> = groups.chain(lost).collect();
        all.extend(groups.iter().map(|(_, object)| object));
        let distinct: BTreeSet<u32> = all.iter().copied().collect();
        let made = FIRST_HANDLE..self.next_handle;
        distinct.len() == all.len() && distinct.iter().all(|handle| made.contains(handle))
    }

    fn channels_are_valid(&self) -> bool {
        let ChannelsState { next_id, last_group, groups, channels } = &self.channels;
        let limit = self.grant.spec.max_channels.min(MAX_CHANNELS) as usize;
        let FixedObjects { notifiers, copy_engines, .. } = &self.fixed;
        let runs_on = |kind: EngineKind, number: u32| match kind {
            EngineKind::Compute => number == engine::GRAPHICS,
            EngineKind::Copy => copy_engines.contains(&number) || number == engine::COPY0,
        };
        let has_space = |id: SpaceId| self.memory.spaces.iter().any(|space| space.id == id);
        let numbers: BTreeSet<u32> = groups.iter().map(|group| group.number).collect();
        let used: BTreeSet<u32> = channels.iter().map(|channel| channel.notifier).collect();
        let is_group = |group: &GroupState| {
            group.number <= *last_group
                && has_space(group.space)
                && runs_on(group.engine, group.engine_number)
        };
        let is_channel = |channel: &ChannelState| {
            channel.id.0 < *next_id
                && channel.group <= *last_group
                && (channel.notifier as usize) < notifiers.len()
                && channel.spec.vector < VECTORS
                && channel.objects.is_empty() == channel.group_object.is_none()
                && channel.objects.len() <= 3
                && has_space(channel.spec.space)
                && runs_on(channel.spec.engine, channel.engine_number)
        };
        channels.len() <= limit
            && notifiers.len() == limit
            && copy_engines.len() <= engine::COPY_ENGINES as usize
            && numbers.len() == groups.len()
            && used.len() == channels.len()
            && groups.iter().all(is_group)
            && channels.iter().all(is_channel)
            && channels.windows(2).all(|pair| pair[0].id < pair[1].id)
    }
}

impl MemoryState {
    /// Checks ids and counts. Ranges are checked when the memory is built.
    fn is_valid(&self) -> bool {
        let Self { vram, next_id, next_space, spaces, imports } = self;
        let default = spaces.first().is_some_and(|space| space.id == SpaceId::DEFAULT);
        let known = |memory: Option<MemoryId>| match memory {
            Some(id) => imports.iter().any(|import| import.id == id),
            None => vram.is_some(),
        };
        let mappings = || spaces.iter().flat_map(|space| &space.mappings);
        default
            && spaces.windows(2).all(|pair| pair[0].id < pair[1].id)
            && spaces.iter().all(|space| space.id.0 < *next_space)
            && imports.len() <= MAX_IMPORTS
            && imports.windows(2).all(|pair| pair[0].id < pair[1].id)
            && imports.iter().all(|import| import.id.0 < *next_id)
            && mappings().count() <= MAX_MAPPINGS
            && mappings().all(|mapping| known(mapping.memory))
    }
}
