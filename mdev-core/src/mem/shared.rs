//! Guest memory that several threads use, and its atomic accesses.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_memory::{Bytes, GuestAddress};

use super::{DmaAccess, GuestMemory, Unreachable};
use crate::ids::GuestPa;

/// Guest memory that several threads use. Threads that need the GPU as well lock its client first.
#[derive(Clone, Debug, Default)]
pub struct SharedGuestMemory(Arc<Mutex<GuestMemory>>);

impl SharedGuestMemory {
    /// Returns the memory, for a few accesses.
    pub fn lock(&self) -> MutexGuard<'_, GuestMemory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GuestMemory {
    /// Loads an aligned word. Accesses after it see what the guest stored before the word.
    pub fn load_u32(&mut self, address: GuestPa) -> Result<u32, Unreachable> {
        let segments = self.segments(address, 4, DmaAccess::READ)?;
        let loaded = self.shared.load(GuestAddress(address.0), Ordering::Acquire);
        self.withdraw_truncated(&segments)?;
        loaded.map_err(|_| Unreachable(address))
    }

    /// Stores an aligned word. The guest sees accesses before it when it sees the word.
    pub fn store_u32(&mut self, address: GuestPa, value: u32) -> Result<(), Unreachable> {
        let segments = self.segments(address, 4, DmaAccess::WRITE)?;
        self.note_written(address, 4);
        let stored = self.shared.store(value, GuestAddress(address.0), Ordering::Release);
        self.withdraw_truncated(&segments)?;
        stored.map_err(|_| Unreachable(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::shared_ram;

    #[test]
    fn words_are_aligned_and_inside() {
        let memory = SharedGuestMemory::default();
        shared_ram(&mut memory.lock(), 0x1000, 0x1000);
        let mut memory = memory.lock();
        memory.store_u32(GuestPa(0x1ffc), 7).unwrap();
        assert_eq!(memory.load_u32(GuestPa(0x1ffc)), Ok(7));
        for address in [0x1ffd, 0x2000, 0xffc, u64::MAX - 2] {
            assert!(memory.load_u32(GuestPa(address)).is_err(), "{address:#x}");
            assert!(memory.store_u32(GuestPa(address), 7).is_err(), "{address:#x}");
        }
    }
}
