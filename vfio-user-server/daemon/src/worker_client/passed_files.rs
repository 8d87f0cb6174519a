//! Files that workers pass to the manager.
//!
//! A worker that was compromised can pass any file, whose close may wait for ever. It costs the
//! manager one thread: from then on no files are taken from it, until its vGPU is stopped.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use foreign_fds::ForeignFd;

/// Workers that have passed what is no file of a vGPU, by their control sockets.
static REFUSED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn refused<T>(change: impl FnOnce(&mut BTreeSet<PathBuf>) -> T) -> T {
    change(&mut REFUSED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Checks that files are taken from a worker.
///
/// # Errors
///
/// Fails if the worker has passed another file, or if files of so many workers cannot be closed
/// that the manager takes no more.
pub fn check(control: &Path) -> io::Result<()> {
    if refused(|workers| workers.contains(control)) {
        return Err(io::Error::other(
            "The worker has passed a file that is not memory, and may have been taken over; stop the vGPU and start it again",
        ));
    }
    if foreign_fds::is_exhausted() {
        return Err(io::Error::other(
            "Too many files that workers have passed cannot be closed; stop the vGPUs that vgpud's log names, or restart vgpud with SIGUSR1",
        ));
    }
    Ok(())
}

/// Closes what a worker has passed on one thread, and takes no more files from the worker.
pub fn refuse(control: &Path, fds: impl IntoIterator<Item = ForeignFd>) {
    if refused(|workers| workers.insert(control.to_owned())) {
        log::warn!(
            "The worker behind {} passes a file that is not memory; no more are taken from it",
            control.display()
        );
    }
    foreign_fds::close_all(fds);
}

/// Takes files from the next worker at a socket.
pub fn forget(control: &Path) {
    refused(|workers| workers.remove(control));
}
