//! Memory that CUDA manages (`cuMemAllocManaged`): pinned system memory stands in for it.
//!
//! Programs map a range of nvidia-uvm's file, which has the same addresses for CPU and GPU, and then
//! say how it is to move. The first such request gives it memory. It never moves.

use cuda_socket::MapRequest;
use mdev_core::gpu::Client;

use super::call::{Call, Stop, put_u64};
use super::files::MAX_RANGES;
use super::uvm::pool_memory;
use super::{FrontEnd, VA_END};
use crate::nvidia::sys::numbers::{status, uvm};

/// Offset of the status in the argument of requests about a range, by the request.
pub const RANGE_REQUESTS: &[(u32, usize)] = &[
    (uvm::SET_PREFERRED_LOCATION, 36),
    (uvm::UNSET_PREFERRED_LOCATION, 16),
    (uvm::ENABLE_READ_DUPLICATION, 16),
    (uvm::DISABLE_READ_DUPLICATION, 16),
    (uvm::SET_ACCESSED_BY, 32),
    (uvm::UNSET_ACCESSED_BY, 32),
    (uvm::MIGRATE, 72),
];

/// Offsets in `UVM_MIGRATE_PARAMS`: the semaphore that tells of the end, and its value.
const SEMAPHORE: usize = 40;
const PAYLOAD: usize = 48;
/// Offset of the length that was not migrated.
const REST: usize = 64;

impl FrontEnd {
    /// Carries out a request about a range of managed memory.
    pub(super) fn managed_range(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        let (va, len) = (call.u64(0)?, call.u64(8)?);
        if !self.spaces(call)?.iter().any(|space| self.memories.is_mapped(*space, va)) {
            let file = call.file();
            let before = self.files.empty.range((file, 0)..=(file, va)).next_back();
            let range = before.map(|((_, start), len)| (*start, *len));
            let end = va.checked_add(len);
            let inside = |(start, len): &(u64, u64)| end.is_some_and(|end| end <= start + len);
            let (start, _) = range.filter(inside).ok_or(Stop::Status(status::INVALID_ADDRESS))?;
            let memory = pool_memory(call)?;
            self.files.empty.remove(&(file, start));
            self.map_pool(gpu, call, memory)?;
            self.files.managed.insert(file);
        }
        if call.request() == uvm::MIGRATE {
            // All of it was migrated.
            put_u64(&mut call.argument, REST, 0).ok_or(Stop::INVALID)?;
            let (semaphore, payload) = (call.u64(SEMAPHORE)?, call.u32(PAYLOAD)?);
            if semaphore != 0 {
                call.write_block(semaphore, payload.to_le_bytes().to_vec());
            }
        }
        Ok(())
    }

    /// Returns a process that has allocated managed memory.
    pub fn process_with_managed(&self) -> Option<i32> {
        let file = self.files.managed.first()?;
        self.files.get(*file).ok().map(|file| file.process)
    }

    /// Notes that a program has mapped a range of nvidia-uvm's file that has no memory.
    pub(super) fn note_empty_range(&mut self, request: &MapRequest) {
        let MapRequest { file, offset, len, .. } = *request;
        if self.files.empty.len() < MAX_RANGES
            && offset.checked_add(len).is_some_and(|end| end <= VA_END)
        {
            self.files.empty.insert((file, offset), len);
        }
    }
}
