//! A vGPU's channels and the groups that the GPU's runlists schedule: one group for each engine.
//!
//! All channels of a vGPU on one engine share a group and thereby its time slice, however many they are. The price is
//! that they also share its fate: the GPU tears down a group as a whole when one of its channels faults.

mod channel;
mod end;
mod make;
mod time;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mdev_core::abi::userd;
use mdev_core::gpu::{ChannelStatus, EngineKind, GpuError};
use mdev_core::ids::{ChannelId, Token};

use self::channel::Channel;
pub use self::channel::Notifier;
use super::backoff::Backoff;
use super::bells::{self, Bells};
use super::device::Device;
use super::rm::RmError;
use super::session::{AddressSpace, Object};
use super::sys::abi;
use super::sys::numbers::{control, engine};
use crate::mem::Mapping;

#[derive(Debug)]
struct Group {
    object: Arc<Object>,
    engine: EngineKind,
    number: u32,
    /// When, by the GPU's clock.
    made_ns: u64,
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Channels that faulted, those that were reset among them.
    pub faults: u64,
    /// Groups that were reset because they hung.
    pub hang_resets: u64,
    /// Times the gate was closed.
    pub gate_closings: u64,
}

/// The channels of one vGPU.
#[derive(Debug)]
pub struct Channels {
    device: Arc<Device>,
    space: Arc<AddressSpace>,
    copy_engine: u32,
    preempt_blocks: bool,
    most: u32,
    groups: Vec<Group>,
    group_number: u32,
    all: BTreeMap<ChannelId, Channel>,
    next: u32,
    notifiers: Vec<Arc<Notifier>>,
    slice: Option<Duration>,
    open: bool,
    /// Engines on which there is nothing to do.
    idle: [bool; 2],
    boosted: Option<Instant>,
    /// The doorbell page.
    doorbell: Arc<Mapping>,
    /// Who rings it for the guest, unless that does.
    bells: Option<Arc<Bells>>,
    backoff: [Backoff; 2],
    /// What was counted.
    pub counters: Counters,
}

/// What channels are made with.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Which engine copies.
    pub copy_engine: u32,
    /// Preempt compute between thread blocks instead of waiting for a kernel's end.
    pub preempt_blocks: bool,
    /// Channels at a time.
    pub max_channels: u32,
}

impl Channels {
    /// None yet. Everything that needs a device node is opened here: later there is no filesystem.
    pub fn new(
        device: Arc<Device>,
        space: Arc<AddressSpace>,
        doorbell: Arc<Mapping>,
        bells: Option<Arc<Bells>>,
        options: Options,
    ) -> Result<Self, GpuError> {
        let notifiers = (0..options.max_channels).map(|_| Notifier::new(&device).map(Arc::new));
        Ok(Self {
            notifiers: notifiers.collect::<Result<_, _>>()?,
            device,
            space,
            copy_engine: options.copy_engine,
            preempt_blocks: options.preempt_blocks,
            most: options.max_channels,
            groups: Vec::new(),
            group_number: 0,
            all: BTreeMap::new(),
            next: 1,
            slice: None,
            open: true,
            idle: [false; 2],
            boosted: None,
            doorbell,
            bells,
            backoff: [Backoff::for_copies(), Backoff::for_kernels()],
            counters: Counters::default(),
        })
    }

    /// Channels that exist.
    pub fn count(&self) -> u32 {
        self.all.len() as u32
    }

    /// Whether any on that engine has work that the GPU has not fetched.
    pub fn has_queued(&self, engine: EngineKind) -> bool {
        let on_it = |channel: &&Channel| channel.engine == engine && channel.error == 0;
        self.all.values().filter(on_it).any(Channel::has_queued)
    }

    /// Entries that were fetched since a channel was made, modulo its ring: what progress looks like from outside.
    pub fn progress(&self, engine: EngineKind) -> Vec<(ChannelId, u32)> {
        let get = |channel: &Channel| channel.word(userd::GP_GET).unwrap_or_default();
        let on_it = self.all.iter().filter(|(_, channel)| channel.engine == engine);
        on_it.map(|(id, channel)| (*id, get(channel))).collect()
    }

    /// Since when, by the GPU's clock, there is a group on that engine whose channels were given work.
    pub fn in_use_since(&self, engine: EngineKind) -> Option<u64> {
        let group = self.groups.iter().find(|group| group.engine == engine)?;
        let of_it = |channel: &&Channel| channel.group == group.number && channel.error == 0;
        self.all.values().filter(of_it).any(Channel::was_used).then_some(group.made_ns)
    }

    /// Whether any was ever given work.
    pub fn were_used(&self) -> bool {
        self.all.values().any(Channel::was_used)
    }

    /// Interrupt vectors that channels use, as bits.
    pub fn vectors(&self) -> u32 {
        self.all.values().fold(0, |all, channel| all | 1 << channel.vector)
    }

    fn engine_number(&self, engine: EngineKind) -> u32 {
        match engine {
            EngineKind::Copy => self.copy_engine,
            EngineKind::Compute => engine::GRAPHICS,
        }
    }

    fn ring_queued(&self, which: impl Fn(&Channel) -> bool) {
        for channel in self.all.values() {
            let runs = channel.error == 0 && !channel.disabled;
            if runs && channel.has_queued() && which(channel) {
                self.ring(channel.token);
            }
        }
    }

    /// Rings for every channel that has entries which nobody fetches: a ring was lost.
    pub fn ring_again(&self) {
        self.ring_queued(|_| true);
    }

    /// How a channel is.
    pub fn query(&mut self, id: ChannelId) -> Result<ChannelStatus, GpuError> {
        self.note_errors();
        let channel = self.all.get(&id).ok_or(GpuError::NotFound("channel"))?;
        Ok(ChannelStatus {
            error: channel.error,
            error_info: channel.error_info,
            gp_get: channel.word(userd::GP_GET).unwrap_or_default(),
            engine_ns: 0,
        })
    }

    /// Looks at all notifiers; true where a channel has faulted that had not.
    pub fn note_errors(&mut self) -> bool {
        let mut faulted = Vec::new();
        for channel in self.all.values_mut().filter(|channel| channel.error == 0) {
            let Some(code) = channel.notifier.error() else { continue };
            channel.error = code;
            channel.error_info = channel.object().and_then(|object| fault(object)).unwrap_or(0);
            self.counters.faults += 1;
            faulted.push((channel.group, channel.engine, code));
        }
        for (number, engine, code) in &faulted {
            // The others of the group are gone with it, whether or not the driver has said so yet.
            let others = self.all.values_mut().filter(|c| c.group == *number && c.error == 0);
            for channel in others {
                channel.error = *code;
                self.counters.faults += 1;
            }
            if let Some(at) = self.groups.iter().position(|group| group.number == *number) {
                self.groups.remove(at);
                self.backoff[*engine as usize].fault(Instant::now());
            }
        }
        !faulted.is_empty()
    }

    /// Rings the doorbell for a channel.
    fn ring(&self, token: Token) {
        bells::ring(&self.doorbell, token);
    }

    /// Rings for a guest, whose doorbell was trapped: for its own channels only, and where there is something to fetch.
    pub fn ring_for(&self, token: Token) {
        if self.all.values().any(|channel| channel.token == token && channel.has_queued()) {
            self.ring(token);
        }
    }
}

/// Where a channel faulted.
fn fault(channel: &Object) -> Option<u64> {
    let mut params = abi::MmuFault::default();
    channel.control(control::MMU_FAULT, &mut params).ok()?;
    Some(u64::from(params.address_hi) << 32 | u64::from(params.address_lo))
}

fn schedule(device: &Device, group: &Object) -> Result<(), RmError> {
    let mut enable = [1u8, 0, 0];
    let bytes = device.session.layout().schedule;
    group.control_bytes(control::SCHEDULE, &mut enable[..bytes])
}
