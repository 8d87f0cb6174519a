//! The runlist: which group has the engine, and for how long. Pure: it is told what time was used.
//!
//! Groups take turns, each for its time slice. What a group runs over its slice (up to a chunk of work) is taken from
//! its next one, so that shares are exact in the long run. A group that goes idle gives up the rest of its slice, but
//! not its debt. A group whose budget is used up is passed over, and works its debt off meanwhile: it is not to wait for
//! its cap, and then once more for its turn.

use mdev_core::sched::{Budget, Meter};

/// Debt beyond this is forgiven, so that one accident is not paid for ever.
const MAX_DEBT_NS: i64 = 1_000_000_000;

/// One group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Its time slice in nanoseconds, not 0.
    pub slice_ns: u64,
    /// Whether it could use the engine now.
    pub ready: bool,
    /// Nanoseconds left of its slice; negative where it owes some.
    credit_ns: i64,
    meter: Option<Meter>,
    /// Ready, with so many nanoseconds left of its budget: who may be picked.
    left_ns: Option<u64>,
}

impl Entry {
    /// A group with no work.
    pub fn new(slice_ns: u64) -> Self {
        Self { slice_ns, ..Self::default() }
    }

    /// Whether its budget alone keeps it from the engine, as far as was known when somebody was picked.
    pub fn capped(&self) -> bool {
        self.ready && self.left_ns.is_none()
    }

    /// Whether something is left of its turn.
    pub fn has_turn(&self) -> bool {
        self.ready && self.credit_ns > 0 && self.meter.is_none_or(|meter| meter.is_open())
    }

    /// Whether it has a budget.
    pub fn has_budget(&self) -> bool {
        self.meter.is_some()
    }

    /// Sets or lifts its budget. Others may keep it waiting for so long where nobody is to blame.
    pub fn set_budget(&mut self, budget: Option<Budget>, now_ns: u64, wait_ns: u64) {
        match (&mut self.meter, budget) {
            (Some(meter), Some(budget)) if meter.budget() == budget => {}
            (Some(meter), Some(budget)) => meter.set_budget(budget, now_ns),
            (meter, budget) => {
                *meter = budget.map(|budget| Meter::new(budget, now_ns).carrying(wait_ns));
            }
        }
    }

    fn look(&mut self, now_ns: u64) {
        let left = self.meter.as_mut().map_or(u64::MAX, |meter| {
            meter.advance(now_ns, self.ready);
            meter.left_ns()
        });
        self.left_ns = Some(left).filter(|left| self.ready && *left > 0);
    }

    /// So many rounds have begun in which it could have had a turn.
    fn earn(&mut self, rounds: i64) {
        let earned = self.credit_ns.saturating_add(rounds.saturating_mul(self.slice()));
        if self.left_ns.is_some() {
            self.credit_ns = earned;
        } else if self.ready {
            self.credit_ns = earned.min(self.credit_ns.max(0));
        }
    }

    fn slice(&self) -> i64 {
        self.slice_ns.clamp(1, 1 << 40).cast_signed()
    }
}

/// All groups, in the order of their turns.
#[derive(Debug, Default)]
pub struct Runlist {
    entries: Vec<Entry>,
    current: usize,
}

impl Runlist {
    /// Adds a group at the end and returns its index.
    pub fn push(&mut self, entry: Entry) -> usize {
        self.entries.push(entry);
        self.entries.len() - 1
    }

    /// Removes a group; those after it move up.
    pub fn remove(&mut self, index: usize) {
        self.entries.remove(index);
        if self.current > index || self.current == self.entries.len() {
            self.current = self.current.saturating_sub(1);
        }
    }

    /// One group.
    pub fn entry(&mut self, index: usize) -> &mut Entry {
        &mut self.entries[index]
    }

    /// Who has the engine now, and for how many nanoseconds at most; `None` where nobody may.
    pub fn pick(&mut self, now_ns: u64) -> Option<(usize, u64)> {
        let count = self.entries.len();
        self.entries.iter_mut().for_each(|entry| entry.look(now_ns));
        // Rounds in which all who may run would only pay debts are taken at once.
        let may = self.entries.iter().filter(|entry| entry.left_ns.is_some());
        let rounds = may.map(|entry| -entry.credit_ns / entry.slice()).min()?;
        if rounds > 0 {
            self.entries.iter_mut().for_each(|entry| entry.earn(rounds));
        }
        loop {
            let entry = &mut self.entries[self.current];
            if let Some(left) = entry.left_ns
                && entry.credit_ns > 0
            {
                return Some((self.current, entry.credit_ns.cast_unsigned().min(left)));
            }
            entry.credit_ns = entry.credit_ns.min(0);
            self.current = (self.current + 1) % count;
            self.entries[self.current].earn(1);
        }
    }

    /// When the first of those may run that only their budgets hold back; `None` where there are none.
    pub fn next_ns(&self) -> Option<u64> {
        let capped = self.entries.iter().filter(|entry| entry.capped());
        capped.filter_map(|entry| Some(entry.meter?.opens_at_ns())).min()
    }

    /// Charges a group for time that it had the engine.
    pub fn charge(&mut self, index: usize, used_ns: u64) {
        let used = i64::try_from(used_ns).unwrap_or(i64::MAX);
        let entry = &mut self.entries[index];
        entry.credit_ns = entry.credit_ns.saturating_sub(used).max(-MAX_DEBT_NS);
        if let Some(meter) = &mut entry.meter {
            meter.charge(used_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn runlist(slices: &[u64]) -> Runlist {
        let mut runlist = Runlist::default();
        for slice in slices {
            let index = runlist.push(Entry::new(*slice));
            runlist.entry(index).ready = true;
        }
        runlist
    }

    #[test]
    fn nobody_ready_nobody_runs() {
        let mut runlist = runlist(&[1000]);
        runlist.entry(0).ready = false;
        assert_eq!(runlist.pick(0), None);
        assert_eq!(Runlist::default().pick(0), None);
    }

    #[test]
    fn idle_groups_give_up_the_rest_of_their_slice() {
        let mut runlist = runlist(&[1000, 1000]);
        let (first, _) = runlist.pick(0).unwrap();
        runlist.charge(first, 10);
        runlist.entry(first).ready = false;
        let (second, budget) = runlist.pick(0).unwrap();
        assert_eq!((second, budget), (1 - first, 1000));
        runlist.entry(first).ready = true;
        runlist.charge(second, 1000);
        assert_eq!(runlist.pick(0), Some((first, 1000)), "nothing was saved up");
    }

    #[test]
    fn alone_it_runs_whatever_it_owes() {
        let mut runlist = runlist(&[1000]);
        runlist.charge(0, u64::MAX);
        assert_eq!(runlist.pick(0).unwrap().0, 0);
    }

    #[test]
    fn a_large_overrun_is_paid_back() {
        let mut runlist = runlist(&[100_000, 400_000]);
        let mut used = [0u64; 2];
        let (index, _) = runlist.pick(0).unwrap();
        runlist.charge(index, 30_000_000);
        used[index] += 30_000_000;
        while used.iter().sum::<u64>() < 1_000_000_000 {
            let (index, budget) = runlist.pick(0).unwrap();
            runlist.charge(index, budget);
            used[index] += budget;
        }
        let share = used[0] as f64 / used.iter().sum::<u64>() as f64;
        assert!((share - 0.2).abs() < 0.001, "{share}");
    }

    #[test]
    fn removal_keeps_the_others_turns() {
        let mut runlist = runlist(&[1, 2, 3]);
        runlist.current = 2;
        runlist.remove(0);
        assert_eq!(runlist.current, 1);
        runlist.remove(1);
        assert_eq!(runlist.pick(0), Some((0, 2)));
    }

    /// Runs a simulated engine for so long; what each used.
    fn simulate(runlist: &mut Runlist, time_ns: u64) -> Vec<u64> {
        let (mut now, mut used) = (0, vec![0; runlist.entries.len()]);
        while now < time_ns {
            if let Some((index, budget)) = runlist.pick(now) {
                let ran = budget.min(200_000) + 11_000;
                runlist.charge(index, ran);
                (used[index], now) = (used[index] + ran, now + ran);
            } else {
                now = runlist.next_ns().unwrap() + 3_000;
            }
        }
        used
    }

    fn percent(hundredths: u8) -> Option<Budget> {
        Budget::part(f64::from(hundredths) / 100.0, Duration::from_millis(10))
    }

    #[test]
    fn a_cap_holds_alone_and_beside_others_and_wastes_nothing() {
        let second = 1_000_000_000;
        let mut alone = runlist(&[2_000_000]);
        alone.entry(0).set_budget(percent(25), 0, 0);
        let used = simulate(&mut alone, 10 * second);
        assert!(used[0].abs_diff(10 * second / 4) < 3_000_000, "{used:?}");

        // A cap of 10 beside two that use what there is; its slices alone would give it a third.
        let mut beside = runlist(&[2_000_000; 3]);
        beside.entry(0).set_budget(percent(10), 0, 0);
        let used = simulate(&mut beside, 10 * second);
        assert!(used[0].abs_diff(second) < 12_000_000, "{used:?}");
        assert!(used[1].abs_diff(used[2]) < 5_000_000, "{used:?}");
        assert!(used.iter().sum::<u64>() >= 10 * second, "nobody waits for a cap of someone else");

        // Its slices are less than its cap: the cap does nothing.
        let mut slices = runlist(&[8_000_000, 2_000_000]);
        slices.entry(1).set_budget(percent(50), 0, 0);
        let used = simulate(&mut slices, 10 * second);
        assert!(used[1].abs_diff(2 * second) < 20_000_000, "{used:?}");

        alone.entry(0).set_budget(None, 0, 0);
        assert_eq!(alone.pick(0).map(|(index, _)| index), Some(0));
        assert_eq!(alone.next_ns(), None);
    }

    /// Pieces of work that are a hundred times as long as a period: a cap is met by who waits for it and for others, too.
    #[test]
    fn a_cap_holds_where_nothing_can_be_interrupted() {
        const PIECE: u64 = 200_000_000;
        let run = |slices: [u64; 2], caps: [Option<u8>; 2]| {
            let mut runlist = runlist(&slices.map(|hundredths| hundredths * 100_000));
            for (index, cap) in caps.iter().enumerate() {
                let budget = cap.and_then(percent);
                runlist.entry(index).set_budget(budget, 0, 8 * PIECE);
            }
            let (mut now, mut used) = (0, [0; 2]);
            while now < 1_000_000_000_000 {
                if let Some((index, _)) = runlist.pick(now) {
                    runlist.charge(index, PIECE);
                    (used[index], now) = (used[index] + PIECE, now + PIECE);
                } else {
                    now = runlist.next_ns().unwrap().max(now + 1);
                }
            }
            used.map(|used| used as f64 / now as f64 * 100.0)
        };
        for (slices, caps, want) in [
            ([25, 75], [Some(25), None], [25.0, 75.0]),
            ([10, 90], [Some(10), None], [10.0, 90.0]),
            ([50, 50], [Some(20), None], [20.0, 80.0]),
            ([30, 20], [Some(30), Some(20)], [30.0, 20.0]),
            ([60, 40], [Some(60), Some(40)], [60.0, 40.0]),
        ] {
            let got = run(slices, caps);
            let off = [0, 1].map(|n: usize| (got[n] - want[n]).abs());
            assert!(off.iter().all(|off| *off < 1.0), "{caps:?}: {got:?}");
        }
    }

    proptest! {
        /// Whatever is run over each turn's end, two busy groups get what their slices say.
        #[test]
        fn shares_follow_slices(
            slices in proptest::collection::vec(100_000..10_000_000u64, 2..6),
            overruns in proptest::collection::vec(0..50_000u64, 1..50),
            chunk in 1_000..250_000u64,
        ) {
            let mut runlist = runlist(&slices);
            let mut used = vec![0; slices.len()];
            let total: u64 = slices.iter().sum();
            let mut overruns = overruns.iter().cycle();
            while used.iter().sum::<u64>() < total * 200 {
                let (index, budget) = runlist.pick(0).unwrap();
                let ran = if budget > chunk { chunk } else { budget + overruns.next().unwrap() };
                runlist.charge(index, ran);
                used[index] += ran;
            }
            let all: u64 = used.iter().sum();
            for (used, slice) in used.iter().zip(&slices) {
                let (got, want) = (*used as f64 / all as f64, *slice as f64 / total as f64);
                prop_assert!((got - want).abs() < 0.01, "got {got}, asked for {want}");
            }
        }
    }
}
