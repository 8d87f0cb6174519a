//! End of channels: destruction by the guest, resets, and release of the USERD's memory.

use mdev_core::abi::notifier;
use mdev_core::gpu::{EngineKind, GpuError};
use mdev_core::ids::{ChannelId, MemoryId};

use super::channel::Channel;
use super::{Channels, schedule};
use crate::nvidia::sys::abi;
use crate::nvidia::sys::numbers::control;

impl Channels {
    pub(super) fn drop_empty_groups(&mut self) {
        let channels = &self.by_id;
        let used = |number| channels.values().any(|c| c.group == number && !c.objects.is_empty());
        self.groups.retain(|group| used(group.number));
    }

    /// Destroys a channel, even while it executes work. `running` has a flag for each engine that
    /// may execute work of the vGPU.
    pub fn destroy(&mut self, id: ChannelId, running: [bool; 2]) -> Result<(), GpuError> {
        let channel = self.by_id.get(&id).ok_or(GpuError::NotFound("channel"))?;
        let number = channel.group;
        let alone = !self.by_id.iter().any(|(other, c)| *other != id && c.group == number);
        if alone && channel.may_be_running(running) {
            // Freeing waits for the work that runs. No other channel is in the group, so a reset is
            // safe.
            self.reset_group_of(channel);
        }
        if let Some(mut channel) = self.by_id.remove(&id) {
            channel.tear_down();
            self.free_notifiers.push(channel.notifier);
        }
        self.drop_empty_groups();
        self.resume(number)
    }

    /// Schedules a group again. The removal of a channel stops the other channels for a moment, and
    /// the GPU may lose their rings meanwhile.
    fn resume(&self, number: u32) -> Result<(), GpuError> {
        if let Some(group) = self.groups.iter().find(|group| group.number == number) {
            schedule(&self.device, &group.object)?;
            self.ring_queued(|channel| channel.group == number);
        }
        Ok(())
    }

    /// Resets a channel's group. All work of the group is lost.
    fn reset_group_of(&self, channel: &Channel) {
        let Some(object) = channel.object().filter(|_| channel.error == 0) else { return };
        let engine = self.engine_number(channel.engine);
        let mut params = abi::ResetChannel { engine, ..Default::default() };
        if let Err(error) = object.control(control::RESET_CHANNEL, &mut params) {
            log::warn!("{error}");
        }
    }

    /// Resets all groups, or those of one engine, and marks their channels as faulted.
    pub fn reset_groups(&mut self, engine: Option<EngineKind>) {
        let matches = |other: EngineKind| engine.is_none_or(|engine| engine == other);
        for group in self.groups.iter().filter(|group| matches(group.engine)) {
            let live = |channel: &&Channel| channel.group == group.number && channel.error == 0;
            if let Some(channel) = self.by_id.values().find(live) {
                self.reset_group_of(channel);
            }
        }
        let live = self.by_id.values_mut().filter(|c| c.error == 0 && matches(c.engine));
        for channel in live {
            channel.error = notifier::RESET_CHANNEL;
            self.counters.faults += 1;
        }
        self.groups.retain(|group| !matches(group.engine));
    }

    /// Destroys all channels, with `running` as in [`Self::destroy`].
    pub fn clear(&mut self, running: [bool; 2]) {
        for group in &self.groups {
            let busy = self
                .by_id
                .values()
                .find(|channel| channel.group == group.number && channel.may_be_running(running));
            if let Some(channel) = busy {
                self.reset_group_of(channel);
            }
        }
        for (_, mut channel) in std::mem::take(&mut self.by_id) {
            channel.tear_down();
            self.free_notifiers.push(channel.notifier);
        }
        self.groups.clear();
    }

    /// Tears down the channels that have their USERD in memory about to be released, and marks them
    /// as faulted.
    pub fn leave_memory(&mut self, memory: MemoryId) {
        let affected = |channel: &Channel| {
            channel.userd.as_ref().is_some_and(|userd| userd.memory == Some(memory))
        };
        let ids: Vec<_> =
            self.by_id.iter().filter(|(_, c)| affected(c)).map(|(id, _)| *id).collect();
        for id in ids {
            let Some(channel) = self.by_id.get(&id) else { continue };
            self.reset_group_of(channel);
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
}
