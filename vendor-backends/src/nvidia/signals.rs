//! Signals between the threads of a vGPU: conditions for the worker, eventfds of the guest, and
//! stop.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use mdev_core::abi::control::VECTORS;
use mdev_core::gpu::Pending;
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Signals that the worker's main thread and the backend's threads share.
#[derive(Debug)]
pub struct Signals {
    pending: AtomicU32,
    pending_event: EventFd,
    stop_event: EventFd,
    stopped: AtomicBool,
    vectors: Mutex<[Option<Arc<OwnedFd>>; VECTORS as usize]>,
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
            vectors: Mutex::default(),
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

    /// Sets the eventfd of an interrupt vector. Returns false for an invalid vector.
    pub fn set_vector(&self, vector: u32, event: Option<OwnedFd>) -> bool {
        let mut vectors = self.vectors.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = vectors.get_mut(vector as usize);
        slot.map(|slot| *slot = event.map(Arc::new)).is_some()
    }

    /// Signals the guest on the vectors of a bit mask. Blocks if the peer made its eventfd blocking
    /// and filled the counter, so only the interrupt thread calls this.
    pub fn signal(&self, mask: u32) {
        let vectors = self.vectors.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (vector, event) in vectors.iter().enumerate() {
            if mask >> vector & 1 != 0
                && let Some(event) = event
            {
                let _ = nix::unistd::write(event, &1u64.to_ne_bytes());
            }
        }
    }
}
