//! Wall clock of the engine while it has work: each instant is charged to exactly one vGPU.
//!
//! A run is charged from the end of the last run, so the time between two runs belongs to the vGPU
//! that runs next. The time of polling a vGPU's channels belongs to that vGPU, because a guest
//! decides how long it takes: by its number of channels, and by the memory of its USERDs. Polling a
//! vGPU without work is free up to [`FREE_POLL_NS`], so that an idle vGPU shows no utilization.
//!
//! An engine without work charges no vGPU: there is no contention.

/// Longest poll of a vGPU without work that the next run pays for.
const FREE_POLL_NS: u64 = 2_000;

/// Time that is not charged yet.
#[derive(Debug, Default)]
pub(super) struct BusyClock {
    /// End of the last run, plus the time that was charged to polled vGPUs since; `None` while the
    /// engine has no work.
    charged_until_ns: Option<u64>,
}

impl BusyClock {
    /// Returns whether time is charged, so that polls must be timed.
    pub fn runs(&self) -> bool {
        self.charged_until_ns.is_some()
    }

    /// Returns the start of the time to charge for a run that starts at `start_ns`.
    pub fn run_from(&self, start_ns: u64) -> u64 {
        self.charged_until_ns.map_or(start_ns, |until| until.min(start_ns))
    }

    /// Records that everything up to the end of a run was charged.
    pub fn end_run(&mut self, end_ns: u64) {
        self.charged_until_ns = Some(end_ns);
    }

    /// Returns the time to charge to a vGPU that was polled for `poll_ns`.
    pub fn end_poll(&mut self, poll_ns: u64, idle: bool) -> u64 {
        let Some(until) = &mut self.charged_until_ns else { return 0 };
        if idle && poll_ns <= FREE_POLL_NS {
            return 0;
        }
        *until += poll_ns;
        poll_ns
    }

    /// Stops the clock: the engine has no work.
    pub fn stop(&mut self) {
        self.charged_until_ns = None;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// One step of an engine.
    #[derive(Clone, Debug)]
    enum Step {
        Poll { ns: u64, idle: bool },
        Run { ns: u64 },
        Pass { ns: u64 },
        Stop,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..5_000_u64, any::<bool>()).prop_map(|(ns, idle)| Step::Poll { ns, idle }),
            (0..1_000_000_u64).prop_map(|ns| Step::Run { ns }),
            (0..10_000_u64).prop_map(|ns| Step::Pass { ns }),
            Just(Step::Stop),
        ]
    }

    proptest! {
        /// From the start of the first run to the end of the last one, charges add up to the wall
        /// clock.
        #[test]
        fn charges_add_up_to_the_busy_wall_clock(steps in prop::collection::vec(step(), 1..100)) {
            let (mut clock, mut now, mut charged) = (BusyClock::default(), 1_000, 0);
            let (mut busy_from, mut wall) = (None, 0);
            for step in steps.into_iter().chain([Step::Run { ns: 1 }, Step::Stop]) {
                match step {
                    Step::Poll { ns, idle } => {
                        now += ns;
                        charged += clock.end_poll(ns, idle);
                    }
                    Step::Run { ns } => {
                        busy_from.get_or_insert(now);
                        let from = clock.run_from(now);
                        now += ns;
                        charged += now - from;
                        clock.end_run(now);
                    }
                    Step::Pass { ns } => now += ns,
                    Step::Stop => {
                        // Time after the last run is charged to no run.
                        let open = clock.charged_until_ns.map_or(0, |until| now - until);
                        wall += busy_from.take().map_or(0, |from| now - from - open);
                        clock.stop();
                    }
                }
            }
            prop_assert_eq!(charged, wall);
        }
    }

    #[test]
    fn an_idle_engine_charges_no_poll() {
        let mut clock = BusyClock::default();
        assert_eq!(clock.end_poll(1_000_000, false), 0);
        clock.end_run(5);
        assert_eq!(clock.end_poll(FREE_POLL_NS, true), 0);
        assert_eq!(clock.end_poll(FREE_POLL_NS + 1, true), FREE_POLL_NS + 1);
        assert_eq!(clock.end_poll(10, false), 10);
        clock.stop();
        assert_eq!(clock.end_poll(10, false), 0);
        assert_eq!(clock.run_from(77), 77);
    }
}
