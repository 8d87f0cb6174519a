//! The runlist: selects the group that runs next, and for how long. Pure: the caller reports used
//! time.
//!
//! Groups run in rotation, each for its time slice. Time beyond the slice (up to a chunk of work)
//! is charged to the next slice, so that shares are exact in the long run. A group that goes idle
//! loses the rest of its slice but keeps its debt. A group whose budget is used up is skipped, and
//! its debt shrinks meanwhile, so that it does not wait for its cap and then again for its slice.

use mdev_core::sched::{Budget, Meter};

/// Limit of debt, so that one long overrun does not block a group for ever.
const MAX_DEBT_NS: i64 = 1_000_000_000;

/// One scheduling group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Time slice in nanoseconds, not 0.
    pub slice_ns: u64,
    /// Whether the group has work and its gate is open.
    pub ready: bool,
    /// Nanoseconds left of the slice; negative for debt.
    credit_ns: i64,
    meter: Option<Meter>,
    /// Nanoseconds left of the budget, if the group may be picked.
    budget_left_ns: Option<u64>,
}

impl Entry {
    /// Creates a group without work.
    pub fn new(slice_ns: u64) -> Self {
        Self { slice_ns, ..Self::default() }
    }

    /// Returns whether only the budget kept the group from running at the last [`Runlist::pick`].
    pub fn capped(&self) -> bool {
        self.ready && self.budget_left_ns.is_none()
    }

    /// Returns whether time is left of the group's slice.
    pub fn in_slice(&self) -> bool {
        self.ready && self.credit_ns > 0 && self.meter.is_none_or(|meter| meter.is_open())
    }

    /// Returns whether the group has a budget.
    pub fn has_budget(&self) -> bool {
        self.meter.is_some()
    }

    /// Sets or removes the budget. The budget carries over up to `wait_ns` that other groups may
    /// make this group wait.
    pub fn set_budget(&mut self, budget: Option<Budget>, now_ns: u64, wait_ns: u64) {
        match (&mut self.meter, budget) {
            (Some(meter), Some(budget)) if meter.budget() == budget => {}
            (Some(meter), Some(budget)) => meter.set_budget(budget, now_ns),
            (meter, budget) => {
                *meter = budget.map(|budget| Meter::new(budget, now_ns).carrying(wait_ns));
            }
        }
    }

    fn update_budget(&mut self, now_ns: u64) {
        let left = self.meter.as_mut().map_or(u64::MAX, |meter| {
            meter.advance(now_ns, self.ready);
            meter.left_ns()
        });
        self.budget_left_ns = Some(left).filter(|left| self.ready && *left > 0);
    }

    /// Adds the slices of `rounds` rounds in which the group could have run.
    fn add_rounds(&mut self, rounds: i64) {
        let earned = self.credit_ns.saturating_add(rounds.saturating_mul(self.slice()));
        if self.budget_left_ns.is_some() {
            self.credit_ns = earned;
        } else if self.ready {
            self.credit_ns = earned.min(self.credit_ns.max(0));
        }
    }

    fn slice(&self) -> i64 {
        self.slice_ns.clamp(1, 1 << 40).cast_signed()
    }
}

/// All groups, in order of rotation.
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

    /// Removes a group. The indices of later groups decrease by one.
    pub fn remove(&mut self, index: usize) {
        self.entries.remove(index);
        if self.current > index || self.current == self.entries.len() {
            self.current = self.current.saturating_sub(1);
        }
    }

    /// Returns a group.
    pub fn entry(&mut self, index: usize) -> &mut Entry {
        &mut self.entries[index]
    }

    /// Returns the group that runs next and its maximum time in nanoseconds, or `None` if no group
    /// may run.
    pub fn pick(&mut self, now_ns: u64) -> Option<(usize, u64)> {
        let count = self.entries.len();
        self.entries.iter_mut().for_each(|entry| entry.update_budget(now_ns));
        // Skip the rounds in which all groups that may run would only reduce their debts.
        let candidates = self.entries.iter().filter(|entry| entry.budget_left_ns.is_some());
        let rounds = candidates.map(|entry| -entry.credit_ns / entry.slice()).min()?;
        if rounds > 0 {
            self.entries.iter_mut().for_each(|entry| entry.add_rounds(rounds));
        }
        loop {
            let entry = &mut self.entries[self.current];
            if let Some(left) = entry.budget_left_ns
                && entry.credit_ns > 0
            {
                return Some((self.current, entry.credit_ns.cast_unsigned().min(left)));
            }
            entry.credit_ns = entry.credit_ns.min(0);
            self.current = (self.current + 1) % count;
            self.entries[self.current].add_rounds(1);
        }
    }

    /// Returns whether a group had work and a budget at the last [`Self::pick`].
    pub fn may_run(&self, index: usize) -> bool {
        self.entries[index].budget_left_ns.is_some()
    }

    /// Returns when the first group that only its budget keeps from running may run again.
    pub fn next_ns(&self) -> Option<u64> {
        let capped = self.entries.iter().filter(|entry| entry.capped());
        capped.filter_map(|entry| Some(entry.meter?.opens_at_ns())).min()
    }

    /// Charges a group for time on the engine in which it was the only one. It begins new slices
    /// instead of owing time.
    pub fn charge_alone(&mut self, index: usize, used_ns: u64) {
        let entry = &mut self.entries[index];
        let slice = entry.slice();
        let used = i64::try_from(used_ns).unwrap_or(i64::MAX);
        let left = entry.credit_ns.min(slice).saturating_sub(used);
        // What is left of the last slice, from 1 to all of it.
        entry.credit_ns = if left > 0 { left } else { slice - left.saturating_neg() % slice };
        self.current = index;
    }

    /// Gives back time that a group was charged for and has not used.
    pub fn refund(&mut self, index: usize, unused_ns: u64) {
        let unused = i64::try_from(unused_ns).unwrap_or(i64::MAX);
        let entry = &mut self.entries[index];
        entry.credit_ns = entry.credit_ns.saturating_add(unused);
        if let Some(meter) = &mut entry.meter {
            meter.refund(unused_ns);
        }
    }

    /// Charges a group for time on the engine.
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
    fn no_group_runs_if_none_is_ready() {
        let mut runlist = runlist(&[1000]);
        runlist.entry(0).ready = false;
        assert_eq!(runlist.pick(0), None);
        assert_eq!(Runlist::default().pick(0), None);
    }

    #[test]
    fn an_idle_group_loses_the_rest_of_its_slice() {
        let mut runlist = runlist(&[1000, 1000]);
        let (first, _) = runlist.pick(0).unwrap();
        runlist.charge(first, 10);
        runlist.entry(first).ready = false;
        let (second, budget) = runlist.pick(0).unwrap();
        assert_eq!((second, budget), (1 - first, 1000));
        runlist.entry(first).ready = true;
        runlist.charge(second, 1000);
        assert_eq!(runlist.pick(0), Some((first, 1000)), "no time was saved up");
    }

    #[test]
    fn a_single_group_runs_despite_its_debt() {
        let mut runlist = runlist(&[1000]);
        runlist.charge(0, u64::MAX);
        assert_eq!(runlist.pick(0).unwrap().0, 0);
    }

    #[test]
    fn a_large_overrun_is_compensated() {
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
    fn removal_keeps_the_rotation() {
        let mut runlist = runlist(&[1, 2, 3]);
        runlist.current = 2;
        runlist.remove(0);
        assert_eq!(runlist.current, 1);
        runlist.remove(1);
        assert_eq!(runlist.pick(0), Some((0, 2)));
    }

    /// Runs a simulated engine for `time_ns`. Returns the time that each group used.
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
    fn caps_hold_alone_and_beside_others_without_waste() {
        let second = 1_000_000_000;
        let mut alone = runlist(&[2_000_000]);
        alone.entry(0).set_budget(percent(25), 0, 0);
        let used = simulate(&mut alone, 10 * second);
        assert!(used[0].abs_diff(10 * second / 4) < 3_000_000, "{used:?}");

        // A cap of 10 % beside two busy groups. Its slices alone would give it a third.
        let mut beside = runlist(&[2_000_000; 3]);
        beside.entry(0).set_budget(percent(10), 0, 0);
        let used = simulate(&mut beside, 10 * second);
        assert!(used[0].abs_diff(second) < 12_000_000, "{used:?}");
        assert!(used[1].abs_diff(used[2]) < 5_000_000, "{used:?}");
        assert!(used.iter().sum::<u64>() >= 10 * second, "one group's cap idles no other group");

        // Slices below the cap: the cap has no effect.
        let mut slices = runlist(&[8_000_000, 2_000_000]);
        slices.entry(1).set_budget(percent(50), 0, 0);
        let used = simulate(&mut slices, 10 * second);
        assert!(used[1].abs_diff(2 * second) < 20_000_000, "{used:?}");

        alone.entry(0).set_budget(None, 0, 0);
        assert_eq!(alone.pick(0).map(|(index, _)| index), Some(0));
        assert_eq!(alone.next_ns(), None);
    }

    /// With work that lasts a hundred periods, groups still meet their caps, while they wait for
    /// the cap and for other groups.
    #[test]
    fn caps_hold_without_preemption() {
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
        /// Two busy groups get shares in proportion to their slices, whatever their overruns.
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
                prop_assert!((got - want).abs() < 0.01, "got {got}, want {want}");
            }
        }
    }
}
