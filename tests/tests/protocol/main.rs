//! The vfio-user protocol, as raw bytes on a socket.
//!
//! * [`battery`]: checks that hold for every device
//! * [`sessions`]: the battery and more against [`device`], a device with one of everything
//! * [`requests`]: server requests, migration, dirty page logging
//! * [`vgpu`]: the battery against a vGPU of `vgpud`

// Clippy recognizes only functions marked as tests, not the functions that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod battery;
mod device;
mod requests;
mod sessions;
mod vgpu;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Waits up to 10 s until `holds` returns true.
#[track_caller]
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Excludes all other tests of this program, because tests count the descriptors of this process.
fn exclusive() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}
