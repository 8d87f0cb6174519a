//! Scheduling of the groups: time slices and the gate.

use std::time::{Duration, Instant};

use mdev_core::gpu::{EngineKind, GpuError};
use nvidia_rm::abi;
use nvidia_rm::numbers::{control, flag};
use nvidia_rm::rm::RmError;

use super::channel::Channel;
use super::{Channels, Group, Pause};
use crate::nvidia::doorbell_poller::Registration;

/// Time slices that the driver accepts, in microseconds.
const SLICE_RANGE_US: (u128, u128) = (50, 100_000_000);

/// Time slice of a group without work. With a shorter slice, a group that has work after all would
/// not get to it: changing to its context takes most of 0.1 ms.
const IDLE_SLICE: Duration = Duration::from_micros(200);

/// Time after the last sign of work for which a group shares the slice: a kernel may run without
/// entries in the ring.
const GROUP_LINGER: Duration = Duration::from_millis(500);

/// Duration of a clock boost.
const BOOST_DURATION: Duration = Duration::from_secs(10);

impl Channels {
    /// Sets the time slice of current and future groups.
    pub fn set_timeslice(&mut self, timeslice: Duration) -> Result<(), GpuError> {
        self.timeslice = Some(timeslice);
        self.record_live(false);
        self.apply_timeslices(Instant::now())
    }

    /// Returns the time slice, or zero if none was set.
    pub fn timeslice(&self) -> Duration {
        self.timeslice.unwrap_or_default()
    }

    /// Returns the number of groups of an engine among which the slice is divided, at least 1.
    pub fn sharing(&self, engine: EngineKind) -> u32 {
        self.sharing[engine as usize].max(1)
    }

    /// Sets whether an engine has no work, whatever the guest rings for.
    ///
    /// A ring of the doorbell makes the GPU schedule the channel's group, even if the GPFIFO is
    /// empty. A guest that rings all the time wastes its slice at the expense of other vGPUs. A
    /// group without work therefore gets the shortest slice.
    pub fn set_idle(&mut self, engine: EngineKind, idle: bool) -> Result<(), GpuError> {
        if std::mem::replace(&mut self.idle[engine as usize], idle) == idle {
            return Ok(());
        }
        self.apply_timeslices(Instant::now())
    }

    /// Returns whether any group has the idle slice.
    pub fn any_idle(&self) -> bool {
        self.groups.iter().any(|group| self.idle[group.engine as usize])
    }

    /// Divides the time slice of an engine among the groups that have work. Each program has a
    /// group of its own, and a vGPU with many programs is due no more than one with a single
    /// program.
    pub fn share_slice(&mut self, engine: EngineKind, now: Instant) -> Result<(), GpuError> {
        let mut sharing = 0;
        for group in self.groups.iter_mut().filter(|group| group.engine == engine) {
            let channels = self.by_id.values().filter(|channel| channel.group == group.number);
            let (mut submissions, mut queued) = (0, false);
            for channel in channels.filter(|channel| channel.error == 0) {
                submissions += channel.registration.as_ref().map_or(0, Registration::submissions);
                queued |= channel.has_queued();
            }
            if queued || submissions != group.submissions {
                (group.submissions, group.busy_at) = (submissions, Some(now));
            }
            sharing += u32::from(group.is_busy(now));
        }
        self.sharing[engine as usize] = sharing.max(1);
        self.apply_timeslices(now)
    }

    /// Returns the time slice that a group should have.
    pub(super) fn wanted_timeslice(&self, group: &Group) -> Option<Duration> {
        let engine = group.engine as usize;
        let timeslice = self.timeslice? / self.sharing[engine];
        Some(if self.idle[engine] { IDLE_SLICE } else { timeslice })
    }

    /// Sets the time slices that groups should have.
    ///
    /// The driver takes a millisecond for each and lets the GPU start its runlist anew, so that the
    /// groups at the end of the runlist miss a turn. While others have work, a group without work
    /// gets its slice when it has work, where the worker sees that.
    pub(super) fn apply_timeslices(&mut self, now: Instant) -> Result<(), GpuError> {
        let (sees_work, contended) = (self.poller.is_some(), self.load.contended);
        for index in 0..self.groups.len() {
            let wanted = self.wanted_timeslice(&self.groups[index]);
            let group = &mut self.groups[index];
            let disturbs = contended || group.engine == EngineKind::Copy;
            let later = sees_work && disturbs && group.slice.is_some() && !group.is_busy(now);
            if let Some(slice) = wanted.filter(|slice| group.slice != Some(*slice) && !later) {
                group.set_timeslice(slice)?;
            }
        }
        Ok(())
    }

    /// Returns whether the gate is open.
    pub fn is_gate_open(&self) -> bool {
        self.gate_open
    }

    /// Opens or closes the gate. Closing waits for the kernel that runs.
    pub fn set_gate(&mut self, open: bool) -> Result<(), GpuError> {
        if self.gate_open == open {
            return Ok(());
        }
        self.gate_open = open;
        if !open {
            self.counters.gate_closings += 1;
            self.boost_clocks();
            self.set_poller_gated();
        }
        let done = self.schedule_deferred().and_then(|()| self.apply_gate());
        self.set_poller_gated();
        done
    }

    pub(super) fn set_poller_gated(&self) {
        if let Some(poller) = &self.poller {
            poller.set_gated(!self.gate_open || self.pause != Pause::None);
        }
    }

    /// Returns whether the channels should be enabled.
    fn should_run(&self) -> bool {
        match self.pause {
            Pause::None => self.gate_open,
            Pause::Changing => true,
            Pause::Stopped => false,
        }
    }

    /// Schedules a group, or defers that until the gate opens.
    pub(super) fn schedule_or_defer(&mut self, number: u32) -> Result<(), GpuError> {
        let runs = self.should_run();
        let Some(group) = self.groups.iter_mut().find(|group| group.number == number) else {
            return Ok(());
        };
        group.must_schedule = !runs;
        if runs {
            self.device.schedule(&group.object)?;
        }
        Ok(())
    }

    /// Schedules the groups that got channels behind the closed gate, if the gate is open now.
    pub(super) fn schedule_deferred(&mut self) -> Result<(), GpuError> {
        let runs = self.should_run();
        for group in self.groups.iter_mut().filter(|group| group.must_schedule) {
            if runs {
                self.device.schedule(&group.object)?;
                group.must_schedule = false;
            }
        }
        Ok(())
    }

    /// Disables or enables the channels that do not match the state of the gate.
    pub(super) fn apply_gate(&mut self) -> Result<(), GpuError> {
        for disable in [true, false] {
            let differs = |channel: &&Channel| channel.error == 0 && channel.disabled != disable;
            let channels = self.by_id.values().filter(|_| self.should_run() != disable);
            let handles: Vec<u32> = channels
                .filter(differs)
                .filter_map(|channel| Some(channel.object()?.handle()))
                .collect();
            if handles.is_empty() {
                continue;
            }
            self.record_live(true);
            for handles in handles.chunks(abi::DisableChannels::MAX) {
                self.disable(disable, handles)?;
            }
            let live = self.by_id.values_mut().filter(|channel| channel.error == 0);
            live.for_each(|channel| channel.disabled = disable);
            self.record_live(false);
            if !disable {
                // The GPU may lose rings of disabled channels.
                self.ring_queued(|_| true);
            }
        }
        Ok(())
    }

    pub(super) fn disable(&self, disable: bool, channels: &[u32]) -> Result<(), GpuError> {
        self.disable_with(disable, false, channels)
    }

    /// Disables or enables channels. With `rewind`, the GPU forgets `GP_PUT` and reads it again
    /// when it is enabled.
    pub(super) fn disable_with(
        &self,
        disable: bool,
        rewind: bool,
        channels: &[u32],
    ) -> Result<(), GpuError> {
        let mut params = abi::DisableChannels {
            disable: u8::from(disable),
            rewind: u8::from(rewind),
            count: channels.len() as u32,
            ..Default::default()
        };
        for (index, channel) in channels.iter().enumerate().take(params.channels.len()) {
            params.clients[index] = self.device.rm_client.root();
            params.channels[index] = *channel;
        }
        Ok(self.device.subdevice.control(control::DISABLE_CHANNELS, &mut params)?)
    }

    /// Keeps the GPU's clocks up until further notice, or no longer. CUDA programs want this:
    /// clocks rise too slowly for short work.
    pub fn keep_clocks_up(&mut self, keep: bool) -> Result<(), GpuError> {
        if self.clocks_kept_up != keep {
            let flags = if keep { flag::BOOST_FOR_CUDA } else { flag::BOOST_CLEAR };
            let duration = if keep { flag::BOOST_WITHOUT_END } else { 0 };
            let mut params = abi::Pair { first: flags, second: duration };
            self.device.subdevice.control(control::PERF_BOOST, &mut params)?;
            self.clocks_kept_up = keep;
            self.record_live(false);
        }
        Ok(())
    }

    /// Keeps the GPU's clocks up for a while. They would fall while a gated vGPU pauses, and the
    /// vGPU would stay below its cap.
    fn boost_clocks(&mut self) {
        let boosted = self.boosted_at.is_some_and(|at| at.elapsed() < BOOST_DURATION / 2);
        if boosted || self.clocks_kept_up {
            return;
        }
        self.boosted_at = Some(Instant::now());
        let mut params = abi::Pair { first: flag::BOOST, second: BOOST_DURATION.as_secs() as u32 };
        if let Err(error) = self.device.subdevice.control(control::PERF_BOOST, &mut params) {
            log::debug!("{error}");
        }
    }
}

impl Group {
    /// Returns whether the group had work lately.
    fn is_busy(&self, now: Instant) -> bool {
        self.busy_at.is_some_and(|at| now.duration_since(at) < GROUP_LINGER)
    }

    /// Sets the time slice.
    pub(super) fn set_timeslice(&mut self, timeslice: Duration) -> Result<(), RmError> {
        let mut us = timeslice.as_micros().clamp(SLICE_RANGE_US.0, SLICE_RANGE_US.1) as u64;
        self.object.control(control::SET_TIMESLICE, &mut us)?;
        self.slice = Some(timeslice);
        Ok(())
    }
}
