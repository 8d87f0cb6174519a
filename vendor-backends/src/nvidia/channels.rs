//! A vGPU's channels and the groups that the GPU's runlists schedule: one group for each engine.
//!
//! All channels of a vGPU on one engine share a group and thereby its time slice, however many they are. The price is
//! that they also share its fate: the GPU tears down a group as a whole when one of its channels faults.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mdev_core::abi::mailbox::{MAX_GPFIFO_ENTRIES, VA_END, VA_START};
use mdev_core::abi::{compute, control::VECTORS, copy, host, notifier, userd};
use mdev_core::gpu::{ChannelHandle, ChannelSpec, ChannelStatus, EngineKind, GpuError};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, Token};
use mdev_core::units::is_aligned;
use zerocopy::IntoBytes;

use super::backoff::Backoff;
use super::bells::{self, Bells, Watched};
use super::device::Device;
use super::memory::Place;
use super::rm::{Node, RmError};
use super::session::{AddressSpace, Object};
use super::sys::abi::{self, notification};
use super::sys::numbers::{class, control, engine, flag};
use super::trace;
use crate::mem::Mapping;

/// Slices that the driver takes.
const SLICE_US: (u128, u128) = (50, 100_000_000);

/// The slice of a group that has nothing to do.
const IDLE_SLICE: Duration = Duration::from_micros(50);

/// How long a boost of the clocks is asked for.
const BOOST: Duration = Duration::from_secs(10);

/// Where the driver reports a channel's error: a page of the host's memory that no guest sees.
#[derive(Debug)]
pub struct Notifier {
    view: Arc<Mapping>,
    memory: Arc<Object>,
}

impl Notifier {
    /// A page for one channel at a time.
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        let bytes = mdev_core::units::PAGE_SIZE;
        let memory = device.system_memory(bytes, false)?;
        let session = &device.session;
        let fd = session.aperture(&device.device, &memory, Node::Control, bytes, 0)?;
        let view = Mapping::new(std::os::fd::AsFd::as_fd(&fd), 0, bytes, true)?;
        Ok(Self { view, memory })
    }

    fn clear(&self) {
        for word in (0..16).step_by(4) {
            let _ = self.view.store_u32(word, 0);
        }
    }

    /// The robust-channel code, once there is one.
    fn error(&self) -> Option<u32> {
        let status = self.view.load_u32(notification::STATUS_WORD)? >> 16;
        if status == 0 {
            return None;
        }
        // An error without a number is an error all the same.
        Some(self.view.load_u32(notification::INFO32)?.max(1))
    }
}

#[derive(Debug)]
struct Group {
    object: Arc<Object>,
    engine: EngineKind,
    number: u32,
    /// When, by the GPU's clock.
    made_ns: u64,
}

#[derive(Debug)]
struct Channel {
    /// Rung for, where a guest does not ring itself.
    watched: Option<Watched>,
    /// Its classes, then itself: none once it was torn down.
    objects: Vec<Arc<Object>>,
    engine: EngineKind,
    /// Which of the groups that this engine had.
    group: u32,
    token: Token,
    vector: u32,
    userd: Option<Place>,
    notifier: Arc<Notifier>,
    error: u32,
    error_info: u64,
    /// Kept from running. Each time takes an enabling of its own.
    disabled: bool,
}

impl Channel {
    fn object(&self) -> Option<&Arc<Object>> {
        self.objects.first()
    }

    fn word(&self, offset: u64) -> Option<u32> {
        let place = self.userd.as_ref()?;
        place.view.as_ref()?.load_u32(place.offset + offset)
    }

    /// Frees it, its classes first.
    fn tear_down(&mut self) {
        self.watched = None;
        while self.objects.pop().is_some() {}
        self.userd = None;
    }

    /// Entries that the GPU has not fetched; unknown counts as some.
    fn has_queued(&self) -> bool {
        match (self.word(userd::GP_GET), self.word(userd::GP_PUT)) {
            (Some(get), Some(put)) => get != put,
            _ => true,
        }
    }

    /// Whether it was ever given work.
    fn was_used(&self) -> bool {
        self.word(userd::GP_PUT) != Some(0)
    }

    /// Whether the GPU may be at work for it.
    fn may_run(&self, running: [bool; 2]) -> bool {
        self.has_queued() || self.was_used() && running[self.engine as usize]
    }
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

    fn check(&self, spec: &ChannelSpec) -> Result<(), GpuError> {
        let GpuVa(ring) = spec.gpfifo;
        let entries = spec.gpfifo_entries;
        if !entries.is_power_of_two() || !(2..=MAX_GPFIFO_ENTRIES).contains(&entries) {
            return Err(GpuError::Invalid("a GPFIFO has 2 to 65536 entries, a power of two"));
        }
        if !is_aligned(ring, host::GP_ENTRY_BYTES) {
            return Err(GpuError::Invalid("a GPFIFO is 8-byte aligned"));
        }
        if spec.vector >= VECTORS {
            return Err(GpuError::Invalid("no such interrupt vector"));
        }
        let end = ring.checked_add(u64::from(entries) * host::GP_ENTRY_BYTES);
        if ring < VA_START || end.is_none_or(|end| end > VA_END) {
            return Err(GpuError::OutOfRange("GPFIFO"));
        }
        if self.count() >= self.most {
            return Err(GpuError::Limit("channels"));
        }
        Ok(())
    }

    /// Makes a channel and schedules it.
    pub fn create(&mut self, spec: &ChannelSpec, userd: Place) -> Result<ChannelHandle, GpuError> {
        self.check(spec)?;
        self.note_errors();
        let id = ChannelId(self.next);
        let next = self.next.checked_add(1).ok_or(GpuError::Limit("channels"))?;
        let notifier = self.notifiers.pop().ok_or(GpuError::Limit("channels"))?;
        notifier.clear();
        let made = self.make(spec, userd, notifier.clone());
        let channel = match made {
            Ok(channel) => channel,
            Err(error) => {
                self.notifiers.push(notifier);
                self.drop_empty_groups();
                return Err(error);
            }
        };
        let token = channel.token;
        self.all.insert(id, channel);
        self.next = next;
        if let Err(error) = self.settle() {
            self.destroy(id, [false; 2])?;
            return Err(error);
        }
        Ok(ChannelHandle { id, token })
    }

    fn make(
        &mut self,
        spec: &ChannelSpec,
        userd: Place,
        notifier: Arc<Notifier>,
    ) -> Result<Channel, GpuError> {
        let (group, number) = self.group(spec.engine)?;
        let session = &self.device.session;
        let engine = self.engine_number(spec.engine);
        let mut params = abi::ChannelParams {
            error: notifier.memory.handle(),
            gpfifo: spec.gpfifo.0,
            gpfifo_entries: spec.gpfifo_entries,
            flags: flag::CHANNEL,
            engine,
            ..Default::default()
        };
        params.userd_memory[0] = userd.object.handle();
        params.userd_offset[0] = userd.offset;
        let bytes = session.layout().channel;
        let params = &mut params.as_mut_bytes()[..bytes];
        let object = session.alloc(Some(&group), host::CLASS, Some(params), "channel")?;
        let mut objects = vec![object.clone()];
        match spec.engine {
            EngineKind::Compute => {
                objects.push(session.alloc(
                    Some(&object),
                    compute::CLASS,
                    None,
                    "compute class",
                )?);
                objects.push(session.alloc(Some(&object), copy::CLASS, None, "copy class")?);
            }
            EngineKind::Copy => {
                let mut which = abi::CopyParams { version: 1, engine };
                let which = Some(which.as_mut_bytes());
                objects.push(session.alloc(Some(&object), copy::CLASS, which, "copy class")?);
            }
        }
        // The group has something to preempt only once it has a class that computes.
        let first = !self.all.values().any(|channel| channel.group == number);
        if spec.engine == EngineKind::Compute && self.preempt_blocks && first {
            let mut mode = abi::PreemptionMode {
                flags: 1,
                object: group.handle(),
                compute: 1,
                ..Default::default()
            };
            self.device.subdevice.control(control::PREEMPTION_MODE, &mut mode)?;
        }
        let mut token = u32::MAX;
        object.control(control::TOKEN, &mut token)?;
        let bells = self.bells.as_ref();
        let watched = bells.map(|bells| bells.add(Token(token), &userd)).transpose()?;
        schedule(&self.device, &group)?;
        Ok(Channel {
            watched,
            objects,
            engine: spec.engine,
            group: number,
            token: Token(token),
            vector: spec.vector,
            userd: Some(userd),
            notifier,
            error: 0,
            error_info: 0,
            disabled: false,
        })
    }

    /// The group of an engine, a new one where there is none.
    fn group(&mut self, kind: EngineKind) -> Result<(Arc<Object>, u32), GpuError> {
        if let Some(group) = self.groups.iter().find(|group| group.engine == kind) {
            return Ok((group.object.clone(), group.number));
        }
        if self.backoff[kind as usize].wait(Instant::now()) {
            return Err(GpuError::Limit("channels made again after faults; wait"));
        }
        let mut params = abi::GroupParams {
            va_space: self.space.space.handle(),
            engine: self.engine_number(kind),
            ..Default::default()
        };
        let params = Some(params.as_mut_bytes());
        let device = &self.device;
        let object =
            device.session.alloc(Some(&device.device), class::GROUP, params, "channel group")?;
        // It is made to be used.
        self.idle[kind as usize] = false;
        self.group_number += 1;
        let number = self.group_number;
        let made_ns = trace::clock_ns(&self.doorbell).unwrap_or_default();
        let group = Group { object: object.clone(), engine: kind, number, made_ns };
        self.reslice(&group)?;
        self.groups.push(group);
        Ok((object, number))
    }

    fn drop_empty_groups(&mut self) {
        let used = |number| self.all.values().any(|c| c.group == number && !c.objects.is_empty());
        let keep: Vec<bool> = self.groups.iter().map(|group| used(group.number)).collect();
        let mut keep = keep.into_iter();
        self.groups.retain(|_| keep.next().unwrap_or(true));
    }

    /// Ends a channel, whatever it is doing. `running` says which engines may be at work for this vGPU.
    pub fn destroy(&mut self, id: ChannelId, running: [bool; 2]) -> Result<(), GpuError> {
        let channel = self.all.get(&id).ok_or(GpuError::NotFound("channel"))?;
        let number = channel.group;
        let alone = !self.all.iter().any(|(other, c)| *other != id && c.group == number);
        if alone && channel.may_run(running) {
            // Freeing it waits for what it runs, and the channel of nobody else is in its group.
            self.reset_one(channel);
        }
        if let Some(mut channel) = self.all.remove(&id) {
            channel.tear_down();
            self.notifiers.push(channel.notifier);
        }
        self.drop_empty_groups();
        self.resume(number)
    }

    /// Sets a group going again: taking a channel out stops the others for a moment, and what they rang meanwhile may be
    /// lost.
    fn resume(&self, number: u32) -> Result<(), GpuError> {
        if let Some(group) = self.groups.iter().find(|group| group.number == number) {
            schedule(&self.device, &group.object)?;
            self.ring_queued(|channel| channel.group == number);
        }
        Ok(())
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

    /// Throws a channel's group off its engine. Everything it was doing is lost.
    fn reset_one(&self, channel: &Channel) {
        let Some(object) = channel.object().filter(|_| channel.error == 0) else { return };
        let engine = self.engine_number(channel.engine);
        let mut params = abi::ResetChannel { engine, ..Default::default() };
        if let Err(error) = object.control(control::RESET_CHANNEL, &mut params) {
            log::warn!("{error}");
        }
    }

    /// Resets all groups, or those of one engine: every channel of theirs is told.
    pub fn reset_groups(&mut self, engine: Option<EngineKind>) {
        let concerns = |of: EngineKind| engine.is_none_or(|engine| of == engine);
        for group in self.groups.iter().filter(|group| concerns(group.engine)) {
            let of_it = |channel: &&Channel| channel.group == group.number && channel.error == 0;
            if let Some(channel) = self.all.values().find(of_it) {
                self.reset_one(channel);
            }
        }
        let live = self.all.values_mut().filter(|c| c.error == 0 && concerns(c.engine));
        for channel in live {
            channel.error = notifier::RESET_CHANNEL;
            self.counters.faults += 1;
        }
        self.groups.retain(|group| !concerns(group.engine));
    }

    /// Destroys all channels. `running` as for [`Self::destroy`].
    pub fn clear(&mut self, running: [bool; 2]) {
        for group in &self.groups {
            let busy = self
                .all
                .values()
                .find(|channel| channel.group == group.number && channel.may_run(running));
            if let Some(channel) = busy {
                self.reset_one(channel);
            }
        }
        for (_, mut channel) in std::mem::take(&mut self.all) {
            channel.tear_down();
            self.notifiers.push(channel.notifier);
        }
        self.groups.clear();
    }

    /// Tears down the channels whose USERD lies in memory that is about to go. They stay, as faulted ones.
    pub fn leave(&mut self, memory: MemoryId) {
        let inside = |channel: &Channel| {
            channel.userd.as_ref().is_some_and(|place| place.memory == Some(memory))
        };
        let ids: Vec<_> = self.all.iter().filter(|(_, c)| inside(c)).map(|(id, _)| *id).collect();
        for id in ids {
            let Some(channel) = self.all.get(&id) else { continue };
            self.reset_one(channel);
            if let Some(channel) = self.all.get_mut(&id) {
                channel.tear_down();
                if channel.error == 0 {
                    channel.error = notifier::RESET_CHANNEL;
                    self.counters.faults += 1;
                }
            }
        }
        self.note_errors();
        self.drop_empty_groups();
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

    /// Sets the time slice of all groups, now and later.
    pub fn set_slice(&mut self, slice: Duration) -> Result<(), GpuError> {
        self.slice = Some(slice);
        self.groups.iter().try_for_each(|group| self.reslice(group))
    }

    /// Says whether there is anything to do on an engine.
    ///
    /// A doorbell makes the GPU give the channel's group a turn, whether or not its ring has anything: a guest that rings
    /// all the time takes its slice from the others for nothing. That of an idle group is therefore the shortest there is.
    pub fn set_idle(&mut self, engine: EngineKind, idle: bool) -> Result<(), GpuError> {
        if std::mem::replace(&mut self.idle[engine as usize], idle) == idle {
            return Ok(());
        }
        let mut of_it = self.groups.iter().filter(|group| group.engine == engine);
        of_it.try_for_each(|group| self.reslice(group))
    }

    /// Whether any engine's slice is an idle one's.
    pub fn any_idle(&self) -> bool {
        self.groups.iter().any(|group| self.idle[group.engine as usize])
    }

    fn reslice(&self, group: &Group) -> Result<(), GpuError> {
        let Some(slice) = self.slice else { return Ok(()) };
        let idle = self.idle[group.engine as usize];
        Ok(set_slice(&group.object, if idle { IDLE_SLICE } else { slice })?)
    }

    /// Whether the gate is open.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Opens or closes the gate. Closing waits for the kernel that runs.
    pub fn gate(&mut self, open: bool) -> Result<(), GpuError> {
        if self.open == open {
            return Ok(());
        }
        self.open = open;
        if !open {
            self.counters.gate_closings += 1;
            self.boost();
        }
        self.settle()
    }

    /// Disables and enables those channels whose state is to change.
    fn settle(&mut self) -> Result<(), GpuError> {
        for disable in [true, false] {
            let changes = |channel: &&Channel| channel.error == 0 && channel.disabled != disable;
            let changing = self.all.values().filter(|_| self.open != disable).filter(changes);
            let handles: Vec<u32> =
                changing.filter_map(|channel| Some(channel.object()?.handle())).collect();
            if handles.is_empty() {
                continue;
            }
            self.disable(disable, &handles)?;
            let all = self.all.values_mut().filter(|channel| channel.error == 0);
            all.for_each(|channel| channel.disabled = disable);
            if !disable {
                // A ring that came while a channel was disabled may have been lost.
                self.ring_queued(|_| true);
            }
        }
        Ok(())
    }

    fn disable(&self, disable: bool, channels: &[u32]) -> Result<(), GpuError> {
        let mut params = abi::DisableChannels {
            disable: u8::from(disable),
            count: channels.len() as u32,
            ..Default::default()
        };
        for (place, channel) in channels.iter().enumerate().take(params.channels.len()) {
            params.clients[place] = self.device.session.root();
            params.channels[place] = *channel;
        }
        Ok(self.device.subdevice.control(control::DISABLE_CHANNELS, &mut params)?)
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

    /// Keeps the clocks up: they sink in the pauses of a gated vGPU, and it would get less than its cap.
    fn boost(&mut self) {
        if self.boosted.is_some_and(|at| at.elapsed() < BOOST / 2) {
            return;
        }
        self.boosted = Some(Instant::now());
        let mut params = abi::Pair { first: flag::BOOST, second: BOOST.as_secs() as u32 };
        if let Err(error) = self.device.subdevice.control(control::PERF_BOOST, &mut params) {
            log::debug!("{error}");
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

fn set_slice(group: &Object, slice: Duration) -> Result<(), RmError> {
    let mut us = slice.as_micros().clamp(SLICE_US.0, SLICE_US.1) as u64;
    group.control(control::SET_TIMESLICE, &mut us)
}
