//! Saving and restoring a vGPU.

use mdev_core::gpu::{Aperture, GpuError, SavedChannel, SavedClient, StagedCopy};
use mdev_core::ids::SpaceId;
use std::time::{Duration, Instant};

use super::NvidiaClient;
use crate::nvidia::channels::Origin;
use crate::nvidia::vram_copier::{STAGING_BYTES, VramCopier};

/// Limit of the wait until channels are made again soon after others have ended.
const LATER_LIMIT: Duration = Duration::from_secs(3);
const LATER_INTERVAL: Duration = Duration::from_millis(5);

const NOT_PAUSED: GpuError = GpuError::Invalid("the vGPU is not paused");

impl NvidiaClient {
    fn origin(&self) -> Origin {
        Origin { gpu: self.grant.gpu.name.clone(), driver: self.driver.clone() }
    }

    fn check_paused(&self) -> Result<(), GpuError> {
        if self.state.channels().is_paused() { Ok(()) } else { Err(NOT_PAUSED) }
    }

    pub(super) fn check_saveable(&mut self) -> Result<(), GpuError> {
        self.state.note_errors();
        self.state.channels().check_save()?;
        self.memory.save().map(drop).ok_or(GpuError::Unsupported("saving memory of CUDA programs"))
    }

    /// Stops the channels. Without effect on an error.
    pub(super) fn stop(&mut self) -> Result<(), GpuError> {
        self.check_saveable()?;
        self.state.stop_channels()
    }

    /// Continues after [`Self::stop`], or with restored channels.
    pub(super) fn continue_work(&mut self) -> Result<(), GpuError> {
        self.copier = None;
        let memory = &self.memory;
        self.state.continue_channels(&|space, va| memory.guest_memory(space, va))
    }

    pub(super) fn saved_client(&mut self) -> Result<SavedClient, GpuError> {
        self.check_paused()?;
        let saved = self.memory.save().ok_or(GpuError::Unsupported("saving CUDA programs"))?;
        let (spaces, mappings) = saved;
        let channels = self.state.channels().save(&self.origin())?;
        Ok(SavedClient { spaces, mappings, channels })
    }

    pub(super) fn restore_saved_space(&mut self, space: SpaceId) -> Result<(), GpuError> {
        self.check_paused()?;
        self.position.touch();
        self.memory.restore_space(space)
    }

    pub(super) fn restore_saved_channel(&mut self, saved: &SavedChannel) -> Result<(), GpuError> {
        self.check_paused()?;
        self.position.touch();
        let origin = self.origin();
        let since = Instant::now();
        loop {
            let userd = self.memory.userd(saved.spec.userd)?;
            let space = self.memory.space(saved.spec.space)?.space().clone();
            let lookup = |space, va| self.memory.guest_memory(space, va);
            let restored = self.state.channels().restore(saved, &origin, userd, &space, &lookup);
            match restored {
                Err(GpuError::Later(_)) if since.elapsed() < LATER_LIMIT => {
                    std::thread::sleep(LATER_INTERVAL);
                }
                restored => return restored,
            }
        }
    }

    /// Clears video memory. The driver does, when it allocates the partition again.
    pub(super) fn clear_vram(&mut self) -> Result<(), GpuError> {
        self.position.touch();
        self.copier = None;
        self.memory.renew_vram().map(drop)
    }

    fn copier(&mut self) -> Result<&mut VramCopier, GpuError> {
        self.check_paused()?;
        if self.copier.is_none() {
            let (doorbell, engine) = {
                let channels = self.state.channels();
                (channels.doorbell(), channels.copy_engine())
            };
            let vram = self.memory.partition()?;
            self.copier = Some(VramCopier::new(&self.device, doorbell, engine, vram)?);
        }
        self.copier.as_mut().ok_or(NOT_PAUSED)
    }

    pub(super) fn staging_memory(&mut self) -> Result<Aperture, GpuError> {
        let fd = self.copier()?.staging()?;
        Ok(Aperture { fd, offset: 0, len: STAGING_BYTES })
    }

    pub(super) fn copy_vram(&mut self, copy: StagedCopy) -> Result<(), GpuError> {
        let copied = self.copier()?.copy(copy);
        if copied.is_err() {
            // It may still be writing to its memory.
            self.copier = None;
        }
        copied
    }
}
