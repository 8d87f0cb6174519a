//! Creation of channels and of the groups that contain them.

use std::sync::Arc;
use std::time::Instant;

use mdev_core::gpu::{ChannelHandle, ChannelSpec, EngineKind, GpuError};
use mdev_core::ids::{ChannelId, Token};
use nvidia_rm::abi;
use nvidia_rm::generation::HOPPER;
use nvidia_rm::numbers::{class, control, flag, preemption};
use nvidia_rm::rm_client::{AddressSpace, Object};
use zerocopy::IntoBytes;

use super::channel::Channel;
use super::{Channels, Group, Running};
use crate::nvidia::error_notifier::Notifier;
use crate::nvidia::memory::MemoryLocation;
use crate::nvidia::usermode_page;

impl Channels {
    /// Creates a channel in `space`, and schedules it. The caller has checked `spec`.
    pub fn create(
        &mut self,
        spec: &ChannelSpec,
        userd: MemoryLocation,
        space: &AddressSpace,
    ) -> Result<ChannelHandle, GpuError> {
        let id = ChannelId(self.next_id);
        let next_id = self.next_id.checked_add(1).ok_or(GpuError::Limit("channels"))?;
        let token = self.create_with(id, spec, userd, space, None)?;
        self.next_id = next_id;
        Ok(ChannelHandle { id, token })
    }

    /// Creates a channel with an id, and with the guest's token if that is known already. Returns
    /// the guest's token.
    pub(super) fn create_with(
        &mut self,
        id: ChannelId,
        spec: &ChannelSpec,
        userd: MemoryLocation,
        space: &AddressSpace,
        token: Option<Token>,
    ) -> Result<Token, GpuError> {
        if self.count() >= self.limit {
            return Err(GpuError::Limit("channels"));
        }
        // libcuda knows each generation, `vgpu-guest` one.
        if spec.group.is_none() && self.device.generation != &HOPPER {
            let what = "a channel for vgpu-guest, whose kernels and copies are Hopper's";
            return Err(GpuError::Unsupported(what));
        }
        self.note_errors();
        let notifier = self.free_notifiers.pop().ok_or(GpuError::Limit("channels"))?;
        notifier.clear();
        let channel = match self.new_channel(spec, userd, space, notifier.clone(), token) {
            Ok(channel) => channel,
            Err(error) => {
                self.free_notifiers.push(notifier);
                self.drop_empty_groups();
                return Err(error);
            }
        };
        let (token, number) = (channel.token, channel.group);
        self.by_id.insert(id, channel);
        // Behind a closed gate the channel is disabled, and its group is scheduled when the gate
        // opens: the channel must not run for a moment.
        let started = self.apply_gate().and_then(|()| self.schedule_or_defer(number));
        if let Err(error) = started {
            self.destroy(id, Running::default())?;
            return Err(error);
        }
        Ok(token)
    }

    fn new_channel(
        &mut self,
        spec: &ChannelSpec,
        userd: MemoryLocation,
        space: &AddressSpace,
        notifier: Arc<Notifier>,
        token: Option<Token>,
    ) -> Result<Channel, GpuError> {
        let number = self.group_of(spec, space)?;
        let found = self.groups.iter().find(|group| group.number == number);
        let group = found.ok_or(GpuError::NotFound("channel group"))?;
        let objects = self.alloc_channel(spec, group, &userd, &notifier)?;
        let context_share = group.context_share.clone();
        let engine_number = group.engine_number;
        // The driver sets a preemption mode only in a group that has a compute class.
        let first = !self.by_id.values().any(|channel| channel.group == number);
        let own = group.program.is_none() && spec.engine == EngineKind::Compute;
        if own && self.preempt_blocks && first {
            self.set_preemption(&group.object, preemption::BLOCKS)?;
        }
        let mut gpu_token = u32::MAX;
        objects[0].control(control::TOKEN, &mut gpu_token)?;
        let gpu_token = Token(gpu_token);
        let token = token.unwrap_or_else(|| self.free_token(gpu_token));
        let registration = match (&self.poller, &userd.mapping) {
            (None, _) => None,
            (Some(poller), Some(mapping)) => {
                let wakes = spec.group.is_none();
                let (tokens, mapping) = ([token, gpu_token], Arc::clone(mapping));
                Some(poller.add(spec.engine, tokens, mapping, userd.offset, wakes))
            }
            (Some(_), None) => {
                return Err(GpuError::Unsupported("a USERD outside of guest memory"));
            }
        };
        Ok(Channel {
            registration,
            exceptions: None,
            context_share,
            objects,
            engine: spec.engine,
            engine_number,
            space: spec.space,
            group: number,
            token,
            gpu_token,
            vector: spec.vector,
            spec: *spec,
            resumption: None,
            userd: Some(userd),
            notifier,
            error: 0,
            error_info: 0,
            disabled: false,
            is_programs: spec.group.is_some(),
        })
    }

    /// Returns a token for the guest: the GPU's, unless a restored channel has it.
    fn free_token(&self, gpu: Token) -> Token {
        let taken = |token: Token| self.by_id.values().any(|channel| channel.token == token);
        // There are fewer channels than numbers.
        (0..=u32::MAX)
            .map(|number| Token(gpu.0 ^ number))
            .find(|token| !taken(*token))
            .unwrap_or(gpu)
    }

    /// Allocates a channel and the classes of its engine. The channel is the first object.
    fn alloc_channel(
        &self,
        spec: &ChannelSpec,
        group: &Group,
        userd: &MemoryLocation,
        notifier: &Notifier,
    ) -> Result<Vec<Arc<Object>>, GpuError> {
        let rm_client = &self.device.rm_client;
        let engine = group.engine_number;
        let mut flags = if group.program.is_some() { flag::PROGRAM_CHANNEL } else { flag::CHANNEL };
        // libcuda distributes the channels of a group. A channel that shares a runqueue with busy
        // ones waits longer for its commands.
        if spec.engine == EngineKind::Compute && spec.placement.second_runqueue {
            flags |= flag::SECOND_RUNQUEUE;
        }
        let mut params = abi::ChannelParams {
            error: notifier.memory.handle(),
            gpfifo: spec.gpfifo.0,
            gpfifo_entries: spec.gpfifo_entries,
            flags,
            context_share: group.context_share.as_ref().map_or(0, |share| share.handle()),
            engine,
            ..Default::default()
        };
        params.userd_memory[0] = userd.object.handle();
        params.userd_offset[0] = userd.offset;
        let bytes = rm_client.layout().channel;
        let params = &mut params.as_mut_bytes()[..bytes];
        let generation = self.device.generation;
        let channel =
            rm_client.alloc(Some(&group.object), generation.channel, Some(params), "channel")?;
        let class = |class: u32, params: Option<&mut [u8]>, name: &str| {
            rm_client.alloc(Some(&channel), class, params, name)
        };
        let mut objects = vec![channel.clone()];
        match spec.engine {
            EngineKind::Compute => {
                objects.push(class(generation.compute, None, "compute class")?);
                objects.push(class(generation.copy, None, "copy class")?);
            }
            EngineKind::Copy => {
                let mut params = abi::CopyParams { version: 1, engine };
                objects.push(class(generation.copy, Some(params.as_mut_bytes()), "copy class")?);
            }
        }
        Ok(objects)
    }

    /// Lets the GPU preempt kernels of a channel's group at any instruction.
    pub fn preempt_instructions(&self, id: ChannelId) -> Result<(), GpuError> {
        let channel = self.by_id.get(&id).ok_or(GpuError::NotFound("channel"))?;
        match self.groups.iter().find(|group| group.number == channel.group) {
            Some(group) => self.set_preemption(&group.object, preemption::INSTRUCTIONS),
            // The group is lost, and the program gets to know it otherwise.
            None => Ok(()),
        }
    }

    /// Sets where the GPU may preempt the kernels of a group.
    fn set_preemption(&self, group: &Object, compute: u32) -> Result<(), GpuError> {
        let mut mode = abi::PreemptionMode {
            flags: preemption::SET_COMPUTE,
            object: group.handle(),
            compute,
            ..Default::default()
        };
        Ok(self.device.subdevice.control(control::PREEMPTION_MODE, &mut mode)?)
    }

    /// Returns the number of the group that a channel belongs to. Creates the group if there is
    /// none.
    fn group_of(&mut self, spec: &ChannelSpec, space: &AddressSpace) -> Result<u32, GpuError> {
        let fits = |group: &&Group| (group.engine, group.space) == (spec.engine, spec.space);
        let found = match spec.group {
            Some(number) => {
                let found = self.groups.iter().find(|group| group.program == Some(number));
                if found.is_some_and(|group| !fits(&group)) {
                    let what = "a group with another engine or address space";
                    return Err(GpuError::Invalid(what));
                }
                found
            }
            None => self.groups.iter().find(|group| group.program.is_none() && fits(group)),
        };
        if let Some(group) = found {
            return Ok(group.number);
        }
        let (now, engine) = (Instant::now(), spec.engine);
        if self.backoff[engine as usize].must_wait(now) {
            return Err(GpuError::Later("channels are made again soon after faults"));
        }
        if self.teardowns[engine as usize].must_wait(now) {
            return Err(GpuError::Later("channels are made again soon after working ones"));
        }
        let engine_number = self.engine_number(spec);
        let (object, context_share) = self.alloc_group(spec, engine_number, space)?;
        // A new group is about to get work.
        self.idle[engine as usize] = false;
        self.last_group_number += 1;
        let number = self.last_group_number;
        let created_ns = usermode_page::clock_ns(&self.doorbell).unwrap_or_default();
        let mut group = Group {
            context_share,
            object,
            space: spec.space,
            program: spec.group,
            engine,
            engine_number,
            number,
            created_ns,
            must_schedule: false,
            submissions: 0,
            busy_at: None,
            slice: None,
        };
        self.wanted_timeslice(&group).map_or(Ok(()), |slice| group.set_timeslice(slice))?;
        self.groups.push(group);
        Ok(number)
    }

    /// Allocates a group. The channels of programs compute in a subcontext, as libcuda's methods
    /// expect.
    fn alloc_group(
        &self,
        spec: &ChannelSpec,
        engine: u32,
        space: &AddressSpace,
    ) -> Result<(Arc<Object>, Option<Arc<Object>>), GpuError> {
        let rm_client = &self.device.rm_client;
        let in_subcontext = spec.group.is_some() && spec.engine == EngineKind::Compute;
        let va_space = space.space.handle();
        let mut params = abi::GroupParams {
            va_space: if in_subcontext { 0 } else { va_space },
            engine,
            ..Default::default()
        };
        let params = Some(params.as_mut_bytes());
        let group =
            rm_client.alloc(Some(&self.device.device), class::GROUP, params, "channel group")?;
        if !in_subcontext {
            return Ok((group, None));
        }
        let flags = flag::ASYNC_SUBCONTEXT;
        let mut params = abi::ContextShareParams { va_space, flags, subcontext: 0 };
        let params = Some(params.as_mut_bytes());
        let share = rm_client.alloc(Some(&group), class::CONTEXT_SHARE, params, "context share")?;
        Ok((group, Some(share)))
    }
}
