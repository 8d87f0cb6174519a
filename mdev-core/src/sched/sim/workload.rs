//! What a simulated vGPU has to do.

/// Pieces of work that come in bursts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Length of one piece of work, in nanoseconds. It is preempted between pieces only.
    pub piece_ns: u64,
    /// Work that comes at once, in nanoseconds of engine time; `u64::MAX` never ends.
    pub burst_ns: u64,
    /// Pause after a burst is done, in nanoseconds.
    pub idle_ns: u64,
    /// Time until the first burst, in nanoseconds.
    pub first_ns: u64,
}

impl Workload {
    /// No work at all.
    pub const IDLE: Self = Self { piece_ns: 1, burst_ns: 0, idle_ns: u64::MAX, first_ns: 0 };

    /// Work without an end.
    pub const fn steady(piece_ns: u64) -> Self {
        Self { piece_ns, burst_ns: u64::MAX, idle_ns: 0, first_ns: 0 }
    }

    /// Work in bursts.
    pub const fn bursty(piece_ns: u64, burst_ns: u64, idle_ns: u64) -> Self {
        Self { piece_ns, burst_ns, idle_ns, first_ns: 0 }
    }

    /// The same, beginning later.
    #[must_use]
    pub const fn after(self, first_ns: u64) -> Self {
        Self { first_ns, ..self }
    }

    /// True where there is always work.
    pub const fn is_endless(&self) -> bool {
        self.burst_ns == u64::MAX
    }
}
