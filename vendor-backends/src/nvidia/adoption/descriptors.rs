//! Descriptors that are kept for the adopting worker, by number.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ipc::mem::Mapping;
use mdev_core::gpu::{AnchoredDescriptor, GpuError};
use mdev_core::ids::MemoryId;

use super::DAMAGED;

/// Connection of a manager that came after the vGPU's start.
pub const MANAGER: u64 = 0;
/// Open file of the driver.
pub const CONTROL: u64 = 1;
/// Open file of the GPU.
pub const GPU: u64 = 2;
/// [`Journal`](super::journal::Journal).
pub const JOURNAL: u64 = 3;
/// The GPU's doorbell page.
pub const DOORBELL: u64 = 4;
/// The page that the guest maps.
pub const GUEST_DOORBELL: u64 = 5;
/// Event for faults.
pub const FAULT_EVENT: u64 = 6;
/// Event for interrupts.
pub const INTERRUPT_EVENT: u64 = 7;
/// Event for exceptions.
pub const EXCEPTION_EVENT: u64 = 8;
/// Header of the context switch log.
pub const LOG_HEADER: u64 = 9;
/// Records of the context switch log.
pub const LOG_RECORDS: u64 = 10;
/// Memory of the switch probe.
pub const PROBE: u64 = 11;
/// Error notifier of the switch probe.
pub const PROBE_NOTIFIER: u64 = 12;

/// Returns the number of the eventfd of an interrupt vector.
pub const fn vector(vector: u32) -> u64 {
    1 << 32 | vector as u64
}

/// Returns the number of the error notifier with an index.
pub const fn notifier(index: u32) -> u64 {
    2 << 32 | index as u64
}

/// Returns the number of the file of imported guest memory.
pub const fn import(memory: MemoryId) -> u64 {
    3 << 32 | memory.0 as u64
}

/// Descriptors that are to be passed on, or dropped, with the next record.
#[derive(Debug, Default)]
pub struct ToKeep(Mutex<BTreeMap<u64, Option<OwnedFd>>>);

impl ToKeep {
    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, Option<OwnedFd>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a descriptor.
    pub fn keep(&self, number: u64, fd: OwnedFd) {
        if let Some(Some(before)) = self.all().insert(number, Some(fd)) {
            foreign_fds::close(before);
        }
    }

    /// Keeps a copy of a descriptor.
    pub fn keep_copy(&self, number: u64, fd: BorrowedFd<'_>) -> std::io::Result<()> {
        self.keep(number, fd.try_clone_to_owned()?);
        Ok(())
    }

    /// Keeps a descriptor no longer.
    pub fn forget(&self, number: u64) {
        let mut all = self.all();
        match all.remove(&number) {
            // It was not passed on yet. Ids are not used again.
            Some(Some(fd)) => foreign_fds::close(fd),
            _ => drop(all.insert(number, None)),
        }
    }

    /// Returns what was kept and forgotten since the last call.
    pub fn take(&self) -> Vec<AnchoredDescriptor> {
        let all = std::mem::take(&mut *self.all());
        all.into_iter().map(|(number, fd)| AnchoredDescriptor { number, fd }).collect()
    }
}

/// Descriptors that an earlier worker has kept.
pub struct Descriptors<'a>(pub &'a mut dyn FnMut(u64) -> Option<OwnedFd>);

impl Descriptors<'_> {
    /// Takes a descriptor, if it was kept.
    pub fn find(&mut self, number: u64) -> Option<OwnedFd> {
        (self.0)(number)
    }

    /// Takes a descriptor.
    pub fn take(&mut self, number: u64) -> Result<OwnedFd, GpuError> {
        self.find(number).ok_or(DAMAGED)
    }
}

impl std::fmt::Debug for Descriptors<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Descriptors")
    }
}

/// Maps the memory of a kept descriptor.
pub fn map(fd: &OwnedFd, bytes: u64, writable: bool) -> Result<Arc<Mapping>, GpuError> {
    Ok(Mapping::new(fd.as_fd(), 0, bytes, writable)?)
}
