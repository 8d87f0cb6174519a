//! Reconciliation of the engine time that workers report with the time that has passed.
//!
//! Each worker adds up its own engine time from the GPU's context switch log. The log may have
//! gaps: where the end of a residency is missing, the residency seems to continue while other
//! contexts run. There is one compute engine, so all workers together cannot use more time than has
//! passed. Reports of vGPUs with an open gate take precedence over reports of gated vGPUs.

use std::time::{Duration, Instant};

/// Maximum engine time that may be used in one interval and reported in a later one.
const MAX_CARRYOVER: Duration = Duration::from_millis(250);

/// Tolerance for workers that read their clocks one after the other.
const SLACK: Duration = Duration::from_millis(1);

/// Engine time that a worker reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reported {
    /// Engine time since the previous report, in nanoseconds.
    pub engine_ns: u64,
    /// The gate was closed during the whole interval.
    pub gated: bool,
}

/// Engine time that can have been used and is not charged yet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reconciler {
    last: Option<Instant>,
    available: Duration,
}

impl Reconciler {
    /// Returns the engine time to charge for each report, in nanoseconds.
    pub fn charge(&mut self, now: Instant, reports: &[Reported]) -> Vec<u64> {
        let passed = self.last.map_or(MAX_CARRYOVER, |last| now.saturating_duration_since(last));
        self.last = Some(now);
        self.available = (self.available + passed).min(passed.max(MAX_CARRYOVER));
        let charged = fit((self.available + SLACK).as_nanos(), reports);
        let total = Duration::from_nanos(charged.iter().sum());
        self.available = self.available.saturating_sub(total);
        charged
    }
}

/// Scales the reports down to a total of `available_ns`. Reports of gated vGPUs are scaled first.
fn fit(available_ns: u128, reports: &[Reported]) -> Vec<u64> {
    let sum = |gated: bool| -> u128 {
        let matching = reports.iter().filter(|report| report.gated == gated);
        matching.map(|report| u128::from(report.engine_ns)).sum()
    };
    let (open_ns, gated_ns) = (sum(false), sum(true));
    let left_ns = available_ns.saturating_sub(open_ns);
    let scaled = |report: &Reported| {
        let (limit, total) =
            if report.gated { (left_ns, gated_ns) } else { (available_ns, open_ns) };
        if total <= limit {
            return report.engine_ns;
        }
        u64::try_from(u128::from(report.engine_ns) * limit / total).unwrap_or(u64::MAX)
    };
    reports.iter().map(scaled).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn report(engine_ms: u64, gated: bool) -> Reported {
        Reported { engine_ns: engine_ms * 1_000_000, gated }
    }

    fn charged_ms(reconciler: &mut Reconciler, at: Instant, reports: &[Reported]) -> Vec<u64> {
        reconciler.charge(at, reports).into_iter().map(|ns| ns / 1_000_000).collect()
    }

    #[test]
    fn a_gated_vgpu_is_not_charged_for_the_time_of_others() {
        let mut reconciler = Reconciler::default();
        let start = Instant::now();
        reconciler.charge(start, &[report(250, false)]);
        // The second vGPU runs. The residency of the first one seems to continue behind its gate.
        for n in 1..10 {
            let reports = [report(100, true), report(99, false)];
            let charged = charged_ms(&mut reconciler, start + n * 100 * MS, &reports);
            assert!(charged[0] <= 2 && charged[1] == 99, "{charged:?}");
        }
    }

    #[test]
    fn a_late_report_is_charged_in_full() {
        let mut reconciler = Reconciler::default();
        let start = Instant::now();
        reconciler.charge(start, &[report(250, false)]);
        let first = [report(60, false)];
        assert_eq!(charged_ms(&mut reconciler, start + 100 * MS, &first), [60]);
        let both = [report(60, false), report(80, false)];
        assert_eq!(charged_ms(&mut reconciler, start + 200 * MS, &both), [60, 80]);
    }

    proptest! {
        #[test]
        fn total_charge_is_at_most_the_time_that_has_passed(
            steps in prop::collection::vec(
                (0..400_u64, prop::collection::vec((0..2_000_000_000_u64, any::<bool>()), 0..6)),
                1..40,
            ),
        ) {
            let mut reconciler = Reconciler::default();
            let (mut now, mut total) = (Instant::now(), 0);
            let mut limit = MAX_CARRYOVER;
            for (pause, reports) in steps {
                now += Duration::from_millis(pause);
                limit += Duration::from_millis(pause) + SLACK;
                let reports: Vec<_> = reports
                    .into_iter()
                    .map(|(engine_ns, gated)| Reported { engine_ns, gated })
                    .collect();
                let charged = reconciler.charge(now, &reports);
                for (charged_ns, report) in charged.iter().zip(&reports) {
                    prop_assert!(*charged_ns <= report.engine_ns);
                }
                total += charged.iter().sum::<u64>();
                prop_assert!(u128::from(total) <= limit.as_nanos());
            }
        }
    }
}
