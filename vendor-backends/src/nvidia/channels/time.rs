//! When the groups may run: their slices, and the gate.

use std::time::{Duration, Instant};

use mdev_core::gpu::{EngineKind, GpuError};

use super::channel::Channel;
use super::{Channels, Group};
use crate::nvidia::rm::RmError;
use crate::nvidia::session::Object;
use crate::nvidia::sys::abi;
use crate::nvidia::sys::numbers::{control, flag};

/// Slices that the driver takes.
const SLICE_US: (u128, u128) = (50, 100_000_000);

/// The slice of a group that has nothing to do.
const IDLE_SLICE: Duration = Duration::from_micros(50);

/// How long a boost of the clocks is asked for.
const BOOST: Duration = Duration::from_secs(10);

impl Channels {
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

    pub(super) fn reslice(&self, group: &Group) -> Result<(), GpuError> {
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
    pub(super) fn settle(&mut self) -> Result<(), GpuError> {
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

fn set_slice(group: &Object, slice: Duration) -> Result<(), RmError> {
    let mut us = slice.as_micros().clamp(SLICE_US.0, SLICE_US.1) as u64;
    group.control(control::SET_TIMESLICE, &mut us)
}
