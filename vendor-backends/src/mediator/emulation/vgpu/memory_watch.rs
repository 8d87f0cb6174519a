//! Checks of a vGPU's imported memory after each run.

use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;

use crate::mediator::emulation::address_space::AddressSpaces;
use crate::mediator::fault::Fault;

/// Interval between looks for lost pages of imported memory.
const LOST_PAGES_INTERVAL_NS: u64 = 100_000_000;
/// Shortest interval between messages.
const LOG_INTERVAL_NS: u64 = 60_000_000_000;

/// Times of the last checks.
#[derive(Debug, Default)]
pub(super) struct MemoryWatch {
    lost_pages_ns: u64,
    logged_ns: Option<u64>,
}

impl MemoryWatch {
    /// Returns the fault of a run that allocated host memory beyond the budget.
    pub fn check(
        &mut self,
        spaces: &mut AddressSpaces,
        vgpu: VgpuId,
        now_ns: u64,
    ) -> Option<Fault> {
        if now_ns.saturating_sub(self.lost_pages_ns) > LOST_PAGES_INTERVAL_NS {
            self.lost_pages_ns = now_ns;
            spaces.forget_lost_pages();
        }
        let bytes = spaces.allocated_beyond_budget()?;
        if self.logged_ns.is_none_or(|logged| now_ns.saturating_sub(logged) > LOG_INTERVAL_NS) {
            self.logged_ns = Some(now_ns);
            log::warn!(
                "vGPU {vgpu}: the GPU was the first to use {} MiB of the VM's memory, more than \
                 allowed: channel reset. Let the VMM allocate the memory when the VM starts",
                bytes / MIB
            );
        }
        Some(Fault::mmu(0))
    }
}
