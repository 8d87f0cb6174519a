//! Consequences of sleep in page faults of a vGPU's memory.
//!
//! The engine sleeps in a page fault while the client punches a hole into the file of its guest's
//! memory, for as long as the kernel takes to free the pages and to look at each mapping of the
//! file. Neither a signal nor another mapping at the address ends such a sleep, so the engine must
//! not begin the next one. An engine that serves several vGPUs, of a `vfio:` parent, does this. A
//! group in which the engine slept is paused for as long again. If the sleeps are long, or come
//! again and again, the vGPU is cut off: its channels fault, and new ones wait.

/// Sleep that counts as a pause only. Memory that the host swaps or migrates causes such sleeps.
const SHORT_NS: u64 = 5_000_000;
/// Debt at which a vGPU is cut off.
const LIMIT_NS: u64 = 500_000_000;
/// Part of the wall clock in which the engine may sleep without a debt: a fiftieth.
const DECAY: u64 = 50;
/// Longest pause of a vGPU that is not cut off.
const MAX_PAUSE_NS: u64 = 1_000_000_000;
/// Pause of a vGPU that is cut off, as a multiple of the debt.
const CUT_OFF_FACTOR: u64 = 20;
/// Longest pause of a vGPU that is cut off.
const MAX_CUT_OFF_NS: u64 = 600_000_000_000;

/// Sleep in one vGPU's memory that the vGPU has not made good yet.
#[derive(Debug, Default)]
pub(super) struct SleepDebt {
    debt_ns: u64,
    /// Time of the last sleep.
    since_ns: u64,
}

/// What follows from a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Consequence {
    /// Time in which the group neither runs nor is polled.
    pub pause_ns: u64,
    /// Sleep for which the vGPU is cut off.
    pub cut_off_ns: Option<u64>,
}

impl SleepDebt {
    /// Counts a sleep that ended now.
    pub fn add(&mut self, slept_ns: u64, now_ns: u64) -> Consequence {
        let decayed = now_ns.saturating_sub(self.since_ns) / DECAY;
        let counted = if slept_ns < SHORT_NS { 0 } else { slept_ns };
        self.debt_ns = self.debt_ns.saturating_sub(decayed).saturating_add(counted);
        self.since_ns = now_ns;
        if counted == 0 || self.debt_ns < LIMIT_NS {
            return Consequence { pause_ns: slept_ns.min(MAX_PAUSE_NS), cut_off_ns: None };
        }
        let pause_ns = self.debt_ns.saturating_mul(CUT_OFF_FACTOR).min(MAX_CUT_OFF_NS);
        Consequence { pause_ns, cut_off_ns: Some(self.debt_ns) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const START: u64 = 1_000_000 * MS;

    #[test]
    fn one_long_sleep_cuts_off_for_twenty_times_as_long() {
        let consequence = SleepDebt::default().add(845 * MS, START);
        let expected = Consequence { pause_ns: 16_900 * MS, cut_off_ns: Some(845 * MS) };
        assert_eq!(consequence, expected);
        assert_eq!(SleepDebt::default().add(u64::MAX, START).pause_ns, MAX_CUT_OFF_NS);
    }

    #[test]
    fn repeated_sleeps_cut_off() {
        let mut debt = SleepDebt::default();
        let cut_off =
            (1..100).find(|n| debt.add(100 * MS, START + n * 200 * MS).cut_off_ns.is_some());
        assert_eq!(cut_off, Some(6));
    }

    #[test]
    fn short_and_rare_sleeps_only_pause() {
        let mut debt = SleepDebt::default();
        for n in 1..1000 {
            let short = debt.add(4 * MS, START + n * 8 * MS);
            assert_eq!(short, Consequence { pause_ns: 4 * MS, cut_off_ns: None });
        }
        let mut debt = SleepDebt::default();
        for n in 1..1000 {
            assert_eq!(debt.add(40 * MS, START + n * 2000 * MS).cut_off_ns, None);
        }
    }
}
