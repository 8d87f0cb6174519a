//! End of channels: destruction by the guest, resets, and release of the USERD's memory.

use std::time::Instant;

use mdev_core::abi::notifier;
use mdev_core::gpu::{EngineKind, GpuError};
use mdev_core::ids::{ChannelId, MemoryId, SpaceId};
use nvidia_rm::abi;
use nvidia_rm::numbers::control;
use nvidia_rm::rm_client::Object;

use super::channel::Channel;
use super::{Channels, Group, Pause};

/// Work of a vGPU that the engines may be executing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Running {
    /// A copy may be in progress.
    pub copying: bool,
    /// The vGPU is resident on the compute engine.
    pub resident: bool,
    /// A kernel keeps the compute engine from other vGPUs.
    pub long_kernel: bool,
}

/// Channels that are torn down.
#[derive(Clone, Copy, Debug)]
pub enum Teardown {
    /// A channel that the guest destroys.
    Channel(ChannelId),
    /// Channels that have their USERD in this memory.
    Memory(MemoryId),
    /// Channels in this address space.
    Space(SpaceId),
    /// All channels.
    All,
}

impl Running {
    /// Returns whether an engine may execute work of the vGPU after all entries were fetched.
    pub(super) fn is_on(self, engine: EngineKind) -> bool {
        match engine {
            EngineKind::Copy => self.copying,
            EngineKind::Compute => self.resident,
        }
    }

    /// Returns whether an engine executes a long kernel of the vGPU.
    fn is_long(self, engine: EngineKind) -> bool {
        engine == EngineKind::Compute && self.long_kernel
    }
}

impl Channels {
    pub(super) fn drop_empty_groups(&mut self) {
        drop(self.take_empty_groups());
    }

    /// Removes the groups without channels from the list, and returns them.
    pub(super) fn take_empty_groups(&mut self) -> Vec<Group> {
        let channels = &self.by_id;
        let used = |number| channels.values().any(|c| c.group == number && !c.objects.is_empty());
        self.groups.extract_if(.., |group| !used(group.number)).collect()
    }

    /// Returns whether the compute engine may execute work of channels that are torn down. False
    /// for a channel of several in its group: destroying it resets nothing.
    pub fn computes_in(&self, teardown: Teardown, running: Running) -> bool {
        let mut on_engine =
            self.by_id.iter().filter(|(_, c)| c.engine == EngineKind::Compute && c.error == 0);
        let is_affected = |id: ChannelId, channel: &Channel| match teardown {
            Teardown::Channel(destroyed) => id == destroyed && !self.shares_compute_group(id),
            Teardown::Memory(memory) => channel.has_userd_in(memory),
            Teardown::Space(space) => channel.space == space,
            Teardown::All => true,
        };
        on_engine.any(|(id, channel)| is_affected(*id, channel) && channel.may_be_running(running))
    }

    /// Destroys a channel, even while it executes work.
    pub fn destroy(&mut self, id: ChannelId, running: Running) -> Result<(), GpuError> {
        // A fault counts, whether or not the guest asked for it before.
        self.note_errors();
        let channel = self.by_id.get(&id).ok_or(GpuError::NotFound("channel"))?;
        let number = channel.group;
        let alone = !self.by_id.iter().any(|(other, c)| *other != id && c.group == number);
        if alone && channel.error == 0 && channel.may_be_running(running) {
            // Freeing waits for the work that runs. No other channel is in the group, so a reset is
            // safe.
            self.throw_off(id, running);
        }
        if let Some(channel) = self.by_id.remove(&id) {
            self.free_channel(channel);
        }
        self.drop_empty_groups();
        self.resume(number)
    }

    /// Frees a channel, and counts a fault that the driver has reported in the meantime.
    fn free_channel(&mut self, mut channel: Channel) {
        channel.tear_down();
        if channel.error == 0 && channel.notifier.error().is_some() {
            self.counters.faults += 1;
            self.count_fault(channel.engine);
        }
        self.free_notifiers.push(channel.notifier);
    }

    /// Resets the group of a channel that may be executing work, and counts that: the reset of a
    /// long kernel stalls the other vGPUs as a fault does, and that of other work for a moment.
    /// Returns the number of channels that are lost.
    fn throw_off(&mut self, id: ChannelId, running: Running) -> u64 {
        let Some(channel) = self.by_id.get(&id).filter(|channel| channel.error == 0) else {
            return 0;
        };
        let (engine, number) = (channel.engine, channel.group);
        // A finished kernel can be resident as long as no other vGPU needs the engine.
        let had_work = channel.has_queued() || self.load.contended;
        let channel_object = channel.object().cloned();
        let engine_number = channel.engine_number;
        if running.is_long(engine) {
            self.count_fault(engine);
        } else if had_work {
            self.teardowns[engine as usize].count(Instant::now());
        }
        // The reset is counted. Its report by the driver is not another fault. A process that
        // continues knows that, too.
        let channels = self.by_id.values_mut().filter(|c| c.group == number && c.error == 0);
        let lost = channels.map(|channel| channel.error = notifier::RESET_CHANNEL).count();
        self.record_live(false);
        if let Some(object) = channel_object {
            reset_group(&object, engine_number);
        }
        self.groups.retain(|group| group.number != number);
        lost as u64
    }

    /// Resets the group of a channel, unless it has failed already.
    pub fn reset(&mut self, id: ChannelId, running: Running) -> Result<(), GpuError> {
        self.note_errors();
        if !self.by_id.contains_key(&id) {
            return Err(GpuError::NotFound("channel"));
        }
        self.counters.faults += self.throw_off(id, running);
        Ok(())
    }

    /// Schedules a group again. The removal of a channel stops the other channels for a moment, and
    /// the GPU may lose their rings meanwhile.
    fn resume(&mut self, number: u32) -> Result<(), GpuError> {
        self.schedule_or_defer(number)?;
        self.ring_queued(|channel| channel.group == number);
        Ok(())
    }

    /// Resets all groups, or those of one engine, and marks their channels as faulted.
    pub fn reset_groups(&mut self, engine: Option<EngineKind>) {
        let matches = |other: EngineKind| engine.is_none_or(|engine| engine == other);
        let of_group = |number: u32| {
            let live = |channel: &&Channel| channel.group == number && channel.error == 0;
            let channel = self.by_id.values().find(live)?;
            Some((channel.object()?.clone(), channel.engine_number))
        };
        let groups = self.groups.iter().filter(|group| matches(group.engine));
        let busy: Vec<_> = groups.filter_map(|group| of_group(group.number)).collect();
        let mut had_channels = [false; 2];
        let live = self.by_id.values_mut().filter(|c| c.error == 0 && matches(c.engine));
        for channel in live {
            channel.error = notifier::RESET_CHANNEL;
            self.counters.faults += 1;
            had_channels[channel.engine as usize] = true;
        }
        for engine in [EngineKind::Copy, EngineKind::Compute] {
            if had_channels[engine as usize] {
                self.count_fault(engine);
            }
        }
        self.record_live(false);
        for (object, engine_number) in busy {
            reset_group(&object, engine_number);
        }
        self.groups.retain(|group| !matches(group.engine));
    }

    /// Destroys all channels, even while they execute work.
    pub fn clear(&mut self, running: Running) {
        self.note_errors();
        // A stopped channel executes nothing.
        let stopped = std::mem::take(&mut self.pause) == Pause::Stopped;
        let running = if stopped { Running::default() } else { running };
        let busy = |number: u32| {
            let mut of_group = self.by_id.iter().filter(|(_, c)| c.group == number && c.error == 0);
            of_group.find(|(_, channel)| channel.may_be_running(running)).map(|(id, _)| *id)
        };
        let busy: Vec<_> = self.groups.iter().filter_map(|group| busy(group.number)).collect();
        for id in busy {
            self.throw_off(id, running);
        }
        for (_, channel) in std::mem::take(&mut self.by_id) {
            self.free_channel(channel);
        }
        self.groups.clear();
        self.set_poller_gated();
    }

    /// Tears down the channels that have their USERD in memory about to be released, and marks them
    /// as faulted.
    pub fn leave_memory(&mut self, memory: MemoryId, running: Running) {
        let affected = self.by_id.iter().filter(|(_, channel)| channel.has_userd_in(memory));
        let ids: Vec<_> = affected.map(|(id, _)| *id).collect();
        for id in ids {
            let Some(channel) = self.by_id.get(&id) else { continue };
            if channel.was_used() {
                self.counters.faults += self.throw_off(id, running);
            } else if let Some(object) = channel.object().filter(|_| channel.error == 0) {
                reset_group(object, channel.engine_number);
            }
            if let Some(channel) = self.by_id.get_mut(&id) {
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

    /// Destroys the channels in an address space.
    pub fn leave_space(&mut self, space: SpaceId, running: Running) -> Result<(), GpuError> {
        let of_space = self.by_id.iter().filter(|(_, channel)| channel.space == space);
        let ids: Vec<_> = of_space.map(|(id, _)| *id).collect();
        ids.into_iter().try_for_each(|id| self.destroy(id, running))
    }
}

/// Resets the group of a channel. All work of the group is lost.
fn reset_group(channel: &Object, engine: u32) {
    let mut params = abi::ResetChannel { engine, ..Default::default() };
    if let Err(error) = channel.control(control::RESET_CHANNEL, &mut params) {
        log::warn!("{error}");
    }
}
