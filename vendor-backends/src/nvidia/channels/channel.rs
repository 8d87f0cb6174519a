//! Channel of a vGPU.

use std::sync::Arc;

use mdev_core::abi::userd;
use mdev_core::gpu::{ChannelSpec, EngineKind};
use mdev_core::ids::{MemoryId, SpaceId, Token};
use nvidia_rm::rm_client::Object;

use super::exceptions::ExceptionWatch;
use super::pause::Resumption;
use super::teardown::Running;
use crate::nvidia::doorbell_poller::Registration;
use crate::nvidia::error_notifier::Notifier;
use crate::nvidia::memory::MemoryLocation;

/// Channel of a vGPU.
#[derive(Debug)]
pub(super) struct Channel {
    /// Registration with the doorbell poller, unless the guest rings itself.
    pub(super) registration: Option<Registration>,
    /// Keeps the context share, which must outlive the channel.
    pub(super) context_share: Option<Arc<Object>>,
    /// Watch of the group's exceptions, if it is by this channel. Freed first.
    pub(super) exceptions: Option<ExceptionWatch>,
    /// The channel, then its classes. Empty after the teardown.
    pub(super) objects: Vec<Arc<Object>>,
    pub(super) engine: EngineKind,
    /// Number of the engine (`NV2080_ENGINE_TYPE_*`).
    pub(super) engine_number: u32,
    /// Address space. Kept here too, because a fault removes the group and leaves the channel.
    pub(super) space: SpaceId,
    /// Number of the group.
    pub(super) group: u32,
    /// Token that the guest rings.
    pub(super) token: Token,
    /// Token of the GPU, which is another one in a restored channel.
    pub(super) gpu_token: Token,
    pub(super) vector: u32,
    pub(super) spec: ChannelSpec,
    /// What is to be done before a paused channel continues.
    pub(super) resumption: Option<Resumption>,
    pub(super) userd: Option<MemoryLocation>,
    pub(super) notifier: Arc<Notifier>,
    pub(super) error: u32,
    pub(super) error_info: u64,
    /// Disabled by the gate. The driver counts: each disabling needs one enabling.
    pub(super) disabled: bool,
    /// A program has made it, in a group of its own.
    pub(super) is_programs: bool,
}

impl Channel {
    pub(super) fn object(&self) -> Option<&Arc<Object>> {
        self.objects.first()
    }

    /// Loads a word of the USERD.
    pub(super) fn load_userd(&self, offset: u64) -> Option<u32> {
        let userd = self.userd.as_ref()?;
        userd.mapping.as_ref()?.load_u32(userd.offset + offset)
    }

    /// Stores a word of the USERD.
    pub(super) fn store_userd(&self, offset: u64, value: u32) {
        if let Some(userd) = &self.userd
            && let Some(mapping) = &userd.mapping
        {
            let _ = mapping.store_u32(userd.offset + offset, value);
        }
    }

    /// Returns whether the channel has its USERD in a guest's memory.
    pub(super) fn has_userd_in(&self, memory: MemoryId) -> bool {
        self.userd.as_ref().is_some_and(|userd| userd.memory == Some(memory))
    }

    /// Frees the classes, then the channel.
    pub(super) fn tear_down(&mut self) {
        self.registration = None;
        self.exceptions = None;
        while self.objects.pop().is_some() {}
        self.context_share = None;
        self.userd = None;
    }

    /// Returns whether the GPU has not fetched all entries. True if the USERD cannot be read.
    pub(super) fn has_queued(&self) -> bool {
        match (self.load_userd(userd::GP_GET), self.load_userd(userd::GP_PUT)) {
            (Some(get), Some(put)) => get != put,
            _ => true,
        }
    }

    /// Returns whether the ring has ever had an entry, as far as the guest's memory tells.
    pub(super) fn has_progress(&self) -> bool {
        self.load_userd(userd::GP_GET) != Some(0) || self.load_userd(userd::GP_PUT) != Some(0)
    }

    /// Returns whether the channel may ever have got work: whether it was rung for. A guest with
    /// the GPU's doorbell is trusted, and its `GP_PUT` tells.
    pub(super) fn was_used(&self) -> bool {
        match &self.registration {
            Some(registration) => registration.rings() > 0,
            None => self.load_userd(userd::GP_PUT) != Some(0),
        }
    }

    /// Returns whether the GPU may execute work of the channel.
    pub(super) fn may_be_running(&self, running: Running) -> bool {
        self.has_queued() || self.was_used() && running.is_on(self.engine)
    }
}
