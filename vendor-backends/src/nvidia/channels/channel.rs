//! Channel, and the notifier through which the driver reports its error.

use std::mem::offset_of;
use std::sync::Arc;

use ipc::mem::Mapping;
use mdev_core::abi::userd;
use mdev_core::gpu::{ChannelSpec, EngineKind, GpuError};
use mdev_core::ids::{MemoryId, SpaceId, Token};
use nvidia_rm::abi::Notification;
use nvidia_rm::rm::Node;

use super::exceptions::ExceptionWatch;
use super::pause::Resumption;
use super::teardown::Running;
use crate::nvidia::adoption::kept::{self, Kept};
use crate::nvidia::device::Device;
use crate::nvidia::doorbell_poller::Registration;
use crate::nvidia::memory::MemoryLocation;
use crate::nvidia::rm_object::Object;

/// Error notifier of a channel: a page of host memory that is not accessible to the guest.
#[derive(Debug)]
pub struct Notifier {
    mapping: Arc<Mapping>,
    pub(in crate::nvidia) memory: Arc<Object>,
}

/// Length of a notifier's memory, in bytes.
const NOTIFIER_BYTES: u64 = mdev_core::units::PAGE_SIZE;

impl Notifier {
    /// Allocates a notifier. It can serve one channel at a time. Its file is kept by a number.
    pub fn new(device: &Device, kept: u64) -> Result<Self, GpuError> {
        let memory = device.system_memory(NOTIFIER_BYTES, false)?;
        let rm_client = &device.rm_client;
        let fd = rm_client.aperture(&device.device, &memory, Node::Control, NOTIFIER_BYTES, 0)?;
        let mapping = kept::map(&fd, NOTIFIER_BYTES, true)?;
        rm_client.to_keep().keep(kept, fd);
        Ok(Self { mapping, memory })
    }

    /// Continues with the notifier of an earlier process.
    pub fn adopt(
        device: &Device,
        handle: u32,
        number: u64,
        files: &mut Kept<'_>,
    ) -> Result<Self, GpuError> {
        let mapping = kept::map(&files.take(number)?, NOTIFIER_BYTES, true)?;
        Ok(Self { mapping, memory: device.rm_client.adopt_object(Some(&device.device), handle) })
    }

    /// Clears the error of the previous channel.
    pub(in crate::nvidia) fn clear(&self) {
        for word in (0..size_of::<Notification>() as u64).step_by(4) {
            let _ = self.mapping.store_u32(word, 0);
        }
    }

    /// Returns the robust-channel error code, if the channel has faulted.
    pub(in crate::nvidia) fn error(&self) -> Option<u32> {
        // The word has the status in its upper half.
        let word = offset_of!(Notification, info16) as u64;
        let status = self.mapping.load_u32(word)? >> 16;
        if status == 0 {
            return None;
        }
        // An error with code 0 must not look like no error.
        Some(self.mapping.load_u32(offset_of!(Notification, info32) as u64)?.max(1))
    }
}

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
