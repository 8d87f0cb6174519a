//! One channel, and where the driver reports its error.

use std::sync::Arc;

use mdev_core::abi::userd;
use mdev_core::gpu::{EngineKind, GpuError};
use mdev_core::ids::Token;

use crate::mem::Mapping;
use crate::nvidia::bells::Watched;
use crate::nvidia::device::Device;
use crate::nvidia::memory::Place;
use crate::nvidia::rm::Node;
use crate::nvidia::session::Object;
use crate::nvidia::sys::abi::notification;

/// Where the driver reports a channel's error: a page of the host's memory that no guest sees.
#[derive(Debug)]
pub struct Notifier {
    view: Arc<Mapping>,
    pub(super) memory: Arc<Object>,
}

impl Notifier {
    /// A page for one channel at a time.
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        let bytes = mdev_core::units::PAGE_SIZE;
        let memory = device.system_memory(bytes, false)?;
        let session = &device.session;
        let fd = session.aperture(&device.device, &memory, Node::Control, bytes, 0)?;
        let view = Mapping::new(std::os::fd::AsFd::as_fd(&fd), 0, bytes, true)?;
        Ok(Self { view, memory })
    }

    pub(super) fn clear(&self) {
        for word in (0..16).step_by(4) {
            let _ = self.view.store_u32(word, 0);
        }
    }

    /// The robust-channel code, once there is one.
    pub(super) fn error(&self) -> Option<u32> {
        let status = self.view.load_u32(notification::STATUS_WORD)? >> 16;
        if status == 0 {
            return None;
        }
        // An error without a number is an error all the same.
        Some(self.view.load_u32(notification::INFO32)?.max(1))
    }
}

#[derive(Debug)]
pub(super) struct Channel {
    /// Rung for, where a guest does not ring itself.
    pub(super) watched: Option<Watched>,
    /// Its classes, then itself: none once it was torn down.
    pub(super) objects: Vec<Arc<Object>>,
    pub(super) engine: EngineKind,
    /// Which of the groups that this engine had.
    pub(super) group: u32,
    pub(super) token: Token,
    pub(super) vector: u32,
    pub(super) userd: Option<Place>,
    pub(super) notifier: Arc<Notifier>,
    pub(super) error: u32,
    pub(super) error_info: u64,
    /// Kept from running. Each time takes an enabling of its own.
    pub(super) disabled: bool,
}

impl Channel {
    pub(super) fn object(&self) -> Option<&Arc<Object>> {
        self.objects.first()
    }

    pub(super) fn word(&self, offset: u64) -> Option<u32> {
        let place = self.userd.as_ref()?;
        place.view.as_ref()?.load_u32(place.offset + offset)
    }

    /// Frees it, its classes first.
    pub(super) fn tear_down(&mut self) {
        self.watched = None;
        while self.objects.pop().is_some() {}
        self.userd = None;
    }

    /// Entries that the GPU has not fetched; unknown counts as some.
    pub(super) fn has_queued(&self) -> bool {
        match (self.word(userd::GP_GET), self.word(userd::GP_PUT)) {
            (Some(get), Some(put)) => get != put,
            _ => true,
        }
    }

    /// Whether it was ever given work.
    pub(super) fn was_used(&self) -> bool {
        self.word(userd::GP_PUT) != Some(0)
    }

    /// Whether the GPU may be at work for it.
    pub(super) fn may_run(&self, running: [bool; 2]) -> bool {
        self.has_queued() || self.was_used() && running[self.engine as usize]
    }
}
