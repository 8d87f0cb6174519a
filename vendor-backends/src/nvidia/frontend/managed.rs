//! Memory that CUDA manages (`cuMemAllocManaged`): pinned system memory stands in for it.
//!
//! Programs map a range of nvidia-uvm's file, which has the same addresses for CPU and GPU, and
//! then say how it is to move. The first such request gives it memory. It never moves.

use cuda_socket::MapRequest;
use mdev_core::gpu::Client;
use nvidia_rm::abi::uvm::Migrate;
use nvidia_rm::numbers::status;

use super::call::{Call, Stop};
use super::files::MAX_RANGES;
use super::uvm::pool_memory;
use super::{NvidiaFrontEnd, VA_END};
impl NvidiaFrontEnd {
    /// Carries out a request about a range of managed memory.
    pub(super) fn managed_range(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        let (va, len) = call.range()?;
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
        Ok(())
    }

    /// `UVM_MIGRATE`, which ends at once.
    pub(super) fn migrate(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        let Migrate { semaphore, payload, .. } = call.read()?;
        self.managed_range(gpu, call)?;
        // All of it was migrated.
        call.change(|argument: &mut Migrate| argument.rest_length = 0)?;
        if semaphore != 0 {
            call.write_block(semaphore, payload.to_le_bytes().to_vec());
        }
        Ok(())
    }

    /// Returns a process that has allocated managed memory.
    pub(super) fn managing_process(&self) -> Option<i32> {
        let file = self.files.managed.first()?;
        self.files.get(*file).ok().map(|file| file.opener.process)
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
