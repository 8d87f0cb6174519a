//! Stopping a vGPU's work for a save, and continuing it.
//!
//! The driver waits for a kernel that runs before it disables a channel, and after some seconds it
//! ends the kernel. So nothing is asked of the driver unless kernels are seen to end.

use std::time::{Duration, Instant};

use mdev_core::gpu::{EngineKind, GpuError, Pending};

use super::channels::Lookup;
use super::vgpu_state::VgpuState;

/// Limit of stopping the work.
const LIMIT: Duration = Duration::from_millis(1800);
/// Limit of the wait for a kernel to end, before anything is stopped.
const LONGEST_KERNEL: Duration = Duration::from_millis(900);
/// Time after an entry was fetched within which kernels are taken to end.
const FETCHED_LATELY: Duration = Duration::from_millis(20);
/// Limit of bringing restored channels to their places.
const RESTART_LIMIT: Duration = Duration::from_secs(2);
/// Interval of looking at the channels.
const INTERVAL: Duration = Duration::from_micros(20);

/// Reasons why the work cannot be stopped.
const LONG: GpuError =
    GpuError::Later("a kernel has been running for 0.9 s; save when it has ended");
const WAITS: GpuError = GpuError::Later(
    "its work does not come to rest within 1.8 s: a kernel is long, or a channel waits for another \
     one",
);

impl VgpuState {
    /// Stops all channels between two entries. Without effect on an error.
    pub fn stop_channels(&self) -> Result<(), GpuError> {
        if self.channels().is_paused() {
            return Ok(());
        }
        let deadline = Instant::now() + LIMIT;
        self.note_errors();
        let begun = self.channels().begin_stop();
        let stopped = begun.and_then(|()| self.drain(deadline));
        if stopped.is_err() {
            self.channels().end_pause()?;
        }
        stopped
    }

    fn drain(&self, deadline: Instant) -> Result<(), GpuError> {
        for engine in [EngineKind::Compute, EngineKind::Copy] {
            self.await_progress(engine)?;
        }
        self.channels().rewind()?;
        while !self.channels().are_drained() {
            if Instant::now() > deadline {
                return Err(WAITS);
            }
            std::thread::sleep(INTERVAL);
        }
        self.channels().stop()
    }

    /// Waits until each channel with work has executed an entry, unless that was lately.
    fn await_progress(&self, engine: EngineKind) -> Result<(), GpuError> {
        if self.activity().since_fetch(engine) < FETCHED_LATELY {
            return Ok(());
        }
        let mut waiting = self.channels().unfinished(engine);
        let since = Instant::now();
        while !waiting.is_empty() {
            if since.elapsed() > LONGEST_KERNEL {
                return Err(LONG);
            }
            std::thread::sleep(INTERVAL);
            let now = self.channels().unfinished(engine);
            waiting.retain(|one| now.contains(one));
        }
        Ok(())
    }

    /// Continues after [`Self::stop_channels`], or with restored channels.
    pub fn continue_channels(&self, lookup: Lookup<'_>) -> Result<(), GpuError> {
        if !self.channels().is_paused() {
            return Ok(());
        }
        let mut lost = false;
        if self.channels().must_restart() {
            let replaced = self.channels().begin_restart(lookup)?;
            let since = Instant::now();
            while !self.channels().are_restarted() && since.elapsed() < RESTART_LIMIT {
                std::thread::sleep(INTERVAL);
            }
            lost = self.channels().finish_restart(replaced);
        }
        self.channels().end_pause()?;
        if lost {
            log::warn!("A restored channel does not come to its place: it is reset");
            self.signals.raise(Pending::CHANNEL_ERROR);
        }
        // An interrupt after an entry's work may not have been raised.
        self.signals.raise(Pending::NONSTALL);
        self.signals.signal(self.channels().vectors());
        Ok(())
    }
}
