//! Waking the engine thread.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::sys::eventfd::{EfdFlags, EventFd};

/// Eventfd that wakes the engine after a change.
#[derive(Clone, Debug)]
pub struct EngineWaker(Arc<File>);

impl EngineWaker {
    pub(super) fn new() -> io::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self(Arc::new(File::from(OwnedFd::from(event)))))
    }

    /// Wakes the engine.
    pub fn wake(&self) {
        let _ = (&*self.0).write(&1u64.to_ne_bytes());
    }

    /// Clears pending wake-ups.
    pub(super) fn clear(&self) {
        let _ = (&*self.0).read(&mut [0; 8]);
    }
}

impl AsFd for EngineWaker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
