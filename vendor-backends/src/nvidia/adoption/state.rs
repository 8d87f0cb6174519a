//! State of a client that changes by requests only: its objects, memory and channels.
//!
//! A worker that a guest has compromised may have written it. Its values can harm that vGPU only:
//! the driver checks handles, and refuses what the client does not own. The checks here keep the
//! next worker's own view consistent.

use std::collections::BTreeSet;

use mdev_core::abi::control::VECTORS;
use mdev_core::gpu::{ChannelSpec, EngineKind, GpuError, Preamble};
use mdev_core::ids::{ChannelId, MemoryId, SpaceId, Token};
use nvidia_rm::numbers::engine;
use nvidia_rm::rm_client::FIRST_HANDLE;
use serde::{Deserialize, Serialize};

use super::DAMAGED;
use crate::nvidia::wire::{self, Grant, MAX_CHANNELS};

/// Limit of recorded mappings in all address spaces. A vGPU with more cannot be adopted.
pub const MAX_MAPPINGS: usize = 131_072;
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

/// What programs have, which follows [`ClientState`] while there is any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramsState {
    /// Video memory of their own, by id.
    pub allocations: Vec<AllocationState>,
    /// Mappings of regions for launches by kernels.
    pub regions: Vec<RegionState>,
    /// Groups that they have made.
    pub groups: Vec<ProgramGroup>,
    /// Channels in these groups, and others whose exceptions are watched.
    pub channels: Vec<ProgramChannel>,
}

/// Video memory of a program's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationState {
    /// Its id.
    pub id: MemoryId,
    /// The memory object.
    pub object: u32,
    /// Length in bytes.
    pub len: u64,
}

/// Mapping of a region for launches by kernels, or of a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionState {
    /// Address space.
    pub space: SpaceId,
    /// GPU virtual address.
    pub va: u64,
    /// Length in bytes.
    pub len: u64,
    /// The memory object.
    pub object: u32,
}

/// What a group of a program has besides [`GroupState`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramGroup {
    /// Its number.
    pub number: u32,
    /// Number by which the program names it.
    pub program: u32,
    /// The context share, in a compute group.
    pub share: Option<u32>,
}

/// What a channel of a program has besides [`ChannelState`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramChannel {
    /// Its id.
    pub id: ChannelId,
    /// It is in a group of a program.
    pub in_group: bool,
    /// The context share.
    pub share: Option<u32>,
    /// The debugger, and events with the numbers of their notifiers.
    pub watch: Option<(u32, Vec<(u32, u32)>)>,
}

impl ProgramsState {
    /// Returns the handles of all objects, those that are shared once.
    fn handles(&self) -> Vec<u32> {
        let Self { allocations, regions, groups, channels } = self;
        let shares = groups.iter().filter_map(|group| group.share);
        let shares = shares.chain(channels.iter().filter_map(|channel| channel.share));
        let regions = regions.iter().map(|region| region.object);
        let once: BTreeSet<u32> = shares.chain(regions).collect();
        let watches = channels.iter().filter_map(|channel| channel.watch.as_ref());
        let watches = watches.flat_map(|(debugger, events)| {
            events.iter().map(|(event, _)| *event).chain([*debugger])
        });
        let allocations = allocations.iter().map(|allocation| allocation.object);
        once.into_iter().chain(watches).chain(allocations).collect()
    }
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
    pub fn check(&self, programs: &ProgramsState) -> Result<(), GpuError> {
        if self.grant.version != wire::VERSION
            || !self.handles_are_valid(programs)
            || !self.memory.is_valid(programs)
            || !self.channels_are_valid()
            || !self.programs_are_valid(programs)
        {
            return Err(DAMAGED);
        }
        Ok(())
    }

    /// Returns whether all handles are those of different objects that this client has made.
    fn handles_are_valid(&self, programs: &ProgramsState) -> bool {
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
        all.extend(programs.handles());
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

impl ClientState {
    /// Checks what programs have, besides handles.
    fn programs_are_valid(&self, programs: &ProgramsState) -> bool {
        let ProgramsState { allocations, regions, groups, channels } = programs;
        let bytes = allocations.iter().try_fold(0_u64, |sum, one| sum.checked_add(one.len));
        let in_space =
            |region: &RegionState| self.memory.spaces.iter().any(|space| space.id == region.space);
        let known_group = |number: u32| self.channels.groups.iter().any(|it| it.number == number);
        let known_channel = |id: ChannelId| self.channels.channels.iter().any(|it| it.id == id);
        let is_import = |id: MemoryId| self.memory.imports.iter().any(|import| import.id == id);
        bytes.is_some_and(|bytes| bytes <= self.grant.spec.vram_bytes)
            && (allocations.is_empty() || self.memory.vram.is_none())
            && allocations.iter().all(|one| one.id.0 < self.memory.next_id && !is_import(one.id))
            && allocations.windows(2).all(|pair| pair[0].id < pair[1].id)
            && regions.len() <= MAX_MAPPINGS
            && regions.iter().all(in_space)
            && groups.iter().all(|group| known_group(group.number))
            && channels.iter().all(|channel| known_channel(channel.id))
            && channels.windows(2).all(|pair| pair[0].id < pair[1].id)
    }
}

impl MemoryState {
    /// Checks ids and counts. Ranges are checked when the memory is built.
    fn is_valid(&self, programs: &ProgramsState) -> bool {
        let Self { vram, next_id, next_space, spaces, imports } = self;
        let default = spaces.first().is_some_and(|space| space.id == SpaceId::DEFAULT);
        let ids = imports.iter().map(|import| import.id);
        let ids = ids.chain(programs.allocations.iter().map(|allocation| allocation.id));
        let ids: BTreeSet<MemoryId> = ids.collect();
        let known =
            |memory: Option<MemoryId>| memory.map_or(vram.is_some(), |id| ids.contains(&id));
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
