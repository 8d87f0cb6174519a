//! Threads that serve connections, each with a runtime of its own.
//!
//! A runtime has one thread, and what one connection computes delays the others of its runtime. The
//! kernel divides the CPUs among threads, so that those who may do less delay others little.

use std::io;

use tokio::runtime::{Builder, Handle, Runtime};

use crate::spawn;

/// Creates a runtime of one thread, with up to `max_blocking` threads for calls that block.
pub fn new(max_blocking: usize) -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().max_blocking_threads(max_blocking).build()
}

/// Starts a thread with a runtime as by [`new`], which runs until the process ends.
pub fn start(name: &str, max_blocking: usize) -> io::Result<Handle> {
    let runtime = new(max_blocking)?;
    let handle = runtime.handle().clone();
    spawn::thread(name, move || runtime.block_on(std::future::pending::<()>()))?;
    Ok(handle)
}
