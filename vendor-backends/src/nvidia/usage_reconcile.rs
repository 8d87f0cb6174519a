//! Reconciliation of the engine time that workers report with the time that has passed.
//!
//! Each worker adds up its own engine time from the GPU's context switch log. The log may have
//! gaps: where the end of a residency is missing, the residency seems to continue while other
//! contexts run. And a worker that a guest has compromised reports any number. The rules:
//!
//! 1. A worker cannot use more time than has passed since its previous report. A report beyond that
//!    is cut, and the worker is suspect for a while.
//! 2. There is one compute engine, so all workers together cannot use more time than has passed.
//!    What exceeds that is not charged to gated vGPUs first, then to suspect workers, then to the
//!    largest reports.
//! 3. A worker that is neither gated nor suspect loses at most [`FORGIVEN_PART`] of the time to
//!    rule 2: enough for gaps in the log. Beyond that the reports contradict each other for good,
//!    so one of them is a lie, and each worker is charged what it reports. A lie then costs the
//!    liar, and the charges of others do not change.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

/// Maximum engine time that may be used in one interval and reported in a later one.
const MAX_CARRYOVER: Duration = Duration::from_millis(250);

/// Tolerance for workers that read their clocks one after the other.
const SLACK: Duration = Duration::from_millis(1);

/// Part of the time (1/50) that reports of other workers can take off a worker's charge.
const FORGIVEN_PART: u32 = 50;

/// Maximum time that reports of other workers can take off a worker's charge at once.
const MAX_FORGIVEN: Duration = Duration::from_millis(100);

/// Time for which a worker is suspect after a report that cannot be true.
const SUSPECT_FOR: Duration = Duration::from_secs(60);

/// Limit of what a worker can report: the time that has passed, as far as it is not reported yet.
#[derive(Clone, Copy, Debug)]
pub struct ReportLimit {
    last: Instant,
    available: Duration,
}

impl ReportLimit {
    /// Creates a limit for what is reported from `start` on.
    pub fn new(start: Instant) -> Self {
        Self { last: start, available: Duration::ZERO }
    }

    /// Returns the part of a report that can be true.
    pub fn admit(&mut self, now: Instant, reported: Duration) -> Duration {
        self.pass(now);
        let admitted = reported.min(self.available + SLACK);
        self.available = self.available.saturating_sub(admitted);
        admitted
    }

    /// Adds the time since the previous call, and returns that time.
    fn pass(&mut self, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.last);
        self.last = now;
        self.available = (self.available + passed).min(passed.max(MAX_CARRYOVER));
        passed
    }
}

/// Account of a worker.
#[derive(Clone, Copy, Debug)]
pub struct Account {
    limit: ReportLimit,
    /// Time that may be taken off the charge because of other workers' reports.
    forgivable: Duration,
    suspect_since: Option<Instant>,
}

impl Account {
    /// Creates the account of a worker that starts at `start`.
    pub fn new(start: Instant) -> Self {
        let limit = ReportLimit::new(start);
        Self { limit, forgivable: MAX_FORGIVEN, suspect_since: None }
    }

    /// Returns the part of a report that can be true. The worker becomes suspect if that is not
    /// all.
    fn admit(&mut self, now: Instant, reported: Duration) -> Duration {
        let passed = now.saturating_duration_since(self.limit.last);
        self.forgivable = (self.forgivable + passed / FORGIVEN_PART).min(MAX_FORGIVEN);
        let admitted = self.limit.admit(now, reported);
        if admitted < reported {
            self.suspect_since = Some(now);
        }
        admitted
    }

    /// Returns whether the worker has recently reported more time than had passed.
    pub fn is_suspect(&self, now: Instant) -> bool {
        self.suspect_since.is_some_and(|at| now.saturating_duration_since(at) < SUSPECT_FOR)
    }
}

/// Engine time that a worker reports.
#[derive(Debug)]
pub struct Reported<'a> {
    /// Account of the worker.
    pub account: &'a mut Account,
    /// Engine time since the previous report, in nanoseconds.
    pub engine_ns: u64,
    /// The gate was closed during the whole interval.
    pub gated: bool,
}

/// Engine time that can have been used and is not charged yet.
#[derive(Clone, Copy, Debug)]
pub struct Reconciler {
    limit: ReportLimit,
}

impl Reconciler {
    /// Creates a reconciler for reports from `start` on.
    pub fn new(start: Instant) -> Self {
        Self { limit: ReportLimit::new(start) }
    }

    /// Returns the engine time to charge for each report, in nanoseconds.
    pub fn charge(&mut self, now: Instant, reports: &mut [Reported<'_>]) -> Vec<u64> {
        let mut charges: Vec<Duration> = reports
            .iter_mut()
            .map(|report| report.account.admit(now, Duration::from_nanos(report.engine_ns)))
            .collect();
        self.limit.pass(now);
        let total: Duration = charges.iter().sum();
        let mut excess = total.saturating_sub(self.limit.available + SLACK);
        if !excess.is_zero() {
            reduce(now, reports, &mut charges, &mut excess);
        }
        let total: Duration = charges.iter().sum();
        self.limit.available = self.limit.available.saturating_sub(total);
        charges.into_iter().map(|charge| charge.as_nanos() as u64).collect()
    }
}

/// Reduces the charges by `excess`: those of gated vGPUs, of suspect workers, then the largest.
fn reduce(
    now: Instant,
    reports: &mut [Reported<'_>],
    charges: &mut [Duration],
    excess: &mut Duration,
) {
    let mut order: Vec<usize> = (0..reports.len()).collect();
    order.sort_by_key(|&index| {
        let (report, charge) = (&reports[index], charges[index]);
        (!report.gated, !report.account.is_suspect(now), Reverse(charge))
    });
    for index in order {
        let (report, charge) = (&mut reports[index], &mut charges[index]);
        let mut part = (*charge).min(*excess);
        if !report.gated && !report.account.is_suspect(now) {
            part = part.min(report.account.forgivable);
            report.account.forgivable -= part;
        }
        *charge -= part;
        *excess -= part;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Workers and their reconciler.
    struct Workers {
        reconciler: Reconciler,
        accounts: Vec<Account>,
    }

    impl Workers {
        fn new(count: usize, start: Instant) -> Self {
            let accounts = vec![Account::new(start); count];
            Self { reconciler: Reconciler::new(start), accounts }
        }

        /// Charges reports of engine time, each with whether the vGPU is gated.
        fn charge(&mut self, at: Instant, reports: &[(Duration, bool)]) -> Vec<Duration> {
            let reports = self.accounts.iter_mut().zip(reports);
            let mut reports: Vec<_> = reports
                .map(|(account, (engine_time, gated))| Reported {
                    account,
                    engine_ns: engine_time.as_nanos() as u64,
                    gated: *gated,
                })
                .collect();
            let charged = self.reconciler.charge(at, &mut reports);
            charged.into_iter().map(Duration::from_nanos).collect()
        }
    }

    #[test]
    fn a_gated_vgpu_is_not_charged_for_the_time_of_others() {
        let start = Instant::now();
        let mut workers = Workers::new(2, start);
        // The second vGPU runs. The residency of the first one seems to continue behind its gate.
        for n in 1..10 {
            let reports = [(100 * MS, true), (99 * MS, false)];
            let charged = workers.charge(start + n * 100 * MS, &reports);
            assert!(charged[0] <= 2 * MS && charged[1] == 99 * MS, "{charged:?}");
        }
    }

    #[test]
    fn a_late_report_is_charged_in_full() {
        let start = Instant::now();
        let mut workers = Workers::new(2, start);
        assert_eq!(workers.charge(start + 100 * MS, &[(60 * MS, false)]), [60 * MS]);
        let both = [(60 * MS, false), (80 * MS, false)];
        assert_eq!(workers.charge(start + 200 * MS, &both), [60 * MS, 80 * MS]);
    }

    #[test]
    fn a_gap_in_the_log_is_not_charged() {
        let start = Instant::now();
        let mut workers = Workers::new(2, start);
        // The first vGPU seems to be resident all the time, and the second one is.
        let charged = workers.charge(start + 100 * MS, &[(100 * MS, false), (60 * MS, false)]);
        assert!(charged[0] <= 42 * MS && charged[1] == 60 * MS, "{charged:?}");
    }

    #[test]
    fn a_lie_does_not_change_the_charge_of_others() {
        // Engine time that the liar reports for each 100 ms, of which the other uses 90.
        for lie in [50 * MS, 85 * MS, 100 * MS, 101 * MS, Duration::from_secs(1 << 30)] {
            let start = Instant::now();
            let mut workers = Workers::new(2, start);
            let mut totals = [Duration::ZERO; 2];
            for n in 1..=100u32 {
                let charged =
                    workers.charge(start + n * 100 * MS, &[(lie, false), (90 * MS, false)]);
                totals[0] += charged[0];
                totals[1] += charged[1];
            }
            let [liar, honest] = totals;
            assert!((8700 * MS..=9000 * MS).contains(&honest), "{lie:?}: {honest:?}");
            assert!(liar <= 10_400 * MS, "{lie:?}: {liar:?}");
        }
    }

    /// Intervals, each with the part of it that is used by each honest worker, in percent of what
    /// the workers before have left, and what each liar reports, in microseconds.
    fn intervals() -> impl Strategy<Value = Vec<(u64, [u64; 3], [u64; 2])>> {
        let lie = prop_oneof![0..400_000_u64, any::<u64>().prop_map(|lie| lie >> 10)];
        let lies = [lie.clone(), lie];
        prop::collection::vec((1..400_u64, [0..=100_u64, 0..=100, 0..=100], lies), 1..40)
    }

    proptest! {
        #[test]
        fn whatever_others_report_an_honest_worker_is_charged_what_it_used(
            intervals in intervals(),
        ) {
            let start = Instant::now();
            let mut workers = Workers::new(5, start);
            let (mut now, mut used, mut charged) = (start, [Duration::ZERO; 5], [Duration::ZERO; 5]);
            let mut intervals_passed = 0;
            for (ms, parts, lies) in intervals {
                now += Duration::from_millis(ms);
                intervals_passed += 1;
                let mut left = Duration::from_millis(ms);
                let mut reports = Vec::new();
                for part in parts {
                    let one = left * part as u32 / 100;
                    left -= one;
                    reports.push((one, false));
                }
                reports.extend(lies.map(|lie| (Duration::from_micros(lie), false)));
                for (index, one) in workers.charge(now, &reports).into_iter().enumerate() {
                    used[index] += reports[index].0;
                    charged[index] += one;
                }
            }
            let elapsed = now.duration_since(start);
            for index in 0..3 {
                prop_assert!(charged[index] <= used[index]);
                let lost = used[index].saturating_sub(charged[index]);
                prop_assert!(lost <= MAX_FORGIVEN + elapsed / FORGIVEN_PART, "{lost:?}");
            }
            // A worker is charged no more than the time that has passed.
            for charged in charged {
                prop_assert!(charged <= elapsed + MAX_CARRYOVER + SLACK * intervals_passed);
            }
        }

        #[test]
        fn with_reports_that_are_possible_or_found_out_the_sum_is_the_time_that_has_passed(
            intervals in intervals(),
        ) {
            let start = Instant::now();
            let mut workers = Workers::new(5, start);
            let (mut now, mut total) = (start, Duration::ZERO);
            let mut intervals_passed = 1;
            for (ms, parts, lies) in intervals {
                now += Duration::from_millis(ms);
                intervals_passed += 1;
                let mut left = Duration::from_millis(ms);
                let mut reports: Vec<_> = parts
                    .into_iter()
                    .map(|part| {
                        let one = left * part as u32 / 100;
                        left -= one;
                        (one, false)
                    })
                    .collect();
                // More than can be used until the next report.
                reports.extend(lies.map(|lie| (Duration::from_secs(1 + (lie >> 20)), false)));
                let charged = workers.charge(now, &reports);
                for (charged, (used, _)) in charged.iter().zip(&reports).take(3) {
                    prop_assert_eq!(charged, used);
                }
                total += charged.iter().sum::<Duration>();
            }
            let elapsed = now.duration_since(start);
            prop_assert!(total <= elapsed + MAX_CARRYOVER + SLACK * intervals_passed);
        }
    }
}
