//! Engine time and waits of each vGPU, from the GPU's counters: over the last interval, and over a
//! window of about a second.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::gpu::{Usage, UsageReport, Waits};
use crate::ids::VgpuId;

/// Length of the window over which usage is measured.
pub const WINDOW_NS: u64 = 1_000_000_000;

/// Least time between every second reading that is kept.
const SPACING_NS: u64 = WINDOW_NS / 50;

/// Limit of the readings kept for one vGPU.
const MAX_READINGS: usize = 128;

/// Percentage of an interval that a busy vGPU ran or waited.
const BUSY_PERCENT: u64 = 90;

/// Time with work from which on work that began within an interval is not taken for a brief
/// request.
const LASTING_NS: u64 = 5_000_000;

/// Turns for each preemption, at most, of a vGPU that counts as preempted.
const PREEMPTED_OF: u64 = 3;

/// Usage of one vGPU between two readings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    /// The vGPU.
    pub vgpu: VgpuId,
    /// Length of the interval, in nanoseconds.
    pub elapsed_ns: u64,
    /// Engine time used, in nanoseconds.
    pub engine_ns: u64,
    /// True if the vGPU had work nearly all of the time.
    pub busy: bool,
    /// Engine time used and time waited, in nanoseconds.
    pub with_work_ns: u64,
    /// True if the vGPU had work at both ends.
    pub runnable: bool,
    /// True if the vGPU had work at the end and some time before, and none at the start.
    pub begins: bool,
    /// True if the vGPU lost the engine with work left in a third of its turns or more. Not every
    /// GPU counts preemptions.
    pub preempted: bool,
    /// Number of times that the vGPU got the engine, as far as the GPU counts waits.
    pub turns: u64,
}

/// Usage of one vGPU over the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Length of the window, in nanoseconds: 0 until there are two readings.
    pub window_ns: u64,
    /// Engine time used, in nanoseconds.
    pub engine_ns: u64,
}

impl Measured {
    /// Returns the engine time used as a part of the window, 0 to 1.
    pub fn share(self) -> f64 {
        if self.window_ns == 0 { 0.0 } else { self.engine_ns as f64 / self.window_ns as f64 }
    }
}

/// Times that work of a vGPU waited for the engine, over the last one to two windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimes {
    /// Number of waits that ended.
    pub count: u64,
    /// Median, in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile, in nanoseconds.
    pub p99_ns: u64,
}

impl WaitTimes {
    /// Returns the quantiles of the counted waits. None without waits.
    fn new(waits: &Waits) -> Option<Self> {
        let (p50_ns, p99_ns) = (waits.quantile(0.5)?, waits.quantile(0.99)?);
        Some(Self { count: waits.total(), p50_ns, p99_ns })
    }
}

/// Counters of waits at the start of the interval over which they are shown, and now.
#[derive(Clone, Copy, Debug)]
struct WaitWindow {
    /// Counters at the start of the interval.
    start: Waits,
    /// Time and counters of a reading at least a window after the start, or of the first one. The
    /// next interval starts there.
    next: (u64, Waits),
    last: Waits,
}

impl WaitWindow {
    fn new(now_ns: u64, waits: &Waits) -> Self {
        Self { start: *waits, next: (now_ns, *waits), last: *waits }
    }

    /// Takes a reading. Counters that restarted start a new interval.
    fn read(&mut self, now_ns: u64, waits: &Waits) {
        if !waits.can_follow(&self.last) {
            *self = Self::new(now_ns, waits);
        }
        self.last = *waits;
        if now_ns - self.next.0 >= WINDOW_NS {
            self.start = self.next.1;
            self.next = (now_ns, *waits);
        }
    }

    fn times(&self) -> Option<WaitTimes> {
        WaitTimes::new(&self.last.since(&self.start))
    }
}

/// Readings of one vGPU.
#[derive(Clone, Debug, Default)]
struct Account {
    /// Time and counters of the last reading.
    last: Option<(u64, Usage)>,
    /// Times and engine times of the readings in the window.
    readings: VecDeque<(u64, u64)>,
    /// Waits, since the first reading.
    waits: Option<WaitWindow>,
}

impl Account {
    /// Takes a reading. Returns the interval since the reading before, unless counters restarted.
    fn read(&mut self, vgpu: VgpuId, now_ns: u64, usage: &Usage) -> Option<Interval> {
        let before = self.last.replace((now_ns, *usage));
        let restarted = before.is_some_and(|(_, last)| usage.engine_ns < last.engine_ns);
        if restarted {
            self.readings.clear();
            self.waits = None;
        }
        let waits = self.waits.get_or_insert_with(|| WaitWindow::new(now_ns, &usage.waits));
        waits.read(now_ns, &usage.waits);
        // At a high rate of readings, the last one replaces the one before.
        if self.readings.len() > 1
            && self.readings.iter().nth_back(1).is_some_and(|(at, _)| now_ns - at < SPACING_NS)
        {
            self.readings.pop_back();
        }
        self.readings.push_back((now_ns, usage.engine_ns));
        let start = now_ns.saturating_sub(WINDOW_NS);
        // The first reading kept is the last one before the window.
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
        let busy = runnable && with_work >= elapsed_ns.saturating_mul(BUSY_PERCENT) / 100;
        // A worker that was replaced counts its waits anew.
        let counted = usage.waits.can_follow(&last.waits);
        let turns = if counted { usage.waits.since(&last.waits).total() } else { 0 };
        let preemptions = usage.preemptions.saturating_sub(last.preemptions);
        let preempted = preemptions > 0 && preemptions.saturating_mul(PREEMPTED_OF) >= turns;
        Some(Interval {
            vgpu,
            elapsed_ns,
            engine_ns,
            busy,
            with_work_ns: with_work.min(elapsed_ns),
            runnable,
            begins: usage.runnable && !last.runnable && with_work >= LASTING_NS,
            preempted,
            turns,
        })
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

/// Accounts of the vGPUs of one parent.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    accounts: BTreeMap<VgpuId, Account>,
    now_ns: Option<u64>,
}

impl Ledger {
    /// Opens a vGPU's account.
    pub fn open(&mut self, vgpu: VgpuId) {
        self.accounts.insert(vgpu, Account::default());
    }

    /// Closes a vGPU's account.
    pub fn close(&mut self, vgpu: VgpuId) {
        self.accounts.remove(&vgpu);
    }

    /// Returns the time of the last reading.
    pub fn now_ns(&self) -> Option<u64> {
        self.now_ns
    }

    /// Takes a reading of the counters. Returns the intervals since the last one, in the order of
    /// ids.
    ///
    /// Ignores vGPUs without an account, and reports that are not newer than the last one.
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

    /// Returns the usage of a vGPU over the window.
    pub fn measured(&self, vgpu: VgpuId) -> Option<Measured> {
        self.accounts.get(&vgpu).map(Account::measured)
    }

    /// Returns how long a vGPU's work waited for the engine in the last one to two seconds. None if
    /// no wait ended.
    pub fn waits(&self, vgpu: VgpuId) -> Option<WaitTimes> {
        self.accounts.get(&vgpu)?.waits?.times()
    }

    /// Returns the usage of all vGPUs together over the window.
    pub fn total(&self) -> Measured {
        let all = self.accounts.values().map(Account::measured);
        all.fold(Measured::default(), |sum, account| Measured {
            window_ns: sum.window_ns.max(account.window_ns),
            engine_ns: sum.engine_ns.saturating_add(account.engine_ns),
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
    fn usage_is_measured_over_the_last_second() {
        let mut ledger = Ledger::default();
        ledger.open(A);
        ledger.open(B);
        for tick in 0..=50 {
            // A uses all of the time for 2 s, and then 80 percent.
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
    fn the_window_is_a_second_at_any_rate_of_readings() {
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
    fn a_vgpu_is_busy_if_it_has_work_all_the_time() {
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
    fn old_reports_and_restarted_counters_are_harmless() {
        let mut ledger = Ledger::default();
        ledger.open(A);
        ledger.report(&report(100, &[(A, usage(50, 0))]));
        assert_eq!(ledger.report(&report(100, &[(A, usage(60, 0))])), []);
        assert_eq!(ledger.report(&report(200, &[(A, usage(1, 0)), (B, usage(9, 9))])), []);
        assert_eq!(ledger.measured(A), Some(Measured::default()));
        assert_eq!(ledger.report(&report(300, &[(A, usage(11, 0))]))[0].engine_ns, 10 * MS);
    }

    /// Returns a busy vGPU's usage with waits of these lengths, in milliseconds.
    fn waited(engine_ms: u64, lengths: &[u64]) -> Usage {
        let mut usage = usage(engine_ms, 0);
        for ms in lengths {
            usage.waits.record(ms * MS);
        }
        usage
    }

    #[test]
    fn waits_are_shown_for_one_to_two_seconds() {
        let mut ledger = Ledger::default();
        ledger.open(A);
        assert_eq!(ledger.waits(A), None);
        // Waits of 10 ms for 10 s, and then of 2 ms.
        let mut lengths = vec![7000];
        let mut shown = Vec::new();
        for tick in 0..200 {
            ledger.report(&report(tick * 100, &[(A, waited(tick, &lengths))]));
            shown.push(ledger.waits(A));
            lengths.extend(if tick < 100 { [10, 10] } else { [2, 2] });
        }
        assert_eq!(shown[0], None, "waits before the first reading are not in the interval");
        let ms = |tick: usize, ns: fn(&WaitTimes) -> u64| ns(&shown[tick].unwrap()) as f64 / 1e6;
        for (tick, times) in shown.iter().enumerate().take(100).skip(1) {
            let count = times.unwrap().count;
            let least = 2 * tick.min(10) as u64;
            assert!((least..=40).contains(&count), "{tick}: {count}");
            assert!((10.0..12.6).contains(&ms(tick, |times| times.p50_ns)), "{:?}", shown[tick]);
            assert!((10.0..12.6).contains(&ms(tick, |times| times.p99_ns)), "{:?}", shown[tick]);
        }
        assert!((10.0..12.6).contains(&ms(109, |times| times.p99_ns)), "{:?}", shown[109]);
        assert!((2.0..2.6).contains(&ms(121, |times| times.p99_ns)), "{:?}", shown[121]);
        // No wait ends any more.
        for tick in 200..221 {
            ledger.report(&report(tick * 100, &[(A, waited(tick, &lengths))]));
        }
        assert_eq!(ledger.waits(A), None);
        ledger.close(A);
        assert_eq!(ledger.waits(A), None);
    }

    #[test]
    fn restarted_counters_of_waits_start_a_new_interval() {
        for engine_ms in [1, 50] {
            let mut ledger = Ledger::default();
            ledger.open(A);
            ledger.report(&report(0, &[(A, waited(10, &[]))]));
            ledger.report(&report(100, &[(A, waited(20, &[5, 5, 5]))]));
            assert_eq!(ledger.waits(A).unwrap().count, 3);
            // Counters without a reading in between, or with other counters that did not restart.
            let intervals = ledger.report(&report(200, &[(A, waited(engine_ms, &[90]))]));
            assert!(intervals.iter().all(|interval| interval.turns == 0), "{intervals:?}");
            assert_eq!(ledger.waits(A), None, "{engine_ms}");
            ledger.report(&report(300, &[(A, waited(60, &[90, 1]))]));
            let times = ledger.waits(A).unwrap();
            assert_eq!(times.count, 1);
            assert!((MS..2 * MS).contains(&times.p99_ns), "{times:?}");
        }
    }

    proptest! {
        #[test]
        fn any_counters_are_accepted_without_panic(
            readings in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 0..300),
        ) {
            let mut ledger = Ledger::default();
            ledger.open(A);
            for (now_ns, engine_ns, wait_ns) in readings {
                let mut usage = Usage { engine_ns, wait_ns, runnable: true, ..Usage::default() };
                usage.waits.record(wait_ns);
                ledger.report(&UsageReport { now_ns, vgpus: vec![(A, usage), (A, usage)] });
                ledger.total();
                prop_assert!(ledger.waits(A).is_none_or(|times| times.p50_ns <= times.p99_ns));
            }
            prop_assert!(ledger.accounts[&A].readings.len() <= MAX_READINGS);
        }
    }
}
