//! Channels of a vGPU, and the channel groups that the GPU's runlists schedule.
//!
//! A VM's vGPU has one group for each engine, so all of its channels on an engine share one time
//! slice. In return, a fault of one channel makes the GPU tear down the whole group. CUDA programs
//! make groups of their own.

mod adoption;
mod channel;
mod create;
mod exceptions;
mod live;
mod pause;
mod restore;
mod scheduling;
mod teardown;
mod teardown_rate;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::mem::Mapping;
use mdev_core::abi::userd;
use mdev_core::gpu::{ChannelSpec, ChannelStatus, EngineKind, Exception, GpuError};
use mdev_core::ids::{ChannelId, SpaceId, Token};
use nvidia_rm::abi;
use nvidia_rm::numbers::{control, engine};
use nvidia_rm::rm_client::Object;

use self::adoption::LeftOver;
pub use self::adoption::Recorded;
use self::channel::Channel;
pub use self::live::{Counters, LiveChannel, LiveChannels};
pub use self::pause::{Pause, Resumption};
pub use self::restore::{Lookup, Origin, Replaced};
pub use self::teardown::{Running, Teardown};
use self::teardown_rate::TeardownRate;
use super::adoption::descriptors;
use super::adoption::journal::Journal;
use super::device::Device;
use super::doorbell_poller::{DoorbellPoller, Registration};
use super::error_notifier::Notifier;
use super::fault_backoff::FaultBackoff;
use super::usermode_page;
use super::wire::Load;

/// Channel group of one engine.
#[derive(Debug)]
struct Group {
    // Freed before the group.
    /// Selects the address space of the channels, in a compute group of a program.
    context_share: Option<Arc<Object>>,
    object: Arc<Object>,
    /// Address space of the channels.
    space: SpaceId,
    /// The group that a program made. None for the engine's own group.
    program: Option<u32>,
    engine: EngineKind,
    /// Number of the engine (`NV2080_ENGINE_TYPE_*`).
    engine_number: u32,
    number: u32,
    /// Time of creation, in nanoseconds of the GPU's clock.
    created_ns: u64,
    /// The group got a channel behind a closed gate, and is scheduled when the gate opens.
    must_schedule: bool,
    /// Number of rings for new entries when the group was last looked at.
    submissions: u64,
    /// When the group was last seen with work.
    busy_at: Option<Instant>,
    /// Time slice that this process has set.
    slice: Option<Duration>,
}

/// Channels of a vGPU.
#[derive(Debug)]
pub struct Channels {
    device: Arc<Device>,
    copy_engines: Vec<u32>,
    preempt_blocks: bool,
    /// Maximum number of channels.
    limit: u32,
    groups: Vec<Group>,
    last_group_number: u32,
    by_id: BTreeMap<ChannelId, Channel>,
    next_id: u32,
    free_notifiers: Vec<Arc<Notifier>>,
    /// Handles of all notifiers, by index.
    notifiers: Vec<u32>,
    timeslice: Option<Duration>,
    gate_open: bool,
    pause: Pause,
    /// Engines without work.
    idle: [bool; 2],
    /// Number of groups of each engine among which the vGPU's time slice is divided.
    sharing: [u32; 2],
    /// When the clocks were boosted for a while.
    boosted_at: Option<Instant>,
    /// The clocks are boosted until further notice.
    clocks_kept_up: bool,
    /// The GPU's usermode page.
    doorbell: Arc<Mapping>,
    /// Event of the driver for exceptions of all channels.
    exception_event: Arc<OwnedFd>,
    /// Exceptions that the driver has reported.
    reported: Vec<Exception>,
    /// Exceptions that were taken, and may not have been recorded by the caller.
    taken: Vec<Exception>,
    /// Rings for the guest, unless the guest has the doorbell page.
    poller: Option<Arc<DoorbellPoller>>,
    backoff: [FaultBackoff; 2],
    /// Rates of the destruction of channels that had work.
    teardowns: [TeardownRate; 2],
    /// What is left of channels that an earlier process was destroying.
    left_over: LeftOver,
    /// Records for the adopting process.
    journal: Arc<Journal>,
    /// Load of the GPU by other vGPUs, as last told.
    pub load: Load,
    /// Counters of the vGPU.
    pub counters: Counters,
}

/// Options of the channels.
#[derive(Clone, Debug)]
pub struct Options {
    /// Numbers of the copy engines, the fastest first.
    pub copy_engines: Vec<u32>,
    /// Preempt kernels at thread-block boundaries instead of waiting for their end.
    pub preempt_blocks: bool,
    /// Maximum number of channels.
    pub max_channels: u32,
    /// Event of the driver for exceptions of all channels.
    pub exception_event: Arc<OwnedFd>,
    /// Records for the adopting process.
    pub journal: Arc<Journal>,
}

impl Channels {
    /// Creates an empty set of channels. Opens all device nodes that are needed, since the sandbox
    /// hides the filesystem later.
    pub fn new(
        device: Arc<Device>,
        doorbell: Arc<Mapping>,
        poller: Option<Arc<DoorbellPoller>>,
        options: Options,
    ) -> Result<Self, GpuError> {
        let notifier = |index| Notifier::new(&device, descriptors::notifier(index)).map(Arc::new);
        let notifiers = (0..options.max_channels).map(notifier).collect::<Result<_, _>>()?;
        let channels = Self::with_notifiers(device, doorbell, poller, options, notifiers);
        channels.record_live(false);
        Ok(channels)
    }

    /// Creates an empty set of channels.
    fn with_notifiers(
        device: Arc<Device>,
        doorbell: Arc<Mapping>,
        poller: Option<Arc<DoorbellPoller>>,
        options: Options,
        notifiers: Vec<Arc<Notifier>>,
    ) -> Self {
        Self {
            notifiers: notifiers.iter().map(|notifier| notifier.memory.handle()).collect(),
            free_notifiers: notifiers,
            device,
            copy_engines: options.copy_engines,
            preempt_blocks: options.preempt_blocks,
            limit: options.max_channels,
            groups: Vec::new(),
            last_group_number: 0,
            by_id: BTreeMap::new(),
            next_id: 1,
            timeslice: None,
            gate_open: true,
            pause: Pause::None,
            idle: [false; 2],
            sharing: [1; 2],
            boosted_at: None,
            clocks_kept_up: false,
            doorbell,
            exception_event: options.exception_event,
            reported: Vec::new(),
            taken: Vec::new(),
            poller,
            backoff: [FaultBackoff::for_copies(), FaultBackoff::for_kernels()],
            teardowns: [TeardownRate::default(); 2],
            left_over: LeftOver::default(),
            journal: options.journal,
            load: Load::default(),
            counters: Counters::default(),
        }
    }

    /// Returns the handles of the error notifiers, by index.
    pub fn notifiers(&self) -> &[u32] {
        &self.notifiers
    }

    /// Returns the GPU's usermode page.
    pub fn doorbell(&self) -> Arc<Mapping> {
        self.doorbell.clone()
    }

    /// Returns the number of the fastest copy engine.
    pub fn copy_engine(&self) -> u32 {
        self.copy_engines.first().copied().unwrap_or(engine::COPY0)
    }

    /// Returns whether the guest rings the GPU's doorbell itself.
    pub fn has_direct_doorbell(&self) -> bool {
        self.poller.is_none()
    }

    /// Returns the number of channels.
    pub fn count(&self) -> u32 {
        self.by_id.len() as u32
    }

    /// Returns whether a channel of an engine has entries that the GPU has not fetched.
    pub fn has_queued(&self, engine: EngineKind) -> bool {
        let on_it = |channel: &&Channel| channel.engine == engine && channel.error == 0;
        self.by_id.values().filter(on_it).any(Channel::has_queued)
    }

    /// Returns `GP_GET` of each channel of an engine.
    pub fn gp_gets(&self, engine: EngineKind) -> Vec<(ChannelId, u32)> {
        let get = |channel: &Channel| channel.load_userd(userd::GP_GET).unwrap_or_default();
        let on_it = self.by_id.iter().filter(|(_, channel)| channel.engine == engine);
        on_it.map(|(id, channel)| (*id, get(channel))).collect()
    }

    /// Returns when the oldest group of an engine was created, in nanoseconds of the GPU's clock.
    /// None if channels of the engine never got work.
    pub fn in_use_since(&self, engine: EngineKind) -> Option<u64> {
        let of_engine = self.groups.iter().filter(|group| group.engine == engine);
        let in_use = of_engine.filter(|group| {
            let live = |channel: &&Channel| channel.group == group.number && channel.error == 0;
            self.by_id.values().filter(live).any(Channel::was_used)
        });
        in_use.map(|group| group.created_ns).min()
    }

    /// Returns whether programs have groups on the compute engine.
    pub fn compute_for_programs(&self) -> bool {
        let is_one = |group: &Group| group.program.is_some() && group.engine == EngineKind::Compute;
        self.groups.iter().any(is_one)
    }

    /// Returns whether a channel is one of several in a group of the compute engine.
    pub fn shares_compute_group(&self, id: ChannelId) -> bool {
        let computes =
            |channel: &Channel| channel.engine == EngineKind::Compute && channel.error == 0;
        self.by_id.get(&id).filter(|channel| computes(channel)).is_some_and(|channel| {
            let mut others = self.by_id.iter().filter(|(other, _)| **other != id);
            others.any(|(_, other)| other.group == channel.group && computes(other))
        })
    }

    /// Returns whether the vGPU ever had a channel.
    pub fn had_groups(&self) -> bool {
        self.last_group_number > 0
    }

    /// Returns whether any channel ever got work.
    pub fn were_used(&self) -> bool {
        self.by_id.values().any(Channel::was_used)
    }

    /// Returns the interrupt vectors of the channels as a bit mask.
    pub fn vectors(&self) -> u32 {
        self.by_id.values().fold(0, |all, channel| all | 1 << channel.vector)
    }

    /// Returns the number of the engine that a channel is for.
    fn engine_number(&self, spec: &ChannelSpec) -> u32 {
        if spec.engine == EngineKind::Compute {
            return engine::GRAPHICS;
        }
        let wanted = spec.placement.copy_engine.and_then(|n| engine::COPY0.checked_add(n));
        let found = self.copy_engines.iter().find(|number| Some(**number) == wanted);
        found.or(self.copy_engines.first()).copied().unwrap_or(engine::COPY0)
    }

    /// Rings for the selected channels that have entries.
    fn ring_queued(&self, which: impl Fn(&Channel) -> bool) {
        for channel in self.by_id.values() {
            let runs = channel.error == 0 && !channel.disabled;
            if runs && channel.has_queued() && which(channel) {
                self.ring(channel);
            }
        }
    }

    /// Rings again for all channels with entries, in case the GPU lost a ring.
    pub fn ring_again(&self) {
        self.ring_queued(|_| true);
    }

    /// Returns the status of a channel.
    pub fn query(&mut self, id: ChannelId) -> Result<ChannelStatus, GpuError> {
        self.note_errors();
        let channel = self.by_id.get(&id).ok_or(GpuError::NotFound("channel"))?;
        Ok(ChannelStatus {
            error: channel.error,
            error_info: channel.error_info,
            gp_get: channel.load_userd(userd::GP_GET).unwrap_or_default(),
            engine_ns: 0,
        })
    }

    /// Checks all notifiers. Returns whether another channel has faulted.
    pub fn note_errors(&mut self) -> bool {
        let mut faulted = Vec::new();
        for channel in self.by_id.values_mut().filter(|channel| channel.error == 0) {
            let Some(code) = channel.notifier.error() else { continue };
            channel.error = code;
            channel.error_info =
                channel.object().and_then(|object| fault_address(object)).unwrap_or(0);
            self.counters.faults += 1;
            faulted.push((channel.group, channel.engine, code));
        }
        for (number, engine, code) in &faulted {
            // The fault tears down the whole group, even if the driver has not reported all
            // channels yet.
            let others = self.by_id.values_mut().filter(|c| c.group == *number && c.error == 0);
            for channel in others {
                channel.error = *code;
                self.counters.faults += 1;
            }
            if let Some(at) = self.groups.iter().position(|group| group.number == *number) {
                self.groups.remove(at);
                self.count_fault(*engine);
            }
        }
        if !faulted.is_empty() {
            self.record_live(false);
        }
        !faulted.is_empty()
    }

    /// Counts a fault of an engine's group, which delays the creation of the next group.
    fn count_fault(&mut self, engine: EngineKind) {
        self.backoff[engine as usize].fault(Instant::now());
    }

    /// Returns the number of rings for channels of an engine.
    pub fn rings(&self, engine: EngineKind) -> u64 {
        self.registrations(engine).map(Registration::rings).sum()
    }

    /// Returns the number of rings for new entries of channels of an engine.
    pub fn submissions(&self, engine: EngineKind) -> u64 {
        self.registrations(engine).map(Registration::submissions).sum()
    }

    fn registrations(&self, engine: EngineKind) -> impl Iterator<Item = &Registration> {
        let on_it = self.by_id.values().filter(move |channel| channel.engine == engine);
        on_it.filter_map(|channel| channel.registration.as_ref())
    }

    /// Rings the doorbell for a channel.
    fn ring(&self, channel: &Channel) {
        match &channel.registration {
            Some(registration) => registration.ring(),
            None => usermode_page::ring(&self.doorbell, channel.gpu_token),
        }
    }

    /// Rings for a trapped doorbell write, if the token belongs to a channel with entries.
    pub fn ring_for(&self, token: Token) {
        let has_entries = |channel: &&Channel| channel.token == token && channel.has_queued();
        if let Some(channel) = self.by_id.values().find(has_entries) {
            self.ring(channel);
        }
    }
}

/// Returns the address of a channel's MMU fault.
fn fault_address(channel: &Object) -> Option<u64> {
    let mut params = abi::MmuFault::default();
    channel.control(control::MMU_FAULT, &mut params).ok()?;
    Some(u64::from(params.address_hi) << 32 | u64::from(params.address_lo))
}
