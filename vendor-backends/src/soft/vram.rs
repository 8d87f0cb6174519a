//! The GPU's video memory, and the partitions that vGPUs have of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::mediator::hardware::Hold;
use crate::mediator::wire::Refusal;

/// How much there is, and how much of it is taken.
#[derive(Debug)]
pub struct Vram {
    bytes: u64,
    taken: Arc<AtomicU64>,
}

impl Vram {
    /// All free.
    pub fn new(bytes: u64) -> Self {
        Self { bytes, taken: Arc::default() }
    }

    /// Takes a partition.
    pub fn take(&self, bytes: u64) -> Result<Partition, Refusal> {
        let grow = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= self.bytes);
        match self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, grow) {
            Ok(_) => Ok(Partition { bytes, taken: Arc::clone(&self.taken) }),
            Err(_) => Err(Refusal::VramLimit),
        }
    }
}

/// A partition's claim on video memory; dropping it gives it back.
#[derive(Debug)]
pub struct Partition {
    bytes: u64,
    taken: Arc<AtomicU64>,
}

impl Hold for Partition {}

impl Drop for Partition {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_only_so_much() {
        let vram = Vram::new(100);
        let first = vram.take(60).unwrap();
        assert_eq!(vram.take(41).unwrap_err(), Refusal::VramLimit);
        assert_eq!(vram.take(u64::MAX).unwrap_err(), Refusal::VramLimit);
        drop(first);
        assert!(vram.take(100).is_ok());
    }
}
