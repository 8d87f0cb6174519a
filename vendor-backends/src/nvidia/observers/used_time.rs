//! Part of a vGPU's time on the compute engine in which the vGPU used the engine.
//!
//! A context without work stays on the engine until another one needs it. As long as others have
//! work, a residency counts as work. Otherwise only the GPU's [utilization](super::utilization)
//! tells how much of it was. That is known later: what is reported follows the part of the last
//! sample, and each sample corrects what was reported before.

use std::collections::VecDeque;
use std::time::Duration;

use super::utilization::Sample;

/// Part of the residencies of all vGPUs from which on the engine counts as used all the time. A
/// switch between contexts takes some of it.
const SATURATED: f64 = 0.85;
/// Number and age of the readings that are kept: samples come up to half a second late.
const MAX_READINGS: usize = 128;
const MAX_AGE_NS: u64 = 2_000_000_000;
/// Longest time that is owed, in nanoseconds, and longest one that was reported too early: a vGPU
/// that was taken for busy is not shown as idle for seconds after that.
const MAX_OWED_NS: i64 = 1_000_000_000;
const MAX_EARLY_NS: i64 = 20_000_000;

/// What the log shows at a time. All times are in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reading {
    /// Time of the GPU's clock.
    pub at_ns: u64,
    /// Engine time of the vGPU, at most.
    pub charged_ns: u64,
    /// Time with a context of the vGPU on the engine, and with any context.
    pub resident: [u64; 2],
    /// Time in which the engine changed contexts.
    pub switching_ns: u64,
}

/// A reading, with the time used up to it as the parts before it tell.
#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    reading: Reading,
    expected_ns: u64,
}

/// Differences between two times.
#[derive(Clone, Copy, Debug)]
struct Between {
    charged_ns: f64,
    resident: [f64; 2],
    switching_ns: f64,
    expected_ns: f64,
}

/// Estimate of the engine time that a vGPU used.
#[derive(Clone, Debug)]
pub struct UsedTime {
    kept: VecDeque<Kept>,
    last: Kept,
    /// Part of the charged time that was used, by the last sample.
    part: f64,
    /// Time used beyond what was reported, or less if negative.
    owed_ns: i64,
}

impl Default for UsedTime {
    fn default() -> Self {
        Self { kept: VecDeque::new(), last: Kept::default(), part: 1.0, owed_ns: 0 }
    }
}

impl UsedTime {
    /// Takes a reading. `competes` says that others had work, or that the vGPU's own waited for
    /// much of the time since the last one: then it used all of its time on the engine. Returns the
    /// part of the new time that was not used, in nanoseconds.
    pub fn advance(&mut self, reading: Reading, competes: bool) -> u64 {
        if competes {
            // What was reported too early took nothing from others. What is used now does.
            self.owed_ns = self.owed_ns.max(0);
        }
        let part = if competes { 1.0 } else { self.part };
        let new_ns = reading.charged_ns.saturating_sub(self.last.reading.charged_ns);
        let expected_ns = Duration::from_nanos(new_ns).mul_f64(part).as_nanos() as u64;
        let counted_ns = expected_ns.saturating_add_signed(self.owed_ns).min(new_ns);
        self.owe(expected_ns.cast_signed() - counted_ns.cast_signed());
        let unused_ns = new_ns - counted_ns;
        self.last = Kept { reading, expected_ns: self.last.expected_ns + expected_ns };
        self.kept.push_back(self.last);
        let oldest_ns = reading.at_ns.saturating_sub(MAX_AGE_NS);
        while self.kept.len() > MAX_READINGS
            || self.kept.get(1).is_some_and(|kept| kept.reading.at_ns < oldest_ns)
        {
            self.kept.pop_front();
        }
        unused_ns
    }

    fn owe(&mut self, ns: i64) {
        let owed_ns = self.owed_ns.saturating_add(ns);
        self.owed_ns = owed_ns.clamp(-MAX_EARLY_NS, MAX_OWED_NS);
    }

    /// Returns the time of the engine that was charged since `at_ns`, in nanoseconds.
    pub fn charged_since_ns(&self, at_ns: u64) -> u64 {
        let before = self.kept.iter().rev().find(|kept| kept.reading.at_ns <= at_ns);
        let from = before.or(self.kept.front()).copied().unwrap_or_default();
        self.last.reading.charged_ns.saturating_sub(from.reading.charged_ns)
    }

    /// Takes a sample of the GPU's utilization. Returns true if the engine was in use all the time.
    pub fn sample(&mut self, sample: &Sample) -> bool {
        let (Some(from), Some(until)) = (self.at(sample.from_ns), self.at(sample.until_ns)) else {
            return false;
        };
        let between = until.since(&from);
        let [own_ns, all_ns] = between.resident;
        if between.charged_ns <= 0.0 || all_ns <= 0.0 {
            return false;
        }
        // The engine works while it changes contexts, and no context has it.
        let busy_ns = sample.busy * (sample.until_ns - sample.from_ns) as f64;
        let busy_ns = (busy_ns - between.switching_ns).max(0.0);
        let saturated = busy_ns >= all_ns * SATURATED;
        // Which context was idle is not known.
        let used_ns = if saturated { between.charged_ns } else { busy_ns * own_ns / all_ns };
        let used_ns = used_ns.min(between.charged_ns);
        self.owe((used_ns - between.expected_ns) as i64);
        self.part = used_ns / between.charged_ns;
        saturated
    }

    /// Returns what was read at a time, or between readings. None outside of them.
    fn at(&self, at_ns: u64) -> Option<Between> {
        let after = self.kept.iter().position(|kept| kept.reading.at_ns >= at_ns)?;
        let to = self.kept[after];
        let from = match after.checked_sub(1) {
            Some(before) => self.kept[before],
            None if to.reading.at_ns == at_ns => to,
            None => return None,
        };
        let length_ns = (to.reading.at_ns - from.reading.at_ns).max(1) as f64;
        let part = (at_ns - from.reading.at_ns) as f64 / length_ns;
        let between = |from: u64, to: u64| from as f64 + to.saturating_sub(from) as f64 * part;
        let [own, all] = [0, 1].map(|n| (from.reading.resident[n], to.reading.resident[n]));
        Some(Between {
            charged_ns: between(from.reading.charged_ns, to.reading.charged_ns),
            resident: [between(own.0, own.1), between(all.0, all.1)],
            switching_ns: between(from.reading.switching_ns, to.reading.switching_ns),
            expected_ns: between(from.expected_ns, to.expected_ns),
        })
    }
}

impl Between {
    fn since(&self, from: &Self) -> Self {
        let [own, all] = [0, 1].map(|n| self.resident[n] - from.resident[n]);
        Self {
            charged_ns: self.charged_ns - from.charged_ns,
            resident: [own, all],
            switching_ns: self.switching_ns - from.switching_ns,
            expected_ns: self.expected_ns - from.expected_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    /// A vGPU that is on the engine for all of the time in which any is, and a clock.
    struct Vgpu {
        used: UsedTime,
        reading: Reading,
        reported_ns: u64,
    }

    impl Vgpu {
        fn new() -> Self {
            let mut used = UsedTime::default();
            let reading = Reading { at_ns: 1000 * MS, ..Reading::default() };
            used.advance(reading, false);
            Self { used, reading, reported_ns: 0 }
        }

        /// Reads the log after 100 ms, `charged` ms of which are charged, with the engine held by
        /// this vGPU and by any for these times.
        fn pass(&mut self, charged: u64, resident: [u64; 2], competes: bool) {
            self.reading.at_ns += 100 * MS;
            self.reading.charged_ns += charged * MS;
            for (total, ms) in self.reading.resident.iter_mut().zip(resident) {
                *total += ms * MS;
            }
            self.reported_ns += charged * MS - self.used.advance(self.reading, competes);
        }

        /// Has the engine for 200 ms, of which a sample tells the part with work.
        fn step(&mut self, busy: f64) -> bool {
            (0..2).for_each(|_| self.pass(100, [100, 100], false));
            self.sample(busy)
        }

        /// Takes the sample of the last 200 ms.
        fn sample(&mut self, busy: f64) -> bool {
            let until_ns = self.reading.at_ns;
            self.used.sample(&Sample { from_ns: until_ns - 200 * MS, until_ns, busy })
        }
    }

    #[test]
    fn the_usage_of_a_vgpu_alone_follows_the_samples() {
        let mut vgpu = Vgpu::new();
        for step in 0..100 {
            assert!(!vgpu.step(0.03));
            // The first interval is reported in full.
            let (used, expected) = (vgpu.reported_ns, 200 * MS + step * 6 * MS);
            assert!((expected - 20 * MS..=expected).contains(&used), "{used} {expected}");
        }
    }

    #[test]
    fn work_all_the_time_counts_in_full_again() {
        let mut vgpu = Vgpu::new();
        (0..60).for_each(|_| assert!(!vgpu.step(0.02)));
        let before = vgpu.reported_ns;
        // The first sample comes late.
        (0..2).for_each(|_| vgpu.pass(100, [100, 100], false));
        assert_eq!(vgpu.reported_ns - before, 4 * MS);
        assert!(vgpu.sample(0.99));
        (0..10).for_each(|_| assert!(vgpu.step(0.99)));
        assert_eq!(vgpu.reported_ns - before, 2_004 * MS);
        // What was not reported is as soon as there is time that is not used.
        (0..10).for_each(|_| assert!(!vgpu.step(0.1)));
        assert_eq!(vgpu.reported_ns - before, 2_400 * MS);
    }

    #[test]
    fn a_vgpu_that_competes_used_all_of_its_time_at_once() {
        let mut vgpu = Vgpu::new();
        (0..60).for_each(|_| assert!(!vgpu.step(0.02)));
        let before = vgpu.reported_ns;
        (0..10).for_each(|_| vgpu.pass(50, [50, 100], true));
        assert_eq!(vgpu.reported_ns - before, 500 * MS);
    }

    #[test]
    fn an_idle_gpu_is_used_in_proportion_to_residencies() {
        let mut vgpu = Vgpu::new();
        for _ in 0..100 {
            // A program beside the vGPUs takes turns with this one, and neither has much work.
            (0..2).for_each(|_| vgpu.pass(50, [50, 100], false));
            assert!(!vgpu.sample(0.06));
        }
        let early_ns = 94 * MS - 20 * MS;
        assert!(vgpu.reported_ns.abs_diff(600 * MS + early_ns) < 2 * MS, "{}", vgpu.reported_ns);
        // Beside one that has work all the time, a residency is work.
        for _ in 0..100 {
            (0..2).for_each(|_| vgpu.pass(3, [3, 100], false));
            assert!(vgpu.sample(0.97));
        }
        assert!(vgpu.reported_ns.abs_diff(1200 * MS + early_ns) < 10 * MS, "{}", vgpu.reported_ns);
    }

    #[test]
    fn changes_between_contexts_are_no_use_of_a_vgpu() {
        let mut vgpu = Vgpu::new();
        for _ in 0..100 {
            // The engine changes contexts for 10 % of the time, and works for 6 %.
            for _ in 0..2 {
                vgpu.reading.switching_ns += 10 * MS;
                vgpu.pass(45, [45, 90], false);
            }
            assert!(!vgpu.sample(0.16));
        }
        let early_ns = 84 * MS - 20 * MS;
        assert!(vgpu.reported_ns.abs_diff(600 * MS + early_ns) < 2 * MS, "{}", vgpu.reported_ns);
    }

    proptest! {
        /// Whatever the samples are, no more is reported than charged, and no unused time is lost.
        #[test]
        fn reports_never_go_back_and_never_exceed_what_is_charged(
            events in prop::collection::vec((0..5_u64, 0..101_u64, any::<bool>(), 0..400_u64), 1..200),
        ) {
            let mut vgpu = Vgpu::new();
            let mut charged = 0;
            for (kind, amount, competes, ago) in events {
                if kind > 0 {
                    vgpu.pass(amount, [amount, 100], competes);
                    charged += amount * MS;
                } else {
                    let until_ns = vgpu.reading.at_ns.saturating_sub(ago * MS);
                    let from_ns = until_ns.saturating_sub(200 * MS);
                    vgpu.used.sample(&Sample { from_ns, until_ns, busy: amount as f64 / 100.0 });
                }
                prop_assert!(vgpu.reported_ns <= charged);
                prop_assert!((-MAX_EARLY_NS..=MAX_OWED_NS).contains(&vgpu.used.owed_ns));
                prop_assert!((0.0..=1.0).contains(&vgpu.used.part));
                prop_assert!(vgpu.used.kept.len() <= MAX_READINGS);
            }
        }
    }
}
