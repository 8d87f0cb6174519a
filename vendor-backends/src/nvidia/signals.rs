//! Signals between the threads of a vGPU: conditions for the worker, eventfds of the guest, and
//! stop.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use foreign_fds::eventfd::Signaller;
use foreign_fds::{ForeignFd, is_eventfd};
use mdev_core::abi::control::VECTORS;
use mdev_core::gpu::{GpuError, Pending};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Signals that the worker's main thread and the backend's threads share.
#[derive(Debug)]
pub struct Signals {
    pending: AtomicU32,
    pending_event: EventFd,
    stop_event: EventFd,
    stopped: AtomicBool,
    /// Thread that signals the guest: other processes can make writes to their eventfds block.
    /// Started for the first eventfd, within the worker's sandbox.
    guest: OnceLock<Signaller>,
}

impl Signals {
    /// Creates signals without pending conditions.
    pub fn new() -> std::io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self {
            pending: AtomicU32::new(0),
            pending_event: EventFd::from_flags(flags)?,
            stop_event: EventFd::from_flags(flags)?,
            stopped: AtomicBool::new(false),
            guest: OnceLock::new(),
        })
    }

    /// Returns a descriptor that polls readable while conditions are pending.
    pub fn pending_event(&self) -> BorrowedFd<'_> {
        self.pending_event.as_fd()
    }

    /// Returns a descriptor that polls readable after [`Self::stop`].
    pub fn stop_event(&self) -> BorrowedFd<'_> {
        self.stop_event.as_fd()
    }

    /// Tells the threads to end.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        // The counter stays small, so this does not block.
        let _ = self.stop_event.write(1);
    }

    /// Returns whether [`Self::stop`] was called.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Raises conditions for the worker.
    pub fn raise(&self, conditions: Pending) {
        self.pending.fetch_or(conditions.bits(), Ordering::AcqRel);
        // A write fails if the counter is full, and the descriptor is readable then.
        let _ = self.pending_event.write(1);
    }

    /// Takes the pending conditions.
    pub fn take(&self) -> Pending {
        // The counter first, so that a condition raised meanwhile makes the descriptor readable.
        let _ = self.pending_event.read();
        Pending::from_bits_truncate(self.pending.swap(0, Ordering::AcqRel))
    }

    /// Sets or clears the eventfd of an interrupt vector.
    pub fn set_vector(&self, vector: u32, event: Option<ForeignFd>) -> Result<(), GpuError> {
        if vector >= VECTORS {
            return Err(GpuError::OutOfRange("interrupt vector"));
        }
        if event.as_ref().is_some_and(|event| !is_eventfd(event.as_fd())) {
            return Err(GpuError::Invalid("an interrupt's descriptor that is no eventfd"));
        }
        if event.is_some() && self.guest.get().is_none() {
            // Only the worker's main thread sets vectors.
            let _ = self.guest.set(Signaller::new("gpu-irq")?);
        }
        if let Some(guest) = self.guest.get() {
            guest.set(vector as usize, event.map(Arc::new));
        }
        Ok(())
    }

    /// Signals the guest on the vectors of a bit mask, soon. Never waits.
    pub fn signal(&self, mask: u32) {
        if let Some(guest) = self.guest.get() {
            guest.post(u64::from(mask) & ((1 << VECTORS) - 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::pipe;
    use std::os::fd::OwnedFd;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn an_eventfd_that_blocks_delays_neither_the_caller_nor_other_vectors() {
        let signals = Signals::new().unwrap();
        let (full, free) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        full.write(u64::MAX - 1).unwrap();
        let copy = |event: &EventFd| Some(event.as_fd().try_clone_to_owned().unwrap().into());
        signals.set_vector(1, copy(&full)).unwrap();
        signals.set_vector(0, copy(&free)).unwrap();
        let start = Instant::now();
        for _ in 0..100 {
            signals.signal(0b11);
        }
        assert!(start.elapsed() < Duration::from_secs(2), "signalling does not wait");
        assert!(free.read().unwrap() > 0);
        // The guest's driver masks the vector, and the vGPU is closed.
        signals.set_vector(1, None).unwrap();
        signals.signal(0b01);
        assert!(free.read().unwrap() > 0);
        signals.set_vector(1, copy(&full)).unwrap();
        signals.signal(0b10);
        drop(signals);
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    }

    #[test]
    fn only_eventfds_and_vectors_that_exist_are_accepted() {
        let signals = Signals::new().unwrap();
        let (reader, _writer) = pipe().unwrap();
        assert!(matches!(
            signals.set_vector(0, Some(OwnedFd::from(reader).into())),
            Err(GpuError::Invalid(_))
        ));
        assert!(matches!(signals.set_vector(VECTORS, None), Err(GpuError::OutOfRange(_))));
        signals.signal(u32::MAX);
    }
}
