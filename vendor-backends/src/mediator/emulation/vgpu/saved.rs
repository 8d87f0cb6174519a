//! Pausing, saving and restoring a vGPU.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use ipc::mem::WriteLog;
use mdev_core::gpu::{SavedChannel, SavedClient};
use mdev_core::ids::{ChannelId, MemoryId, SpaceId};

use super::Vgpu;
use crate::mediator::emulation::channel::Channel;
use crate::mediator::wire::Refusal;

impl Vgpu {
    /// Stops all channels between two steps of their work. On the return, and until
    /// [`Self::resume`] or [`Self::reset`], the engine does not access the vGPU's memory.
    pub fn pause(&self) -> Result<(), Refusal> {
        self.lock()?.paused = true;
        Ok(())
    }

    /// Continues after a pause, which does not count as time that channels have waited.
    pub fn resume(&self) -> Result<(), Refusal> {
        let mut state = self.lock()?;
        state.paused = false;
        state.channels.values_mut().for_each(Channel::forget_wait);
        drop(state);
        self.waker.wake();
        Ok(())
    }

    /// Returns the state of a paused vGPU.
    pub fn save(&self) -> Result<SavedClient, Refusal> {
        let state = self.lock()?;
        if !state.paused {
            return Err(Refusal::NotPaused);
        }
        let channels = state.channels.iter().map(|(id, channel)| {
            let saved = channel.save().map_err(|_| Refusal::State)?;
            Ok(SavedChannel { id: ChannelId(*id), spec: *channel.spec(), state: saved })
        });
        Ok(SavedClient {
            spaces: state.spaces.created().collect(),
            mappings: state.spaces.mappings(),
            channels: channels.collect::<Result<_, Refusal>>()?,
        })
    }

    /// Records from now on which pages of an import are written. Returns the file of the record.
    pub fn log_writes(&self, memory: MemoryId) -> Result<OwnedFd, Refusal> {
        // The engine accesses memory with the lock only.
        let state = self.lock()?;
        let mapping = state.spaces.memory(memory)?;
        let (log, file) = WriteLog::create(mapping.len())?;
        mapping.set_log(Some(log));
        Ok(file)
    }

    /// Ends the record of an import.
    pub fn end_log(&self, memory: MemoryId) -> Result<(), Refusal> {
        self.lock()?.spaces.memory(memory)?.set_log(None);
        Ok(())
    }

    /// Creates an address space with a saved id.
    pub fn restore_space(&self, space: SpaceId) -> Result<(), Refusal> {
        self.lock()?.spaces.restore(space)
    }

    /// Creates a channel in a saved state. Refused unless the vGPU is paused: what the channel
    /// continues with may not be in memory yet.
    pub fn restore_channel(&self, saved: &SavedChannel) -> Result<(), Refusal> {
        let SavedChannel { id: ChannelId(id), spec, state: bytes } = saved;
        let mut state = self.lock()?;
        if !state.paused {
            return Err(Refusal::NotPaused);
        }
        if state.channels.contains_key(id) || !(1..=0x7fff_ffff).contains(id) {
            return Err(Refusal::State);
        }
        let userd = self.check_channel(&state, spec)?;
        let channel = Channel::restore(*spec, userd, bytes, &*self.hardware);
        state.channels.insert(*id, channel.ok_or(Refusal::State)?);
        state.next_id = state.next_id.max(id % 0x7fff_ffff + 1);
        self.counters.channels.store(state.channels.len() as u32, Ordering::Relaxed);
        Ok(())
    }
}
