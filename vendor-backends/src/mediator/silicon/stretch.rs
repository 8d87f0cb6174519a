//! Which engine a channel's turn was for: copies, kernels, or neither.
//!
//! The methods that lead to a launch count with it, so the clock is read only where a channel goes over from one engine
//! to the other.

use mdev_core::gpu::EngineKind;

use super::clock::now_ns;

/// The time of one turn, told apart by engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stretch {
    since_ns: u64,
    engine: Option<EngineKind>,
    /// Nanoseconds of copies so far.
    pub copy_ns: u64,
    /// Nanoseconds of kernels so far.
    pub compute_ns: u64,
}

impl Stretch {
    /// A turn that begins now.
    pub fn new(now_ns: u64) -> Self {
        Self { since_ns: now_ns, ..Self::default() }
    }

    /// From here on it is for that engine.
    pub fn turn_to(&mut self, engine: EngineKind) {
        if self.engine.is_some_and(|before| before != engine) {
            *self = self.until(now_ns());
        }
        self.engine = Some(engine);
    }

    /// The same, ended at that time. What was used beyond it is nobody's.
    #[must_use]
    pub fn until(self, end_ns: u64) -> Self {
        let time = end_ns.saturating_sub(self.since_ns);
        let (copy, compute) = match self.engine {
            Some(EngineKind::Copy) => (time, 0),
            Some(EngineKind::Compute) => (0, time),
            None => (0, 0),
        };
        Self {
            since_ns: end_ns,
            engine: self.engine,
            copy_ns: self.copy_ns + copy,
            compute_ns: self.compute_ns + compute,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leads_to_a_launch_counts_with_it() {
        let mut turn = Stretch::new(1000);
        assert_eq!((turn.until(1500).copy_ns, turn.until(1500).compute_ns), (0, 0));
        turn.turn_to(EngineKind::Copy);
        let ended = turn.until(1700);
        assert_eq!((ended.copy_ns, ended.compute_ns), (700, 0));
        assert_eq!(ended.until(1600).copy_ns, 700, "time does not run backwards");
    }

    #[test]
    fn all_of_a_turn_is_somebodys_when_it_goes_from_one_to_the_other() {
        let start = now_ns();
        let mut turn = Stretch::new(start);
        for engine in [EngineKind::Copy, EngineKind::Compute, EngineKind::Compute, EngineKind::Copy]
        {
            turn.turn_to(engine);
        }
        let end = now_ns();
        let ended = turn.until(end);
        assert_eq!(ended.copy_ns + ended.compute_ns, end - start);
    }
}
