//! Video memory that is copied through staging memory, on several threads.
//!
//! Staging memory is divided into slots. While a copy engine copies one, threads work on the
//! others.
//!
//! * [`fill`]: from a file with a stream to video memory
//! * [`read`]: from video memory to chunks of a stream
//! * `slots`: the order of the slots and of the work in them

pub mod fill;
pub mod read;
mod slots;

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;

use ipc::mem::Mapping;
use mdev_core::memory_file::MemoryFile;
use mdev_core::stream::MAX_CHUNK;

/// Slots of staging memory. Each is copied by one request.
const SLOTS: u64 = 4;
/// Limit of threads. More do not copy faster: the memory's rate is the limit.
const MAX_THREADS: usize = 16;
/// Bytes that a thread copies at once; they stay in its core's cache.
const BLOCK: usize = 256 << 10;

/// Staging memory of a worker, mapped here.
#[derive(Debug)]
pub struct Staging {
    memory: Arc<Mapping>,
    slot_bytes: u64,
}

impl Staging {
    /// Maps the first `len` bytes of a worker's file. A worker that was compromised can pass any
    /// memory, and change the file at any time: what is missing reads as zeros.
    ///
    /// # Errors
    ///
    /// Fails if the file is no memory, or `len` is too short for [`SLOTS`] chunks.
    pub fn map(file: &File, len: u64) -> io::Result<Self> {
        let slot_bytes = len / SLOTS / MAX_CHUNK as u64 * MAX_CHUNK as u64;
        if slot_bytes == 0 {
            return Err(io::Error::other("The worker's staging memory is too short"));
        }
        let file = MemoryFile::new(file.as_fd())?;
        let memory = Mapping::of_guest(&file, 0, SLOTS * slot_bytes, true)?;
        Ok(Self { memory, slot_bytes })
    }

    /// Returns the offset of the slot of a batch.
    fn slot(&self, batch: usize) -> u64 {
        batch as u64 % SLOTS * self.slot_bytes
    }

    /// Fails if accesses have found that the file was cut.
    fn check(&self) -> io::Result<()> {
        if self.memory.poisoned() {
            return Err(io::Error::other("The worker has taken its staging memory away"));
        }
        Ok(())
    }
}

/// Returns how many threads copy: as many as this host has processors, up to a limit.
pub fn threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS)
}

#[cfg(test)]
mod tests;
