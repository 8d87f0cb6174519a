//! Backoff of new channels after faults.
//!
//! A guest gains nothing by creating channels that fault: each further fault delays the next
//! channel longer.

/// Number of faults without a delay, if a second passes without a fault.
const FREE_FAULTS: u32 = 4;
/// Time without faults after which the count restarts.
const RESET_NS: u64 = 1_000_000_000;
/// Delay after one more fault. Doubles with each fault up to 256 times this value.
const DELAY_NS: u64 = 1_000_000;

/// Count of recent faults.
#[derive(Debug, Default)]
pub(super) struct FaultBackoff {
    faults: u32,
    last_fault_ns: u64,
}

impl FaultBackoff {
    /// Counts a fault.
    pub fn count(&mut self, now_ns: u64) {
        let restart = now_ns.saturating_sub(self.last_fault_ns) > RESET_NS;
        self.faults = if restart { 1 } else { self.faults.saturating_add(1) };
        self.last_fault_ns = now_ns;
    }

    /// Returns the time from which a new channel may run.
    pub fn run_after_ns(&self) -> u64 {
        match self.faults.checked_sub(FREE_FAULTS) {
            None | Some(0) => 0,
            Some(more) => self.last_fault_ns + (DELAY_NS << more.min(8)),
        }
    }
}
