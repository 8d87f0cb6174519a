//! Channels in a journal, and adoption of those of an earlier process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use ipc::mem::Mapping;
use mdev_core::abi::notifier;
use mdev_core::gpu::{Backing, ChannelSpec, EngineKind, Exception, GpuError};
use mdev_core::ids::ChannelId;
use nvidia_rm::numbers::control;
use nvidia_rm::rm_client::Object;

use super::channel::Channel;
use super::exceptions::ExceptionWatch;
use super::live::{LiveChannel, LiveChannels};
use super::{Channels, Group, Options, TeardownRate};
use crate::nvidia::adoption::DAMAGED;
use crate::nvidia::adoption::journal::Live;
use crate::nvidia::adoption::moment::Moment;
use crate::nvidia::adoption::state::{
    ChannelState, ChannelsState, GroupState, ProgramChannel, ProgramGroup, ProgramsState,
};
use crate::nvidia::device::Device;
use crate::nvidia::doorbell_poller::DoorbellPoller;
use crate::nvidia::error_notifier::Notifier;
use crate::nvidia::memory::Memory;

/// Objects of channels that an earlier process was destroying, freed in this order: context shares
/// and groups.
#[derive(Debug, Default)]
pub(super) struct LeftOver(Vec<Arc<Object>>, Vec<Group>);

/// Records of the channels of an earlier process.
#[derive(Clone, Copy, Debug)]
pub struct Recorded<'a> {
    /// State that changes by requests.
    pub state: &'a ChannelsState,
    /// What programs have.
    pub programs: &'a ProgramsState,
    /// State that changes by itself.
    pub live: &'a LiveChannels,
    /// Exceptions that the driver has reported.
    pub reported: &'a [Exception],
    /// Channels for which was rung.
    pub used: &'a [ChannelId],
}

impl Channels {
    /// Adopts the channels of an earlier process, whose error notifiers are `notifiers`.
    pub fn adopt(
        device: Arc<Device>,
        doorbell: Arc<Mapping>,
        poller: Option<Arc<DoorbellPoller>>,
        options: Options,
        notifiers: &[Arc<Notifier>],
        recorded: Recorded<'_>,
        memory: &mut Memory,
    ) -> Result<Self, GpuError> {
        let mut channels =
            Self::with_notifiers(device, doorbell, poller, options, notifiers.to_vec());
        let Recorded { state, programs, live, reported, used } = recorded;
        channels.next_id = state.next_id;
        channels.last_group_number = state.last_group;
        channels.adopt_live(live);
        channels.reported = reported.to_vec();
        let mut objects = BTreeMap::new();
        for group in &state.groups {
            let object = channels.device.adopt_object(group.object);
            objects.insert(group.object, object.clone());
            let mut adopted = adopted_group(group, object, live);
            let found = programs.groups.iter().find(|other| other.number == group.number);
            if let Some(ProgramGroup { program, share, .. }) = found {
                adopted.program = Some(*program);
                let share = share.map(|share| channels.adopted_share(&adopted.object, share));
                adopted.context_share = share;
            }
            channels.groups.push(adopted);
        }
        for channel in &state.channels {
            let group = channel.group_object.map(|handle| {
                let adopt = || channels.device.adopt_object(handle);
                objects.entry(handle).or_insert_with(adopt).clone()
            });
            let notifier = notifiers.get(channel.notifier as usize).ok_or(DAMAGED)?.clone();
            let of_program = programs.channels.iter().find(|other| other.id == channel.id);
            let adopted =
                channels.adopted_channel(channel, of_program, group.as_ref(), notifier, memory)?;
            channels.by_id.insert(channel.id, adopted);
        }
        let is_free = |one: &&Arc<Notifier>| {
            !channels.by_id.values().any(|channel| Arc::ptr_eq(&channel.notifier, one))
        };
        let free = notifiers.iter().filter(is_free).cloned().collect();
        channels.free_notifiers = free;
        channels.tear_down_freed();
        channels.adopt_work(live, used)?;
        Ok(channels)
    }

    fn adopt_live(&mut self, live: &LiveChannels) {
        self.gate_open = live.gate_open;
        self.pause = live.pause;
        self.timeslice = live.timeslice;
        self.idle = live.idle;
        self.sharing = live.sharing.map(|groups| groups.max(1));
        self.clocks_kept_up = live.clocks_kept_up;
        self.counters = live.counters;
        let instant = |moment: Option<Moment>| moment.map(Moment::instant);
        for (backoff, (faults, last)) in self.backoff.iter_mut().zip(live.faults) {
            *backoff = backoff.after((faults, instant(last)));
        }
        self.teardowns = live.teardowns.map(|at| TeardownRate { settled_at: instant(at) });
    }

    fn adopted_channel(
        &self,
        state: &ChannelState,
        of_program: Option<&ProgramChannel>,
        group: Option<&Arc<Object>>,
        notifier: Arc<Notifier>,
        memory: &mut Memory,
    ) -> Result<Channel, GpuError> {
        let is_programs = of_program.is_some_and(|channel| channel.in_group);
        let rm_client = &self.device.rm_client;
        let mut objects: Vec<Arc<Object>> = Vec::new();
        for handle in &state.objects {
            // The first one is the channel.
            let parent = objects.first().or(group);
            objects.push(rm_client.adopt_object(parent, *handle));
        }
        let userd = state.userd.map(|(id, offset)| match id {
            Some(memory) => Backing::Guest { memory, offset },
            None => Backing::Vram { offset },
        });
        let userd = userd.map(|backing| memory.userd(backing)).transpose()?;
        let mapping = userd.as_ref().and_then(|userd| Some((userd.mapping.clone()?, userd.offset)));
        let registration = match (&self.poller, mapping) {
            (Some(poller), Some((mapping, offset))) => {
                let tokens = [state.token, state.gpu_token];
                Some(poller.add(state.spec.engine, tokens, mapping, offset, !is_programs))
            }
            (Some(_), None) if userd.is_some() => return Err(DAMAGED),
            _ => None,
        };
        let share = of_program.and_then(|channel| channel.share).zip(group);
        let context_share = share.map(|(share, group)| {
            let mut of_group = self.groups.iter().filter_map(|group| group.context_share.as_ref());
            let known = of_group.find(|known| known.handle() == share).cloned();
            known.unwrap_or_else(|| self.adopted_share(group, share))
        });
        let watch = of_program.and_then(|channel| channel.watch.as_ref());
        let exceptions = watch.zip(objects.get(1)).map(|((debugger, events), compute)| {
            ExceptionWatch::adopt(&self.device, *debugger, events, compute)
        });
        Ok(Channel {
            registration,
            context_share,
            exceptions,
            objects,
            engine: state.spec.engine,
            engine_number: state.engine_number,
            space: state.spec.space,
            group: state.group,
            token: state.token,
            gpu_token: state.gpu_token,
            vector: state.spec.vector,
            spec: ChannelSpec { preamble: state.preamble, ..state.spec },
            resumption: None,
            userd,
            notifier,
            error: 0,
            error_info: 0,
            disabled: false,
            is_programs,
        })
    }

    fn adopted_share(&self, group: &Arc<Object>, handle: u32) -> Arc<Object> {
        self.device.rm_client.adopt_object(Some(group), handle)
    }

    /// Tears down the channels that the driver does not have any more. The process before was
    /// destroying them, and this one gets the same request.
    fn tear_down_freed(&mut self) {
        for channel in self.by_id.values_mut() {
            let mut token = u32::MAX;
            let found = channel.object().map(|object| object.control(control::TOKEN, &mut token));
            if found.is_some_and(|found| found.is_err_and(|error| error.is_not_found())) {
                self.left_over.0.extend(channel.context_share.take());
                channel.tear_down();
                // Its notifier may have the error of a reset that was no fault.
                channel.error = notifier::RESET_CHANNEL;
            }
        }
        self.left_over.1 = self.take_empty_groups();
    }

    /// Frees what the process before was destroying. This process must own the client.
    pub fn free_left_over(&mut self) {
        self.left_over = LeftOver::default();
    }

    /// Adopts errors, gate and slices, and rings for what may not have been rung for.
    fn adopt_work(&mut self, live: &LiveChannels, used: &[ChannelId]) -> Result<(), GpuError> {
        for LiveChannel { id, error, error_info, disabled, resumption } in &live.channels {
            if let Some(channel) = self.by_id.get_mut(id) {
                (channel.error, channel.error_info) = (*error, *error_info);
                (channel.disabled, channel.resumption) = (*disabled, *resumption);
            }
        }
        // A channel's error is that of its group.
        let failed = live.channels.iter().filter(|channel| channel.error != 0);
        let lost: Vec<u32> =
            failed.filter_map(|failed| Some(self.by_id.get(&failed.id)?.group)).collect();
        self.groups.retain(|group| !lost.contains(&group.number));
        if live.gate_changes {
            self.enable_all();
        }
        self.abandon_transition();
        self.set_poller_gated();
        self.schedule_deferred()?;
        self.apply_gate()?;
        self.apply_timeslices(Instant::now())?;
        for (id, channel) in &self.by_id {
            let Some(registration) = &channel.registration else { continue };
            if used.contains(id) || channel.has_progress() {
                registration.note_used();
                if channel.error == 0 && !channel.disabled {
                    registration.ring();
                }
            }
        }
        self.record_live(false);
        Ok(())
    }

    /// Enables all channels, whether or not the process before has disabled them.
    fn enable_all(&mut self) {
        for channel in self.by_id.values_mut().filter(|channel| channel.error == 0) {
            channel.disabled = false;
        }
        let live = self.by_id.values().filter(|channel| channel.error == 0);
        for handle in live.filter_map(|channel| Some(channel.object()?.handle())) {
            if let Err(error) = self.disable(false, &[handle]) {
                log::debug!("A channel was not disabled: {error}");
            }
        }
    }

    /// Returns the state for the adopting process, and adds what programs have to `programs`.
    pub fn state(&self, programs: &mut ProgramsState) -> Option<ChannelsState> {
        let handle = |object: &Arc<Object>| object.handle();
        let of_programs = self.groups.iter().filter_map(|group| {
            let share = group.context_share.as_ref().map(handle);
            Some(ProgramGroup { number: group.number, program: group.program?, share })
        });
        programs.groups.extend(of_programs);
        let of_programs =
            self.by_id.iter().filter(|(_, c)| c.is_programs || c.exceptions.is_some());
        programs.channels.extend(of_programs.map(|(id, channel)| ProgramChannel {
            id: *id,
            in_group: channel.is_programs,
            share: channel.context_share.as_ref().map(handle),
            watch: channel.exceptions.as_ref().map(ExceptionWatch::state),
        }));
        let groups = self.groups.iter().map(|group| GroupState {
            number: group.number,
            object: group.object.handle(),
            space: group.space,
            engine: group.engine,
            engine_number: group.engine_number,
            created_ns: group.created_ns,
        });
        let channels = self.by_id.iter().map(|(id, channel)| self.channel_state(*id, channel));
        Some(ChannelsState {
            next_id: self.next_id,
            last_group: self.last_group_number,
            groups: groups.collect(),
            channels: channels.collect::<Option<_>>()?,
        })
    }

    fn channel_state(&self, id: ChannelId, channel: &Channel) -> Option<ChannelState> {
        let same = |handle: &u32| *handle == channel.notifier.memory.handle();
        let notifier = self.notifiers.iter().position(same)?;
        Some(ChannelState {
            id,
            objects: channel.objects.iter().map(|object| object.handle()).collect(),
            group_object: channel.object().and_then(|object| Some(object.parent()?.handle())),
            group: channel.group,
            spec: channel.spec,
            preamble: channel.spec.preamble,
            engine_number: channel.engine_number,
            token: channel.token,
            gpu_token: channel.gpu_token,
            userd: channel.userd.as_ref().map(|userd| (userd.memory, userd.offset)),
            notifier: notifier as u32,
        })
    }

    /// Records what changes by itself. `gate_changes` says that the driver is about to open or
    /// close the gate.
    pub fn record_live(&self, gate_changes: bool) {
        let differs = |c: &Channel| c.error != 0 || c.disabled || c.resumption.is_some();
        let channels = self.by_id.iter().filter(|(_, channel)| differs(channel));
        let channels = channels.map(|(id, channel)| LiveChannel {
            id: *id,
            error: channel.error,
            error_info: channel.error_info,
            disabled: channel.disabled,
            resumption: channel.resumption,
        });
        let unscheduled = self.groups.iter().filter(|group| group.must_schedule);
        let live = LiveChannels {
            gate_open: self.gate_open,
            pause: self.pause,
            gate_changes,
            timeslice: self.timeslice,
            idle: self.idle,
            sharing: self.sharing,
            clocks_kept_up: self.clocks_kept_up,
            evicted: self.device.rm_client.is_freed(),
            counters: self.counters,
            faults: self.backoff.map(|backoff| {
                let (faults, last) = backoff.state();
                (faults, last.map(Moment::of))
            }),
            teardowns: self.teardowns.map(|rate| rate.settled_at.map(Moment::of)),
            unscheduled: unscheduled.map(|group| group.number).collect(),
            channels: channels.collect(),
        };
        let reported: Vec<_> = self.reported.iter().chain(&self.taken).copied().collect();
        self.journal.write_live(Live::Channels, &(live, reported));
    }

    /// Returns the channels for which was rung.
    pub fn used(&self) -> Vec<ChannelId> {
        let used = self.by_id.iter().filter(|(_, channel)| channel.was_used());
        used.map(|(id, _)| *id).collect()
    }

    /// Returns whether a channel of an engine was rung for and has not failed.
    pub fn any_used(&self, engine: EngineKind) -> bool {
        let on_it = |c: &&Channel| c.engine == engine && c.error == 0;
        self.by_id.values().filter(on_it).any(Channel::was_used)
    }
}

fn adopted_group(group: &GroupState, object: Arc<Object>, live: &LiveChannels) -> Group {
    Group {
        context_share: None,
        object,
        space: group.space,
        program: None,
        engine: group.engine,
        engine_number: group.engine_number,
        number: group.number,
        created_ns: group.created_ns,
        must_schedule: live.unscheduled.contains(&group.number),
        submissions: 0,
        busy_at: None,
        slice: None,
    }
}
