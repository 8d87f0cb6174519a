//! Stopping the channels between two entries of their rings, for a save.
//!
//! The GPU fetches entries ahead. With a rewind, it forgets the ones that it has not fetched, and
//! at most two that it has fetched are left. They are executed with `GP_PUT` equal to `GP_GET`, so
//! that nothing follows them. The guest's driver counts executed entries in its USERD
//! ([`PROGRESS`](mdev_core::abi::userd::PROGRESS)): when the count has reached `GP_GET`, nothing is
//! in progress.

use mdev_core::abi::{notifier, userd};
use mdev_core::gpu::{EngineKind, GpuError};
use mdev_core::ids::ChannelId;
use nvidia_rm::abi;
use serde::{Deserialize, Serialize};

use super::Channels;
use super::channel::Channel;

/// Whether the channels are stopped for a save, beside the gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pause {
    /// They are not.
    #[default]
    None,
    /// They are being stopped or continued.
    Changing,
    /// They are stopped.
    Stopped,
}

/// What is to be done before a paused channel continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Resumption {
    /// `GP_PUT` is written again.
    PutBack {
        /// `GP_GET`, which `GP_PUT` has instead.
        get: u32,
        /// The guest's `GP_PUT`.
        put: u32,
    },
    /// The new channel is brought to where the saved one was.
    Restart(Place),
}

/// Place of a saved channel in its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// `GP_GET`.
    pub get: u32,
    /// `GP_PUT`.
    pub put: u32,
    /// Number of executed entries.
    pub progress: u32,
    /// The channel has executed entries.
    pub used: bool,
}

impl Channel {
    fn is_live(&self) -> bool {
        self.error == 0 && !self.objects.is_empty()
    }

    fn word(&self, offset: u64) -> u32 {
        self.load_userd(offset).unwrap_or_default()
    }

    /// Returns whether all entries up to an index are executed.
    fn has_executed(&self, index: u32) -> bool {
        self.word(userd::PROGRESS) & (self.spec.gpfifo_entries - 1) == index
    }

    /// Returns where a stopped channel is in its ring.
    pub(super) fn place(&self) -> Place {
        match self.resumption {
            Some(Resumption::Restart(place)) => place,
            resumption => {
                let (get, progress) = (self.word(userd::GP_GET), self.word(userd::PROGRESS));
                let put = match resumption {
                    Some(Resumption::PutBack { put, .. }) => put,
                    _ => self.word(userd::GP_PUT),
                };
                Place { get, put, progress, used: self.was_used() || get != 0 || progress != 0 }
            }
        }
    }
}

impl Channels {
    /// Returns whether the channels are stopped for a save.
    pub fn is_paused(&self) -> bool {
        self.pause == Pause::Stopped
    }

    /// Refuses channels that cannot be made again elsewhere.
    pub fn check_save(&self) -> Result<(), GpuError> {
        if self.groups.iter().any(|group| group.program.is_some()) {
            return Err(GpuError::Unsupported("saving CUDA programs; end them first"));
        }
        let unknown = |channel: &Channel| channel.is_live() && channel.spec.preamble.is_none();
        if self.by_id.values().any(unknown) {
            let what = "saving a channel whose driver names no preamble; update it in the VM";
            return Err(GpuError::Unsupported(what));
        }
        Ok(())
    }

    /// Begins to stop the channels: no ring is passed on, and the gate is open.
    pub fn begin_stop(&mut self) -> Result<(), GpuError> {
        self.note_errors();
        self.pause = Pause::Changing;
        self.set_poller_gated();
        self.record_live(false);
        self.schedule_deferred()?;
        self.apply_gate()
    }

    /// Returns the channels of an engine with entries that are not executed, and the number of
    /// those that are.
    pub fn unfinished(&self, engine: EngineKind) -> Vec<(ChannelId, u32)> {
        let of_engine = self.by_id.iter().filter(|(_, c)| c.engine == engine && c.is_live());
        let works = of_engine.filter(|(_, c)| !c.has_executed(c.word(userd::GP_PUT)));
        works.map(|(id, channel)| (*id, channel.word(userd::PROGRESS))).collect()
    }

    /// Makes the GPU forget the entries that it has not fetched. Waits for the kernel that runs.
    pub fn rewind(&mut self) -> Result<(), GpuError> {
        let live = self.by_id.values().filter(|channel| channel.is_live());
        let handles: Vec<u32> = live.filter_map(|c| Some(c.object()?.handle())).collect();
        self.record_live(true);
        for handles in handles.chunks(abi::DisableChannels::MAX) {
            self.disable_with(true, true, handles)?;
        }
        for channel in self.by_id.values_mut().filter(|channel| channel.is_live()) {
            let (get, put) = (channel.word(userd::GP_GET), channel.word(userd::GP_PUT));
            channel.resumption = Some(Resumption::PutBack { get, put });
            channel.disabled = true;
        }
        self.record_live(true);
        for channel in self.by_id.values() {
            if let Some(Resumption::PutBack { get, .. }) = channel.resumption {
                channel.store_userd(userd::GP_PUT, get);
            }
        }
        // Executes what was fetched.
        self.apply_gate()
    }

    /// Returns whether all fetched entries are executed.
    pub fn are_drained(&mut self) -> bool {
        self.note_errors();
        let mut live = self.by_id.values().filter(|channel| channel.is_live());
        live.all(|c| !c.has_queued() && c.has_executed(c.word(userd::GP_GET)))
    }

    /// Stops the channels, which are drained.
    pub fn stop(&mut self) -> Result<(), GpuError> {
        self.pause = Pause::Stopped;
        let done = self.apply_gate();
        self.record_live(false);
        done
    }

    /// Ends a pause: the channels continue where they were.
    pub fn end_pause(&mut self) -> Result<(), GpuError> {
        for channel in self.by_id.values_mut() {
            if let Some(Resumption::PutBack { get, put }) = channel.resumption.take()
                && channel.word(userd::GP_PUT) == get
            {
                channel.store_userd(userd::GP_PUT, put);
            }
        }
        self.pause = Pause::None;
        let done = self.schedule_deferred().and_then(|()| self.apply_gate());
        self.set_poller_gated();
        self.record_live(false);
        self.ring_again();
        done
    }

    /// Ends a pause that an earlier process has begun and not completed. A restored channel that it
    /// was bringing to its place is lost.
    pub(super) fn abandon_transition(&mut self) {
        if self.pause != Pause::Changing {
            return;
        }
        self.pause = Pause::None;
        for channel in self.by_id.values_mut() {
            match channel.resumption.take() {
                Some(Resumption::PutBack { put, .. }) => channel.store_userd(userd::GP_PUT, put),
                Some(Resumption::Restart(_)) => channel.error = notifier::RESET_CHANNEL,
                None => {}
            }
        }
    }
}
