//! Buffer of a request: pages anywhere in guest memory.

use mdev_core::abi::queue::{Failure, MAX_PAGES, PAGE_BYTES, Submission};
use mdev_core::ids::GuestPa;
use mdev_core::mem::{DmaAccess, SharedGuestMemory};
use mdev_core::units::is_aligned;
use serde::{Deserialize, Serialize};

/// Buffer of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffer {
    pages: Vec<u64>,
}

impl Buffer {
    /// Returns the buffer of a submission, and the request in it. Each is read once.
    pub fn open(
        memory: &SharedGuestMemory,
        submission: &Submission,
    ) -> Result<(Self, Vec<u8>), Failure> {
        let count = submission.pages as usize;
        let len = submission.bytes as usize;
        let inside = (1..=MAX_PAGES).contains(&count) && len <= count * PAGE_BYTES;
        if !inside || !is_aligned(submission.list, 8) || submission.reserved != 0 {
            return Err(Failure::Submission);
        }
        let mut memory = memory.lock();
        let mut list = [0; MAX_PAGES * 8];
        let list = &mut list[..count * 8];
        memory.read(GuestPa(submission.list), list).map_err(|_| Failure::Access)?;
        let pages: Vec<_> =
            list.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let access = DmaAccess::READ | DmaAccess::WRITE;
        for page in &pages {
            if !is_aligned(*page, PAGE_BYTES as u64) {
                return Err(Failure::Submission);
            }
            let checked = memory.check(GuestPa(*page), PAGE_BYTES as u64, access);
            checked.map_err(|_| Failure::Access)?;
        }
        let mut request = vec![0; len];
        for (page, bytes) in pages.iter().zip(request.chunks_mut(PAGE_BYTES)) {
            memory.read(GuestPa(*page), bytes).map_err(|_| Failure::Access)?;
        }
        Ok((Self { pages }, request))
    }

    /// Returns the length in bytes.
    pub fn capacity(&self) -> usize {
        self.pages.len() * PAGE_BYTES
    }

    /// Replaces the start of the buffer by a reply that fits.
    pub fn write(&self, memory: &SharedGuestMemory, reply: &[u8]) -> Result<(), Failure> {
        let mut memory = memory.lock();
        for (page, bytes) in self.pages.iter().zip(reply.chunks(PAGE_BYTES)) {
            memory.write(GuestPa(*page), bytes).map_err(|_| Failure::Access)?;
        }
        Ok(())
    }
}
