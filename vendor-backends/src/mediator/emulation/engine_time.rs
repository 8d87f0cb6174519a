//! Engine time of one run, by engine: copies, kernels, or neither.
//!
//! Methods before a launch count with the launch, so the clock is read only when a channel switches
//! engines.

use mdev_core::gpu::EngineKind;

use super::clock::now_ns;

/// Engine time of one run, by engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineTime {
    since_ns: u64,
    engine: Option<EngineKind>,
    /// Nanoseconds of copies.
    pub copy_ns: u64,
    /// Nanoseconds of kernels.
    pub compute_ns: u64,
}

impl EngineTime {
    /// Starts a run.
    pub fn new(now_ns: u64) -> Self {
        Self { since_ns: now_ns, ..Self::default() }
    }

    /// Attributes the time from now on to an engine.
    pub fn switch_to(&mut self, engine: EngineKind) {
        if self.engine.is_some_and(|before| before != engine) {
            *self = self.until(now_ns());
        }
        self.engine = Some(engine);
    }

    /// Returns the times if the run ended at `end_ns`. Time after `end_ns` counts for no engine.
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
    fn methods_before_a_launch_count_with_it() {
        let mut run = EngineTime::new(1000);
        assert_eq!((run.until(1500).copy_ns, run.until(1500).compute_ns), (0, 0));
        run.switch_to(EngineKind::Copy);
        let ended = run.until(1700);
        assert_eq!((ended.copy_ns, ended.compute_ns), (700, 0));
        assert_eq!(ended.until(1600).copy_ns, 700, "an earlier end adds nothing");
    }

    #[test]
    fn switching_engines_loses_no_time() {
        let start = now_ns();
        let mut run = EngineTime::new(start);
        for engine in [EngineKind::Copy, EngineKind::Compute, EngineKind::Compute, EngineKind::Copy]
        {
            run.switch_to(engine);
        }
        let end = now_ns();
        let ended = run.until(end);
        assert_eq!(ended.copy_ns + ended.compute_ns, end - start);
    }
}
