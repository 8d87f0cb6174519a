//! Allocator of the software GPU's video memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::mediator::hardware::Reservation;
use crate::mediator::wire::Refusal;

/// Size of the video memory, and the allocated part of it.
#[derive(Debug)]
pub struct Vram {
    bytes: u64,
    allocated: Arc<AtomicU64>,
}

impl Vram {
    /// Creates an allocator with all memory free.
    pub fn new(bytes: u64) -> Self {
        Self { bytes, allocated: Arc::default() }
    }

    /// Allocates a partition.
    pub fn allocate(&self, bytes: u64) -> Result<Allocation, Refusal> {
        let grow = |allocated: u64| allocated.checked_add(bytes).filter(|sum| *sum <= self.bytes);
        match self.allocated.fetch_update(Ordering::AcqRel, Ordering::Acquire, grow) {
            Ok(_) => Ok(Allocation { bytes, allocated: Arc::clone(&self.allocated) }),
            Err(_) => Err(Refusal::VramLimit),
        }
    }
}

/// Allocation of a partition, freed when dropped.
#[derive(Debug)]
pub struct Allocation {
    bytes: u64,
    allocated: Arc<AtomicU64>,
}

impl Reservation for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.allocated.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_never_exceed_the_size() {
        let vram = Vram::new(100);
        let first = vram.allocate(60).unwrap();
        assert_eq!(vram.allocate(41).unwrap_err(), Refusal::VramLimit);
        assert_eq!(vram.allocate(u64::MAX).unwrap_err(), Refusal::VramLimit);
        drop(first);
        assert!(vram.allocate(100).is_ok());
    }
}
