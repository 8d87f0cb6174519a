//! What each vGPU used, from the silicon's counters: over the last interval, and over a window of about a second.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::gpu::{Usage, UsageReport};
use crate::ids::VgpuId;

/// How far back shares are measured.
pub const WINDOW_NS: u64 = 1_000_000_000;

/// How far readings that are kept lie apart, at least every second one.
const SPACING_NS: u64 = WINDOW_NS / 50;

/// Readings kept of one vGPU, however often the counters are read.
const MAX_READINGS: usize = 128;

/// A group counts as busy where it ran or waited for this much of an interval, in hundredths.
const BUSY_HUNDREDTHS: u64 = 90;

/// What one vGPU used between two readings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    /// Whose it is.
    pub vgpu: VgpuId,
    /// How long it was, in nanoseconds.
    pub elapsed_ns: u64,
    /// Engine time used in it, in nanoseconds.
    pub engine_ns: u64,
    /// True where the vGPU had work nearly all of the time.
    pub busy: bool,
    /// True where it had work at both ends.
    pub runnable: bool,
    /// True where it lost the engine with work left. Not every GPU counts that.
    pub preempted: bool,
}

/// What one vGPU used over the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// How long the window was, in nanoseconds: 0 until there are two readings.
    pub window_ns: u64,
    /// Engine time used in it, in nanoseconds.
    pub engine_ns: u64,
}

impl Measured {
    /// Engine time used, as a part of the window.
    pub fn share(self) -> f64 {
        if self.window_ns == 0 { 0.0 } else { self.engine_ns as f64 / self.window_ns as f64 }
    }
}

#[derive(Clone, Debug, Default)]
struct Account {
    last: Option<(u64, Usage)>,
    readings: VecDeque<(u64, u64)>,
}

impl Account {
    /// Takes a reading; the interval since the one before, where there is one.
    fn read(&mut self, vgpu: VgpuId, now_ns: u64, usage: &Usage) -> Option<Interval> {
        let before = self.last.replace((now_ns, *usage));
        let restarted = before.is_some_and(|(_, last)| usage.engine_ns < last.engine_ns);
        if restarted {
            self.readings.clear();
        }
        // Counters may be read at any rate: readings that are close together are one.
        if self.readings.len() > 1
            && self.readings.iter().nth_back(1).is_some_and(|(at, _)| now_ns - at < SPACING_NS)
        {
            self.readings.pop_back();
        }
        self.readings.push_back((now_ns, usage.engine_ns));
        let start = now_ns.saturating_sub(WINDOW_NS);
        // The first reading kept is the last one before the window, so that the window is covered.
        while self.readings.len() > MAX_READINGS
            || self.readings.get(1).is_some_and(|(at, _)| *at <= start)
        {
            self.readings.pop_front();
        }
        let (then_ns, last) = before.filter(|_| !restarted)?;
        let elapsed_ns = now_ns - then_ns;
        let engine_ns = usage.engine_ns - last.engine_ns;
        let wait_ns = usage.wait_ns.saturating_sub(last.wait_ns);
        let with_work = engine_ns.saturating_add(wait_ns);
        let runnable = last.runnable && usage.runnable;
        let busy = runnable && with_work >= elapsed_ns.saturating_mul(BUSY_HUNDREDTHS) / 100;
        let preempted = usage.preemptions > last.preemptions;
        Some(Interval { vgpu, elapsed_ns, engine_ns, busy, runnable, preempted })
    }

    fn measured(&self) -> Measured {
        match (self.readings.front(), self.readings.back()) {
            (Some((from, first)), Some((to, last))) => {
                Measured { window_ns: to - from, engine_ns: last - first }
            }
            _ => Measured::default(),
        }
    }
}

/// The accounts of one parent.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    accounts: BTreeMap<VgpuId, Account>,
    now_ns: Option<u64>,
}

impl Ledger {
    /// Opens an account.
    pub fn open(&mut self, vgpu: VgpuId) {
        self.accounts.insert(vgpu, Account::default());
    }

    /// Closes an account.
    pub fn close(&mut self, vgpu: VgpuId) {
        self.accounts.remove(&vgpu);
    }

    /// When the counters were last read.
    pub fn now_ns(&self) -> Option<u64> {
        self.now_ns
    }

    /// Takes a reading of the counters; what each vGPU used since the one before, in the order of ids.
    ///
    /// vGPUs without an account, and reports that are not newer than the last one, are passed over.
    pub fn report(&mut self, report: &UsageReport) -> Vec<Interval> {
        if self.now_ns.is_some_and(|now_ns| report.now_ns <= now_ns) {
            return Vec::new();
        }
        self.now_ns = Some(report.now_ns);
        let mut intervals: Vec<_> = report
            .vgpus
            .iter()
            .filter_map(|(vgpu, usage)| {
                self.accounts.get_mut(vgpu)?.read(*vgpu, report.now_ns, usage)
            })
            .collect();
        intervals.sort_by_key(|interval| interval.vgpu);
        intervals.dedup_by_key(|interval| interval.vgpu);
        intervals
    }

    /// What a vGPU used over the window.
    pub fn measured(&self, vgpu: VgpuId) -> Option<Measured> {
        self.accounts.get(&vgpu).map(Account::measured)
    }

    /// What all vGPUs together used over the window.
    pub fn total(&self) -> Measured {
        let all = self.accounts.values().map(Account::measured);
        all.fold(Measured::default(), |sum, one| Measured {
            window_ns: sum.window_ns.max(one.window_ns),
            engine_ns: sum.engine_ns.saturating_add(one.engine_ns),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;

    const MS: u64 = 1_000_000;
    const A: VgpuId = VgpuId(Uuid::from_u128(1));
    const B: VgpuId = VgpuId(Uuid::from_u128(2));

    fn usage(engine_ms: u64, wait_ms: u64) -> Usage {
        let (engine_ns, wait_ns) = (engine_ms * MS, wait_ms * MS);
        Usage { engine_ns, wait_ns, runnable: true, ..Usage::default() }
    }

    fn report(now_ms: u64, vgpus: &[(VgpuId, Usage)]) -> UsageReport {
        UsageReport { now_ns: now_ms * MS, vgpus: vgpus.to_vec() }
    }

    #[test]
    fn shares_are_measured_over_the_last_second() {
        let mut ledger = Ledger::default();
        ledger.open(A);
        ledger.open(B);
        for tick in 0..=50 {
            // A takes everything for 2 s, and then 80 of 100.
            let a = if tick <= 20 { tick * 100 } else { 2000 + (tick - 20) * 80 };
            let now = tick * 100;
            ledger.report(&report(now, &[(A, usage(a, now - a)), (B, usage(now - a, a))]));
        }
        assert!((ledger.measured(A).unwrap().share() - 0.8).abs() < 1e-9);
        assert!((ledger.measured(B).unwrap().share() - 0.2).abs() < 1e-9);
        assert_eq!(ledger.total(), Measured { window_ns: 1000 * MS, engine_ns: 1000 * MS });
        ledger.close(A);
        assert_eq!(ledger.measured(A), None);
    }

    #[test]
    fn the_window_is_a_second_however_often_counters_are_read() {
        let mut ledger = Ledger::default();
        ledger.open(A);
        for now in 0..=5000 {
            ledger.report(&report(now, &[(A, usage(now / 2, now / 2))]));
        }
        let measured = ledger.measured(A).unwrap();
        assert!((1000..1050).contains(&(measured.window_ns / MS)), "{measured:?}");
        assert!((measured.share() - 0.5).abs() < 0.01);
    }

    #[test]
    fn only_a_vgpu_with_work_all_the_time_is_busy() {
        let mut ledger = Ledger::default();
        ledger.open(A);
        assert_eq!(ledger.report(&report(0, &[(A, usage(0, 0))])), []);
        let mut busy = |now, usage| ledger.report(&report(now, &[(A, usage)]))[0].busy;
        assert!(busy(100, usage(20, 75)));
        assert!(!busy(200, usage(40, 100)));
        assert!(!busy(300, Usage { runnable: false, ..usage(120, 120) }));
        assert!(!busy(400, usage(220, 120)));
    }

    #[test]
    fn old_reports_and_counters_that_start_again_do_no_harm() {
        let mut ledger = Ledger::default();
        ledger.open(A);
        ledger.report(&report(100, &[(A, usage(50, 0))]));
        assert_eq!(ledger.report(&report(100, &[(A, usage(60, 0))])), []);
        assert_eq!(ledger.report(&report(200, &[(A, usage(1, 0)), (B, usage(9, 9))])), []);
        assert_eq!(ledger.measured(A), Some(Measured::default()));
        assert_eq!(ledger.report(&report(300, &[(A, usage(11, 0))]))[0].engine_ns, 10 * MS);
    }

    proptest! {
        #[test]
        fn no_counters_make_it_panic(
            readings in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 0..300),
        ) {
            let mut ledger = Ledger::default();
            ledger.open(A);
            for (now_ns, engine_ns, wait_ns) in readings {
                let usage = Usage { engine_ns, wait_ns, runnable: true, ..Usage::default() };
                ledger.report(&UsageReport { now_ns, vgpus: vec![(A, usage), (A, usage)] });
                ledger.total();
            }
            prop_assert!(ledger.accounts[&A].readings.len() <= MAX_READINGS);
        }
    }
}
