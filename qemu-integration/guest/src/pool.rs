//! Pool of guest pages that serves many small buffers from few pinned mappings.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mdev_core::units::{MIB, PAGE_SIZE};

use crate::GuestError;
use crate::pinned::Pinned;
use crate::platform::{GuestPages, coalesce};
use crate::ranges::Ranges;

/// Length of a mapping shared by small buffers: a huge page if available.
const CHUNK: u64 = 2 * MIB;
/// Length limit of pooled buffers; longer buffers get a separate mapping.
const SMALL: u64 = MIB;

/// Chunks with free space.
#[derive(Debug, Default)]
pub struct Pool(Mutex<Vec<Arc<Chunk>>>);

#[derive(Debug)]
struct Chunk {
    memory: Pinned,
    free: Mutex<Ranges>,
}

/// Part of a chunk; returned when dropped.
#[derive(Debug)]
struct Lease {
    chunk: Arc<Chunk>,
    offset: u64,
    len: u64,
}

impl Drop for Lease {
    fn drop(&mut self) {
        lock(&self.chunk.free).give(self.offset, self.len);
    }
}

impl Pool {
    /// Allocates zeroed pages.
    pub fn allocate(&self, bytes: u64) -> Result<GuestPages, GuestError> {
        let len = bytes
            .checked_next_multiple_of(PAGE_SIZE)
            .filter(|&len| len > 0 && len <= isize::MAX as u64 / 2)
            .ok_or(GuestError::Exhausted { what: "guest memory", asked: bytes })?;
        if len > SMALL {
            return Ok(Lease::new(&Chunk::new(len)?, len)?.into_pages());
        }
        let mut chunks = lock(&self.0);
        if let Some(lease) = chunks.iter().find_map(|chunk| Lease::new(chunk, len).ok()) {
            return Ok(lease.into_pages());
        }
        let chunk = Chunk::new(CHUNK)?;
        chunks.push(chunk.clone());
        Ok(Lease::new(&chunk, len)?.into_pages())
    }
}

impl Chunk {
    fn new(len: u64) -> Result<Arc<Self>, GuestError> {
        let memory = Pinned::new(len)?;
        Ok(Arc::new(Self { memory, free: Mutex::new(Ranges::new(0, len)) }))
    }
}

impl Lease {
    fn new(chunk: &Arc<Chunk>, len: u64) -> Result<Self, GuestError> {
        let offset = lock(&chunk.free)
            .take(len, PAGE_SIZE)
            .ok_or(GuestError::Exhausted { what: "guest memory", asked: len })?;
        Ok(Self { chunk: chunk.clone(), offset, len })
    }

    fn into_pages(self) -> GuestPages {
        let (first, count) = (self.offset / PAGE_SIZE, self.len / PAGE_SIZE);
        let pages = &self.chunk.memory.pages()[first as usize..(first + count) as usize];
        let ranges = coalesce(pages.iter().copied());
        // SAFETY: the lease lies within the chunk.
        let start = unsafe { self.chunk.memory.start().add(self.offset as usize) };
        // SAFETY: the lease keeps the chunk mapped, and no other lease has these pages.
        let pages = unsafe { GuestPages::new(start, self.len as usize, ranges, Box::new(self)) };
        pages.window().fill(0);
        pages
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
