//! Counters of one vGPU, and their value at the last settlement of debts.

use crate::gpu;

/// The GPU's counters of one vGPU.
#[derive(Clone, Debug, Default)]
pub(super) struct Usage {
    counters: gpu::Usage,
    /// Engine time at the last settlement.
    settled_ns: u64,
}

impl Usage {
    /// Takes a reading of the counters.
    pub(super) fn record(&mut self, counters: &gpu::Usage) {
        self.counters = *counters;
    }

    /// Returns the counters, as last read.
    pub(super) fn counters(&self) -> &gpu::Usage {
        &self.counters
    }

    /// Returns true if the vGPU had work at the last reading.
    pub(super) fn is_runnable(&self) -> bool {
        self.counters.runnable
    }

    /// Returns the engine time between the last reading and `counters`: 0 if the counter restarted.
    pub(super) fn engine_ns_until(&self, counters: &gpu::Usage) -> u64 {
        counters.engine_ns.saturating_sub(self.counters.engine_ns)
    }

    /// Marks all engine time so far as settled.
    pub(super) fn settle(&mut self) {
        self.settled_ns = self.counters.engine_ns;
    }

    /// Returns the engine time since the last settlement, in nanoseconds.
    pub(super) fn unsettled_ns(&self) -> f64 {
        self.counters.engine_ns.saturating_sub(self.settled_ns) as f64
    }
}
