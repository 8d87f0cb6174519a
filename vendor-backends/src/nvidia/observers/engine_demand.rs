//! Demand of a vGPU for the compute engine: when its work waited, and how often it lost the engine
//! with work left.
//!
//! The context switch log shows when a vGPU has the engine, and the doorbell poller when the vGPU
//! submits work. A vGPU that gives the engine up with nothing left to do does not wait, however
//! often it submits: only the time from a submission to the next residency is a wait.

use mdev_core::gpu::Waits;

use nvidia_rm::ctxsw_record::{CtxswRecord, END, ENGINE_RESET, START};

/// Longest time between a vGPU's last submission and the loss of the engine for which the vGPU
/// counts as having work, if it had the engine for longer than its slice.
const RECENT_NS: u64 = 2_000_000;

/// Wait beyond the rounds of the runlist up to which a submission counts as waiting for the engine:
/// kernels of others may take so long. Entries that need no engine wait for ever.
const LONG_WAIT_NS: u64 = 30_000_000;

/// Time by which a residency may exceed the slice if the slice ends it.
const OVERRUN_NS: u64 = 1_000_000;

/// Number of residencies after a change of the slice that may have the slice before: one had begun,
/// and one may begin before the driver has set the slice.
const FORMER: u8 = 2;

/// A wait for the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wait {
    /// Loss of the engine with work left, or else the first submission.
    since_ns: u64,
    /// Start of the part that is not counted yet.
    counted_until_ns: u64,
    /// The GPU has run others instead: what was submitted needs no engine.
    hollow: bool,
    /// The vGPU lost the engine with work left.
    lost_engine: bool,
}

impl Wait {
    /// Begins with a submission, or where a gate closes.
    fn new(since_ns: u64) -> Self {
        Self { since_ns, counted_until_ns: since_ns, hollow: false, lost_engine: false }
    }

    /// Begins with the loss of the engine, with work left.
    fn of_lost_engine(since_ns: u64) -> Self {
        Self { lost_engine: true, ..Self::new(since_ns) }
    }
}

/// Demand of one vGPU for the compute engine. Times are of the GPU's clock, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineDemand {
    /// The last slices of a group, to tell a slice that was used up from one that was not.
    slices_ns: [u64; 2],
    /// Number of residencies that may still have the slice before.
    with_former: u8,
    /// Longest wait for the engine.
    longest_wait_ns: u64,
    resident_since_ns: Option<u64>,
    /// The vGPU has the engine to continue with work that was left.
    continues: bool,
    /// End of the last residency.
    left_ns: u64,
    /// The vGPU gave up most of that slice.
    left_early: bool,
    /// The last submission.
    submitted_ns: u64,
    wait: Option<Wait>,
    /// The gate is closed.
    gated: bool,
    /// Time of all completed waits.
    waited_ns: u64,
    waits: Waits,
    preemptions: u64,
}

impl EngineDemand {
    /// Sets the slice of the vGPU's groups, and the length of a round of the runlist.
    pub fn set_slices(&mut self, slice_ns: u64, round_ns: u64) {
        if slice_ns != self.slices_ns[0] {
            self.slices_ns = [slice_ns, self.slices_ns[0]];
            self.with_former = FORMER;
        }
        self.longest_wait_ns = round_ns.saturating_mul(2).saturating_add(LONG_WAIT_NS);
    }

    /// Records a submission. Returns true if a wait begins with it.
    pub fn submit(&mut self, at_ns: u64) -> bool {
        self.submitted_ns = self.submitted_ns.max(at_ns);
        let begins = self.resident_since_ns.is_none() && self.wait.is_none();
        if begins {
            self.wait = Some(Wait::new(at_ns));
        }
        begins
    }

    /// Adds a record of the log. Returns whether the vGPU loses the engine with work left.
    pub fn add(&mut self, record: &CtxswRecord, process: u64) -> bool {
        let before = self.preemptions;
        match record.tag {
            START if record.process == process => {
                self.leave(record.at_ns);
                self.enter(record.at_ns);
            }
            END if record.process == process => self.leave(record.at_ns),
            START | ENGINE_RESET => self.leave(record.at_ns),
            _ => {}
        }
        self.preemptions > before
    }

    /// Records that the gate has opened or closed. `resident` says that the vGPU has the engine.
    pub fn gate(&mut self, open: bool, resident: bool, at_ns: u64) {
        if let Some(wait) = self.wait {
            // However long the gate is closed, the work behind it waits.
            self.waited_ns += self.counted_ns(wait, at_ns);
            self.wait = Some(Wait { counted_until_ns: wait.counted_until_ns.max(at_ns), ..wait });
        }
        self.gated = !open;
        if open && resident && self.resident_since_ns.is_none() {
            self.enter(at_ns);
        }
        if !open && self.resident_since_ns.take().is_some() {
            // A context without work may have been resident, too.
            self.wait = Some(Wait::new(at_ns));
        }
    }

    /// Notes that what was submitted needs no engine, and neither what follows until the vGPU gets
    /// the engine.
    pub fn note_no_work(&mut self) {
        if let Some(wait) = &mut self.wait {
            wait.hollow = true;
        }
    }

    fn enter(&mut self, at_ns: u64) {
        self.resident_since_ns = Some(at_ns);
        if self.wait.is_none() && self.left_ns > 0 && self.submitted_ns < self.left_ns {
            // The vGPU comes back without a submission, so it had left with work. A program that
            // waits for each request may submit the next while the engine changes contexts.
            self.preemptions += u64::from(!self.left_early);
            self.wait = Some(Wait::of_lost_engine(self.left_ns));
        }
        self.continues = self.wait.is_some_and(|wait| wait.lost_engine);
        if let Some(wait) = self.wait.take() {
            self.waited_ns += self.counted_ns(wait, at_ns);
            if !wait.hollow {
                self.waits.record(at_ns.saturating_sub(wait.since_ns));
            }
        } else if self.submitted_ns > 0 {
            self.waits.record(0);
        }
    }

    /// Returns the part of a wait that counts if the wait ends at `at_ns`.
    fn counted_ns(&self, wait: Wait, at_ns: u64) -> u64 {
        let ns = at_ns.saturating_sub(wait.counted_until_ns);
        let longest_ns = if self.gated { u64::MAX } else { self.longest_wait_ns };
        if wait.hollow { 0 } else { ns.min(longest_ns) }
    }

    fn leave(&mut self, at_ns: u64) {
        let Some(since_ns) = self.resident_since_ns.take() else { return };
        let had_ns = at_ns.saturating_sub(since_ns);
        self.left_ns = at_ns;
        let former = usize::from(self.with_former > 0);
        let slices_ns = self.slices_ns[..=former].iter().copied();
        let slice_ns = slices_ns.filter(|ns| *ns > 0).min().unwrap_or(1);
        self.with_former = self.with_former.saturating_sub(1);
        self.left_early = had_ns < slice_ns / 2;
        // Without others that wait, a vGPU keeps the engine beyond its slice, with or without work.
        let beyond = had_ns > slice_ns + slice_ns / 4 + OVERRUN_NS;
        let recent = at_ns.saturating_sub(self.submitted_ns) < RECENT_NS;
        if had_ns >= slice_ns / 16 * 15 && (recent || !beyond) {
            self.preemptions += 1;
            self.wait = Some(Wait::of_lost_engine(at_ns));
        }
        // Records come late: the submission was read before.
        if self.submitted_ns > at_ns {
            self.submit(self.submitted_ns);
        }
    }

    /// Returns whether there is work that the engine has begun, or that waits for the engine. Work
    /// that has ended since counts until another vGPU needs the engine.
    ///
    /// A kernel without an end shows nothing in its rings, and has work at any time: if it had none
    /// while it runs, only intervals that begin and end with a wait would count as contended. In
    /// those, the vGPU runs less than its share.
    pub fn has_work(&self) -> bool {
        match self.resident_since_ns {
            Some(_) => self.continues,
            None => self.wait.is_some_and(|wait| !wait.hollow),
        }
    }

    /// Returns when the vGPU last had the engine, or work without the engine, if that was later.
    pub fn absent_since_ns(&self, last_resident_ns: u64) -> u64 {
        self.wait.map_or(last_resident_ns, |wait| wait.since_ns.max(last_resident_ns))
    }

    /// Returns the total time that work has waited until `now_ns`.
    pub fn waited_ns(&self, now_ns: u64) -> u64 {
        self.waited_ns + self.wait.map_or(0, |wait| self.counted_ns(wait, now_ns))
    }

    /// Returns how often the vGPU lost the engine with work left.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Returns all waits.
    pub fn waits(&self) -> &Waits {
        &self.waits
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const US: u64 = 1_000;
    const MS: u64 = 1_000_000;
    const OWN: u64 = 7;

    fn record(tag: u8, process: u64, at_ns: u64) -> CtxswRecord {
        CtxswRecord { tag, number: 0, context: 1, process, at_ns }
    }

    fn demand(slice_ns: u64) -> EngineDemand {
        let mut demand = EngineDemand::default();
        demand.set_slices(slice_ns, 24 * MS);
        demand
    }

    impl EngineDemand {
        /// Has the engine from `from_ns` to `to_ns`.
        fn reside(&mut self, from_ns: u64, to_ns: u64) {
            self.add(&record(START, OWN, from_ns), OWN);
            self.add(&record(END, OWN, to_ns), OWN);
        }
    }

    #[test]
    fn brief_requests_wait_from_their_submission_to_the_engine() {
        let mut demand = demand(3 * MS);
        for request in 1..=100 {
            let at = request * 10 * MS;
            assert!(demand.submit(at) && !demand.submit(at + 20 * US), "one wait");
            assert!(demand.has_work());
            demand.reside(at + 200 * US, at + 500 * US);
            assert!(!demand.has_work(), "nothing is left to do");
        }
        assert_eq!((demand.waited_ns(u64::MAX), demand.preemptions()), (20 * MS, 0));
        assert_eq!(demand.waits().total(), 100);
        assert_eq!(demand.waits().quantile(0.99).map(|ns| ns / (50 * US)), Some(4));
    }

    #[test]
    fn a_vgpu_whose_slice_ends_waits_for_the_next_one() {
        let mut demand = demand(12 * MS);
        demand.submit(1);
        for round in 0..10 {
            let at = round * 24 * MS;
            demand.reside(at + 1, at + 12 * MS);
            // Queued work is submitted whenever some is done.
        }
        assert_eq!(demand.preemptions(), 10);
        // No time is lost between the readings of a lasting wait.
        assert_eq!(demand.waited_ns(234 * MS), 9 * (12 * MS + 1) + 6 * MS);
    }

    #[test]
    fn a_kernel_without_an_end_has_work_at_any_time() {
        let mut demand = demand(12 * MS);
        demand.submit(1);
        demand.reside(1, 12 * MS);
        for round in 1..100 {
            assert!(demand.has_work(), "it waits");
            let at = round * 24 * MS;
            demand.add(&record(START, OWN, at), OWN);
            assert!(demand.has_work(), "it runs");
            demand.add(&record(END, OWN, at + 12 * MS), OWN);
        }
        // Whether a request still runs is for the rings to tell.
        let mut demand = self::demand(12 * MS);
        demand.submit(MS);
        demand.add(&record(START, OWN, 2 * MS), OWN);
        assert!(!demand.has_work());
    }

    #[test]
    fn an_idle_vgpu_that_keeps_the_engine_does_not_lose_work() {
        let mut demand = demand(MS);
        demand.submit(MS);
        // The request ends after 0.3 ms. Another vGPU has work 8 ms later.
        demand.reside(MS, 9 * MS);
        assert_eq!((demand.preemptions(), demand.has_work()), (0, false));
        // One that submits all the time does.
        demand.submit(10 * MS);
        demand.add(&record(START, OWN, 10 * MS), OWN);
        demand.submit(18 * MS);
        demand.add(&record(START, 9, 19 * MS), OWN);
        assert_eq!((demand.preemptions(), demand.has_work()), (1, true));
    }

    #[test]
    fn a_slice_that_was_used_up_before_it_grew_was_used_up() {
        let mut demand = demand(3 * MS);
        demand.submit(1);
        demand.add(&record(START, OWN, MS), OWN);
        demand.set_slices(12 * MS, 24 * MS);
        demand.add(&record(END, OWN, 4 * MS), OWN);
        assert!(demand.has_work());
        // Whatever the slice is, a vGPU that comes back without a submission was waiting.
        demand.reside(10 * MS, 12 * MS);
        assert!(!demand.has_work());
        demand.add(&record(START, OWN, 15 * MS), OWN);
        assert_eq!((demand.waited_ns(15 * MS), demand.preemptions()), (10 * MS - 1, 2));
    }

    #[test]
    fn a_short_slice_of_before_does_not_make_requests_use_up_slices() {
        let mut demand = demand(200 * US);
        demand.set_slices(12 * MS, 24 * MS);
        for request in 1..=100 {
            let at = request * 13 * MS;
            demand.submit(at - MS);
            demand.reside(at, at + 400 * US);
        }
        assert_eq!(demand.preemptions(), 2);
    }

    #[test]
    fn requests_that_follow_each_other_at_once_do_not_use_up_slices() {
        let mut demand = demand(12 * MS);
        demand.submit(1);
        for round in 1..=100 {
            // The next request comes while the engine changes to another vGPU.
            let at = round * 13 * MS;
            demand.add(&record(START, OWN, at), OWN);
            demand.submit(at + 350 * US);
            demand.add(&record(END, OWN, at + 400 * US), OWN);
        }
        assert_eq!(demand.preemptions(), 0);
        // It waits all the same.
        demand.add(&record(START, OWN, 1_313 * MS), OWN);
        assert_eq!(demand.waited_ns(1_313 * MS) / (100 * MS), 12);
    }

    #[test]
    fn work_that_needs_no_engine_counts_as_waiting_for_a_while_only() {
        let mut demand = demand(3 * MS);
        demand.submit(MS);
        assert_eq!(demand.waited_ns(9_000 * MS), 78 * MS, "two rounds and 30 ms");
        demand.note_no_work();
        assert!(!demand.submit(9_000 * MS), "the same wait, however often it submits");
        assert_eq!((demand.waited_ns(9_000 * MS), demand.has_work()), (0, false));
        // The engine shows that there is work.
        demand.reside(9_001 * MS, 9_002 * MS);
        assert!(demand.submit(9_003 * MS));
        assert_eq!(demand.waits().total(), 0);
    }

    #[test]
    fn a_vgpu_is_absent_since_it_has_work() {
        let mut demand = demand(3 * MS);
        demand.reside(MS, 2 * MS);
        assert_eq!(demand.absent_since_ns(2 * MS), 2 * MS);
        demand.submit(700 * MS);
        assert_eq!(demand.absent_since_ns(2 * MS), 700 * MS, "others ran while it rested");
    }

    #[test]
    fn records_that_come_late_change_little() {
        let mut demand = demand(3 * MS);
        // The submission is read before the end of the residency before it.
        demand.add(&record(START, OWN, 0), OWN);
        demand.submit(2 * MS);
        demand.add(&record(END, OWN, MS), OWN);
        demand.add(&record(START, OWN, 5 * MS), OWN);
        assert_eq!(demand.waited_ns(5 * MS), 3 * MS);
        // The start is older than the submission.
        let mut demand = self::demand(3 * MS);
        demand.submit(2 * MS);
        demand.add(&record(START, OWN, MS), OWN);
        assert_eq!(demand.waited_ns(5 * MS), 0);
    }

    #[test]
    fn a_closed_gate_makes_work_wait() {
        let mut demand = demand(3 * MS);
        demand.submit(1);
        demand.add(&record(START, OWN, 1), OWN);
        demand.gate(false, true, MS);
        demand.gate(true, true, 4 * MS);
        assert_eq!(demand.waited_ns(9 * MS), 3 * MS);
        demand.gate(false, true, 5 * MS);
        demand.note_no_work();
        demand.gate(true, false, 8 * MS);
        assert_eq!(demand.waited_ns(9 * MS), 3 * MS);
    }

    #[test]
    fn a_gate_shows_no_work_of_a_context_that_rests_on_the_engine() {
        let mut demand = demand(12 * MS);
        demand.submit(MS);
        demand.add(&record(START, OWN, 2 * MS), OWN);
        // The request has ended, and no other vGPU needs the engine.
        demand.gate(false, true, 9 * MS);
        demand.gate(true, true, 14 * MS);
        assert!(!demand.has_work());
    }

    #[test]
    fn work_behind_a_closed_gate_waits_however_long() {
        let mut demand = demand(3 * MS);
        demand.submit(1);
        demand.add(&record(START, OWN, 1), OWN);
        demand.gate(false, true, MS);
        assert_eq!(demand.waited_ns(9_001 * MS), 9_000 * MS);
        // A shorter round takes nothing back.
        demand.set_slices(MS, 2 * MS);
        assert_eq!(demand.waited_ns(9_001 * MS), 9_000 * MS);
        demand.gate(true, false, 9_001 * MS);
        assert_eq!(demand.waited_ns(9_011 * MS), 9_010 * MS);
        demand.reside(9_012 * MS, 9_012 * MS + 500 * US);
        assert_eq!(demand.waited_ns(9_020 * MS), 9_011 * MS);
        // The wait that is shown is one, from its beginning.
        assert_eq!(demand.waits().total(), 2, "with the first, which was short");
        assert!(demand.waits().quantile(1.0).unwrap() >= 9_000 * MS);
    }

    proptest! {
        /// Whatever a guest submits and whatever the log contains, time does not count twice.
        #[test]
        fn waits_and_residencies_do_not_exceed_the_time(
            events in prop::collection::vec((0..4_u8, 0..2_u64, 0..5_000_000_u64), 0..200),
        ) {
            let (mut demand, mut now) = (demand(MS), 0);
            for (kind, own, passed) in events {
                now += passed;
                match kind {
                    0 => drop(demand.submit(now)),
                    1 => drop(demand.add(&record(START, OWN + own, now), OWN)),
                    2 => drop(demand.add(&record(END, OWN + own, now), OWN)),
                    _ => demand.gate(own == 0, false, now),
                }
                prop_assert!(demand.waited_ns(now) <= now);
            }
        }
    }
}
