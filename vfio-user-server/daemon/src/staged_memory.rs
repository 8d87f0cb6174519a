//! Video memory that is copied through staging memory, on several threads.
//!
//! Staging memory is divided into slots. While a copy engine copies one, threads work on the
//! others.
//!
//! * [`fill`]: from a file with a stream to video memory
//! * [`read`]: from video memory to chunks of a stream
//! * `slots`: the order of the slots and of the work in them
//!
//! A worker that was taken over can make accesses to its file wait, and `mmap` most of all. In
//! `mmap` the manager waits with the lock of its own address space, which each start of a process
//! needs. [`read`] therefore maps nothing: what waits is a thread of the save. [`fill`] maps the
//! file, since otherwise the kernel lets one thread at a time write to it, which takes five times
//! as long. The manager takes staging memory only from workers on GPUs that have some.

pub mod fill;
pub mod read;
mod slots;

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
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

/// Staging memory of a worker. A worker that was compromised can pass any memory, and change the
/// file at any time.
#[derive(Debug)]
pub struct Staging {
    file: File,
    slot_bytes: u64,
}

impl Staging {
    /// Uses the first `len` bytes of a worker's file.
    ///
    /// # Errors
    ///
    /// Fails if the file is no memory, or `len` is too short for [`SLOTS`] chunks.
    pub fn new(file: File, len: u64) -> io::Result<Self> {
        let slot_bytes = len / SLOTS / MAX_CHUNK as u64 * MAX_CHUNK as u64;
        if slot_bytes == 0 {
            return Err(io::Error::other("The worker's staging memory is too short"));
        }
        MemoryFile::new(file.as_fd())?;
        Ok(Self { file, slot_bytes })
    }

    /// Returns the offset of the slot of a batch.
    fn slot(&self, batch: usize) -> u64 {
        batch as u64 % SLOTS * self.slot_bytes
    }

    /// Reads from the file.
    fn read(&self, data: &mut [u8], at: u64) -> io::Result<()> {
        self.file.read_exact_at(data, at).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => taken_away(),
            _ => error,
        })
    }

    /// Maps the file to be written.
    fn map(&self) -> io::Result<Mapped> {
        let file = MemoryFile::new(self.file.as_fd())?;
        Mapping::of_guest(&file, 0, SLOTS * self.slot_bytes, true).map(Mapped)
    }
}

/// Staging memory that is mapped here.
struct Mapped(Arc<Mapping>);

impl Mapped {
    /// Fails if accesses have found that the file was cut: what is missing reads as zeros.
    fn check(&self) -> io::Result<()> {
        if self.0.poisoned() { Err(taken_away()) } else { Ok(()) }
    }
}

fn taken_away() -> io::Error {
    io::Error::other("The worker has taken its staging memory away")
}

/// Returns how many threads copy: as many as this host has processors, up to a limit.
pub fn threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS)
}

#[cfg(test)]
mod tests;
