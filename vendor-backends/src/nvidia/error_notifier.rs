//! Error notifiers, by which the driver reports that a channel has failed.

use std::mem::offset_of;
use std::sync::Arc;

use ipc::mem::Mapping;
use mdev_core::gpu::GpuError;
use nvidia_rm::abi::Notification;
use nvidia_rm::rm::Node;
use nvidia_rm::rm_client::Object;

use super::adoption::descriptors::{self, Descriptors};
use super::device::Device;

/// Error notifier of a channel: a page of host memory that is not accessible to the guest.
#[derive(Debug)]
pub struct Notifier {
    mapping: Arc<Mapping>,
    pub(super) memory: Arc<Object>,
}

/// Length of a notifier's memory, in bytes.
const NOTIFIER_BYTES: u64 = mdev_core::units::PAGE_SIZE;

impl Notifier {
    /// Allocates a notifier. It can serve one channel at a time. Its file is kept by a number.
    pub fn new(device: &Device, kept: u64) -> Result<Self, GpuError> {
        let memory = device.system_memory(NOTIFIER_BYTES, false)?;
        let rm_client = &device.rm_client;
        let fd = rm_client.aperture(&device.device, &memory, Node::Control, NOTIFIER_BYTES, 0)?;
        let mapping = descriptors::map(&fd, NOTIFIER_BYTES, true)?;
        device.to_keep.keep(kept, fd);
        Ok(Self { mapping, memory })
    }

    /// Adopts the notifier of an earlier process.
    pub fn adopt(
        device: &Device,
        handle: u32,
        number: u64,
        files: &mut Descriptors<'_>,
    ) -> Result<Self, GpuError> {
        let mapping = descriptors::map(&files.take(number)?, NOTIFIER_BYTES, true)?;
        Ok(Self { mapping, memory: device.rm_client.adopt_object(Some(&device.device), handle) })
    }

    /// Clears the error of the previous channel.
    pub(super) fn clear(&self) {
        for word in (0..size_of::<Notification>() as u64).step_by(4) {
            let _ = self.mapping.store_u32(word, 0);
        }
    }

    /// Returns the robust-channel error code, if the channel has faulted.
    pub(super) fn error(&self) -> Option<u32> {
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
