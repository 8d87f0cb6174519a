//! What a vGPU's threads tell each other: conditions for the worker, eventfds for the guest, and that it is over.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use mdev_core::abi::control::VECTORS;
use mdev_core::gpu::Pending;
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Shared by the worker's own thread and those of the backend.
#[derive(Debug)]
pub struct Signals {
    pending: AtomicU32,
    changed: EventFd,
    stop: EventFd,
    stopped: AtomicBool,
    vectors: Mutex<[Option<Arc<OwnedFd>>; VECTORS as usize]>,
}

impl Signals {
    /// Quiet ones.
    pub fn new() -> std::io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self {
            pending: AtomicU32::new(0),
            changed: EventFd::from_flags(flags)?,
            stop: EventFd::from_flags(flags)?,
            stopped: AtomicBool::new(false),
            vectors: Mutex::default(),
        })
    }

    /// Polls readable while there is something to take.
    pub fn changed(&self) -> BorrowedFd<'_> {
        self.changed.as_fd()
    }

    /// Polls readable once it is over.
    pub fn stop_event(&self) -> BorrowedFd<'_> {
        self.stop.as_fd()
    }

    /// Ends the threads.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        // Its counter starts at 0: this cannot block, and a second time changes nothing.
        let _ = self.stop.write(1);
    }

    /// True once it is over.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Raises conditions for the worker.
    pub fn raise(&self, what: Pending) {
        self.pending.fetch_or(what.bits(), Ordering::AcqRel);
        // A full counter is readable too.
        let _ = self.changed.write(1);
    }

    /// Takes what was raised.
    pub fn take(&self) -> Pending {
        // The counter first: what is raised after that makes it readable again.
        let _ = self.changed.read();
        Pending::from_bits_truncate(self.pending.swap(0, Ordering::AcqRel))
    }

    /// Sets the eventfd of a vector; false where there is no such vector.
    pub fn set_vector(&self, vector: u32, event: Option<OwnedFd>) -> bool {
        let mut vectors = self.vectors.lock().unwrap_or_else(PoisonError::into_inner);
        let place = vectors.get_mut(vector as usize);
        place.map(|place| *place = event.map(Arc::new)).is_some()
    }

    /// Signals the guest on the vectors that are set in `which`. May block on an eventfd whose owner wants that: only
    /// the thread that does nothing else calls it.
    pub fn signal(&self, which: u32) {
        let vectors = self.vectors.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (vector, event) in vectors.iter().enumerate() {
            if which >> vector & 1 != 0
                && let Some(event) = event
            {
                let _ = nix::unistd::write(event, &1u64.to_ne_bytes());
            }
        }
    }
}
