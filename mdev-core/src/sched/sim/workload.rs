//! Work of a simulated vGPU.

/// Pieces of work that arrive in bursts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Length of one piece of work, in nanoseconds. The GPU preempts between pieces only.
    pub piece_ns: u64,
    /// Engine time of one burst, in nanoseconds; `u64::MAX` never ends.
    pub burst_ns: u64,
    /// Pause after a burst, in nanoseconds.
    pub idle_ns: u64,
    /// Time until the first burst, in nanoseconds.
    pub start_ns: u64,
    /// Time between the starts of two bursts, in nanoseconds: if a burst ends late, the next
    /// follows after the pause. 0 if each follows after the pause.
    pub period_ns: u64,
}

impl Workload {
    /// No work.
    pub const IDLE: Self =
        Self { piece_ns: 1, burst_ns: 0, idle_ns: u64::MAX, start_ns: 0, period_ns: 0 };

    /// Returns endless work.
    pub const fn steady(piece_ns: u64) -> Self {
        Self { piece_ns, burst_ns: u64::MAX, idle_ns: 0, start_ns: 0, period_ns: 0 }
    }

    /// Returns bursts of work.
    pub const fn bursty(piece_ns: u64, burst_ns: u64, idle_ns: u64) -> Self {
        Self { piece_ns, burst_ns, idle_ns, start_ns: 0, period_ns: 0 }
    }

    /// Returns the same work, with the first burst after `start_ns`.
    #[must_use]
    pub const fn after(self, start_ns: u64) -> Self {
        Self { start_ns, ..self }
    }

    /// Returns the same work at a fixed rate, as long as bursts with their pauses are shorter than
    /// `period_ns`.
    #[must_use]
    pub const fn every(self, period_ns: u64) -> Self {
        Self { period_ns, ..self }
    }

    /// Returns true if the work never ends.
    pub const fn is_endless(&self) -> bool {
        self.burst_ns == u64::MAX
    }
}
