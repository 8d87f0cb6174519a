//! Gate of one vGPU, as the GPU was told, and the time of the next check.

/// Gate of one vGPU. The vGPU may run while the gate is open.
#[derive(Clone, Debug)]
pub(super) struct Gate {
    open: bool,
    closings: u64,
    /// Time at which the gate may have to move.
    check_at_ns: Option<u64>,
}

impl Default for Gate {
    fn default() -> Self {
        Self { open: true, closings: 0, check_at_ns: None }
    }
}

impl Gate {
    pub(super) fn is_open(&self) -> bool {
        self.open
    }

    /// Returns how often the gate was closed.
    pub(super) fn closings(&self) -> u64 {
        self.closings
    }

    /// Opens or closes the gate. Returns true if the gate moved.
    pub(super) fn set(&mut self, open: bool) -> bool {
        let moved = open != self.open;
        self.open = open;
        self.closings += u64::from(moved && !open);
        moved
    }

    pub(super) fn check_at_ns(&self) -> Option<u64> {
        self.check_at_ns
    }

    /// Schedules the next check. Returns the time of the check scheduled before.
    pub(super) fn schedule_check(&mut self, at_ns: Option<u64>) -> Option<u64> {
        std::mem::replace(&mut self.check_at_ns, at_ns)
    }
}
