//! How channels end: by their guest's will, by a reset, or with the memory that they lie in.

use mdev_core::abi::notifier;
use mdev_core::gpu::{EngineKind, GpuError};
use mdev_core::ids::{ChannelId, MemoryId};

use super::channel::Channel;
use super::{Channels, schedule};
use crate::nvidia::sys::abi;
use crate::nvidia::sys::numbers::control;

impl Channels {
    pub(super) fn drop_empty_groups(&mut self) {
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
}
