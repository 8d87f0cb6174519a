//! Contexts with real pages in simulated time.

use std::sync::Arc;
use std::time::Duration;

use ipc::mem::{Mapping, SharedMemory};
use mdev_core::gpu::Usage;
use proptest::prelude::*;

use super::*;
use crate::mediator::turn_page::{NoTurn, PAGE_BYTES, arbiters, contexts};

const TICK: u64 = 5_000;
const MS: u64 = 1_000_000;
/// Time that a thread takes to wake up.
const WAKE: u64 = 40_000;

/// What a context that has been taken over writes to its page.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    /// Each turn ends this long after it could begin, and used nothing.
    EndsAfter(u64),
    /// The same, and it says so only then.
    BeginsAndEndsAfter(u64),
    /// No turn begins. One that is revoked ends.
    NeverBegins,
    /// Turns begin, are used whole, and used nothing.
    CountsNothing,
    /// The same, and they have begun when they end.
    BeginsAtItsEnd,
    /// Turns that were not given have ended.
    EndsLater,
}

/// A simulated context.
struct Sim {
    page: TurnPage,
    /// Its page, for one that has been taken over and writes anything.
    memory: Arc<Mapping>,
    /// State of a random sequence of such words.
    random: Option<u64>,
    usage: Usage,
    /// Work per period, and the period.
    work: (u64, u64),
    left_ns: u64,
    /// Time from which on the context sees the last change of its page.
    sees_at: u64,
    changes: u32,
    lie: Option<Lie>,
    /// It sleeps in its turn at that time, for that long.
    sleep: Option<(u64, u64)>,
    is_asleep_until: u64,
    /// The host runs something else for the second time after each first time of use.
    stolen: Option<(u64, u64)>,
    ran_ns: u64,
    /// Time for which the host has run something else.
    delayed_ns: u64,
    counted_at: u64,
    /// Ticks in which it used the engine.
    used_ns: u64,
}

impl Sim {
    fn new(work: (u64, u64)) -> Self {
        let memory = SharedMemory::new(c"sim", PAGE_BYTES).unwrap().mapping;
        let page = TurnPage::new(Arc::clone(&memory)).unwrap();
        page.count(&Usage::default());
        Self {
            page,
            memory,
            random: None,
            usage: Usage::default(),
            work,
            left_ns: 0,
            sees_at: 0,
            changes: 0,
            lie: None,
            sleep: None,
            is_asleep_until: 0,
            stolen: None,
            ran_ns: 0,
            delayed_ns: 0,
            counted_at: 0,
            used_ns: 0,
        }
    }

    fn busy() -> Self {
        Self::new((u64::MAX, u64::MAX))
    }

    fn count(&mut self, now: u64) {
        self.counted_at = now;
        self.page.count(&self.usage);
    }

    /// Writes words of a lie. Returns whether it rings.
    fn tell(&mut self, lie: Lie, now: u64) -> bool {
        let load = |word| self.memory.load_u64(word).unwrap();
        let store = |word, value| self.memory.store_u64(word, value).unwrap();
        let (number, begin, length) =
            (load(arbiters::NUMBER), load(arbiters::BEGIN_NS), load(arbiters::LENGTH_NS));
        let end = |number| {
            store(contexts::ENDED, number);
            store(contexts::ACTIVE, 0);
        };
        let begins = |at| {
            store(contexts::BEGAN_NS, at);
            store(contexts::BEGAN, number);
            store(contexts::ACTIVE, number);
        };
        store(contexts::WAITS_SINCE_NS, 1);
        let has_ended = load(contexts::ENDED) >= number;
        let is_revoked = load(arbiters::REVOKED) >= number;
        if lie == Lie::EndsLater {
            end(u64::MAX);
        } else if is_revoked && !has_ended {
            end(number);
            return true;
        }
        if has_ended || now < begin {
            return false;
        }
        match lie {
            Lie::EndsAfter(after) if now >= begin.saturating_add(after) => {
                end(number);
                return true;
            }
            Lie::BeginsAndEndsAfter(after) if now >= begin.saturating_add(after) => {
                begins(begin);
                end(number);
                return true;
            }
            Lie::EndsAfter(_) | Lie::CountsNothing => begins(begin),
            Lie::BeginsAtItsEnd if now >= begin.saturating_add(length.min(MS)) => begins(now),
            _ => {}
        }
        false
    }

    /// Writes a word of a random sequence somewhere.
    fn write_anything(&mut self) {
        let Some(random) = &mut self.random else { return };
        for shift in [13_i32, -7, 17] {
            *random ^= if shift > 0 { *random << shift } else { *random >> -shift };
        }
        // Small numbers are those of turns, and large ones overflow.
        let value = if *random & 1 == 0 { *random % 64 } else { *random };
        let place = 64 + 8 * (*random >> 32) % 32;
        self.memory.store_u64(place, value).unwrap();
    }

    /// Lets a tick pass. Returns whether it rings its bell, and whether it uses the engine.
    fn tick(&mut self, now: u64) -> (bool, bool) {
        if now.is_multiple_of(self.work.1) || now == 0 {
            self.left_ns = self.left_ns.saturating_add(self.work.0);
        }
        if self.random.is_some() {
            self.write_anything();
            return (now.is_multiple_of(10 * TICK), false);
        }
        if let Some(lie) = self.lie {
            return (self.tell(lie, now), false);
        }
        if now < self.is_asleep_until {
            return (false, false);
        }
        if self.left_ns == 0 {
            self.count(now);
            return (self.page.rest(), false);
        }
        let changes = self.page.changes();
        if changes != self.changes {
            (self.changes, self.sees_at) = (changes, now + WAKE);
        }
        let is_new = self.page.set_waits_since(now);
        if now < self.sees_at && !self.page.seen().is_active {
            return (is_new, false);
        }
        match self.page.begin(now) {
            Ok(_) => {
                if self.sleep.is_some_and(|(at, _)| now >= at) {
                    self.is_asleep_until = now + self.sleep.take().unwrap().1;
                    return (is_new, false);
                }
                self.used_ns += TICK;
                self.ran_ns += TICK;
                if let Some((runs, off)) = self.stolen
                    && self.ran_ns >= runs
                {
                    (self.ran_ns, self.is_asleep_until) = (0, now + off);
                    self.delayed_ns += off;
                }
                self.usage.engine_ns += TICK;
                self.left_ns -= TICK.min(self.left_ns);
                if now - self.counted_at >= 200_000 {
                    self.count(now);
                }
                (is_new, true)
            }
            Err(end) => {
                self.count(now);
                (is_new || end == NoTurn::Revoked, false)
            }
        }
    }
}

impl Contexts for Vec<Sim> {
    fn page(&self, seat: usize) -> &TurnPage {
        &self[seat].page
    }

    fn delayed_ns(&self, seat: usize) -> u64 {
        self[seat].delayed_ns
    }
}

/// A GPU in simulated time.
struct Gpu {
    rotation: Rotation,
    contexts: Vec<Sim>,
    now: u64,
    looks_at: Option<u64>,
    /// Time in which more than one context used the engine.
    shared_ns: u64,
}

impl Gpu {
    fn new(contexts: Vec<(Sim, u64)>) -> Self {
        let mut rotation = Rotation::default();
        let mut sims = Vec::new();
        for (sim, slice_ns) in contexts {
            rotation.add(slice_ns, 0);
            sims.push(sim);
        }
        Self { rotation, contexts: sims, now: 0, looks_at: Some(0), shared_ns: 0 }
    }

    fn run(&mut self, ns: u64) {
        let end = self.now + ns;
        while self.now < end {
            let now = self.now;
            let (mut rings, mut using) = (false, 0);
            for context in &mut self.contexts {
                let (rang, uses) = context.tick(now);
                rings |= rang;
                using += u64::from(uses);
            }
            self.shared_ns += if using > 1 { TICK } else { 0 };
            if rings {
                self.looks_at = Some(self.looks_at.unwrap_or(u64::MAX).min(now + WAKE));
            }
            if self.looks_at.is_some_and(|at| at <= now) {
                self.looks_at = self.rotation.step(now, &self.contexts);
                assert!(self.looks_at.is_none_or(|at| at > now || at + TICK > now), "it spins");
            }
            self.now += TICK;
        }
    }

    fn used(&self) -> Vec<u64> {
        self.contexts.iter().map(|context| context.used_ns).collect()
    }

    /// Returns the parts of the time, in hundredths.
    fn parts(&self) -> Vec<f64> {
        self.used().iter().map(|used| *used as f64 / self.now as f64 * 100.0).collect()
    }
}

#[test]
fn busy_contexts_share_by_their_slices_and_waste_nothing() {
    for (slices, due) in [
        (vec![8 * MS, 2 * MS], vec![80.0, 20.0]),
        (vec![2 * MS, 2 * MS], vec![50.0, 50.0]),
        (vec![MS / 5, MS / 5], vec![50.0, 50.0]),
        (vec![4 * MS, 2 * MS, MS], vec![57.14, 28.57, 14.29]),
        (vec![2 * MS; 16], vec![6.25; 16]),
    ] {
        let contexts = slices.iter().map(|slice| (Sim::busy(), *slice)).collect();
        let mut gpu = Gpu::new(contexts);
        gpu.run(4000 * MS);
        let parts = gpu.parts();
        for (part, due) in parts.iter().zip(&due) {
            assert!((part / due - 1.0).abs() < 0.03, "{slices:?}: {parts:?}");
        }
        assert!(parts.iter().sum::<f64>() > 98.0, "{slices:?}: {parts:?}");
        assert!(gpu.shared_ns < gpu.now / 50, "{slices:?}: {} together", gpu.shared_ns);
    }
}

#[test]
fn a_context_alone_keeps_its_turn() {
    let mut gpu = Gpu::new(vec![(Sim::new((MS, 3 * MS)), 2 * MS), (Sim::new((0, MS)), 2 * MS)]);
    gpu.run(300 * MS);
    assert_eq!(gpu.used()[0], 100 * MS);
    assert_eq!(gpu.rotation.last_number, 1, "one turn, without an end");
    assert_eq!(gpu.looks_at, None, "there is nothing to look at");
}

#[test]
fn a_newcomer_waits_for_the_rest_of_a_slice_at_most() {
    let mut gpu = Gpu::new(vec![(Sim::busy(), 2 * MS), (Sim::new((0, MS)), 2 * MS)]);
    gpu.run(500 * MS);
    gpu.contexts[1].work = (u64::MAX, u64::MAX);
    gpu.contexts[1].left_ns = u64::MAX;
    gpu.run(2 * MS + 300_000);
    assert!(gpu.used()[1] > 0, "{:?}", gpu.used());
    gpu.run(400 * MS);
    let used = gpu.used()[1];
    assert!(used > 195 * MS && used < 206 * MS, "{used}: half of the time");
}

#[test]
fn a_context_that_sleeps_in_its_turn_holds_no_other() {
    let mut gpu = Gpu::new(vec![(Sim::busy(), 2 * MS), (Sim::busy(), 2 * MS)]);
    gpu.run(20 * MS);
    gpu.contexts[0].sleep = Some((gpu.now, 1000 * MS));
    let before = gpu.used()[1];
    gpu.run(500 * MS);
    let used = gpu.used()[1] - before;
    assert!(used > 495 * MS, "{used} of 500 ms");
    // It has no advantage afterwards.
    gpu.run(600 * MS);
    let before = gpu.used();
    gpu.run(400 * MS);
    let part = (gpu.used()[1] - before[1]) as f64 / (400 * MS) as f64;
    assert!((part - 0.5).abs() < 0.03, "{part}");
}

#[test]
fn shares_hold_while_the_host_runs_something_else() {
    for stolen in [(3 * MS, 3 * MS), (3 * MS, 9 * MS), (MS / 2, MS)] {
        let mut gpu = Gpu::new(vec![(Sim::busy(), 8 * MS), (Sim::busy(), 2 * MS)]);
        gpu.contexts.iter_mut().for_each(|context| context.stolen = Some(stolen));
        gpu.run(8000 * MS);
        let used = gpu.used();
        let part = used[0] as f64 / (used[0] + used[1]) as f64;
        println!("{stolen:?}: {part:.3}, {:?}", gpu.parts());
        assert!((part - 0.8).abs() < 0.02, "{stolen:?}: {part}");
    }
}

#[test]
fn nothing_is_looked_for_when_no_context_has_work() {
    let mut gpu = Gpu::new(vec![(Sim::busy(), 2 * MS), (Sim::busy(), 2 * MS)]);
    gpu.run(20 * MS);
    // One does not begin its turn in time, and then has no work any more.
    gpu.contexts[0].is_asleep_until = gpu.now + 50 * MS;
    gpu.run(10 * MS);
    for context in &mut gpu.contexts {
        (context.work, context.left_ns) = ((0, MS), 0);
    }
    gpu.run(100 * MS);
    let before = gpu.rotation.last_number;
    gpu.run(100 * MS);
    assert_eq!((gpu.looks_at, gpu.rotation.last_number), (None, before));
}

#[test]
fn a_budget_caps_and_a_gate_stops() {
    let mut gpu = Gpu::new(vec![(Sim::busy(), 2 * MS), (Sim::new((0, MS)), 2 * MS)]);
    gpu.rotation.set_budget(0, Budget::part(0.25, Duration::from_millis(10)), 0);
    gpu.run(1000 * MS);
    let used = gpu.used()[0];
    assert!(used > 243 * MS && used < 257 * MS, "{used} for 250 ms");
    let counts = gpu.rotation.counts(0, gpu.now);
    assert!(counts.gated_ns > 700 * MS && counts.gate_closings > 80, "{counts:?}");
    gpu.rotation.set_budget(0, None, gpu.now);
    gpu.run(10 * MS);
    gpu.rotation.set_gate(0, false);
    gpu.looks_at = Some(gpu.now);
    gpu.run(MS);
    let before = gpu.used()[0];
    gpu.run(100 * MS);
    assert_eq!(gpu.used()[0], before);
    gpu.rotation.set_gate(0, true);
    gpu.looks_at = Some(gpu.now);
    gpu.run(100 * MS);
    assert!(gpu.used()[0] > before + 99 * MS);
}

/// A context that has been taken over holds the engine for its own share at most, with and without
/// a cap, whatever it says.
#[test]
fn a_context_that_lies_takes_nothing_from_another() {
    for lie in [
        Lie::EndsAfter(900_000),
        Lie::EndsAfter(50_000),
        Lie::BeginsAndEndsAfter(900_000),
        Lie::NeverBegins,
        Lie::CountsNothing,
        Lie::BeginsAtItsEnd,
        Lie::EndsLater,
    ] {
        for (slice, cap, due) in
            [(2 * MS, None, 49.5), (MS / 5, None, 49.5), (2 * MS, Some(0.1), 89.0)]
        {
            let mut gpu = Gpu::new(vec![(Sim::busy(), slice), (Sim::busy(), slice)]);
            let budget = cap.and_then(|part| Budget::part(part, Duration::from_millis(10)));
            gpu.rotation.set_budget(0, budget, 0);
            gpu.run(20 * MS);
            gpu.contexts[0].lie = Some(lie);
            let before = gpu.used()[1];
            gpu.run(1000 * MS);
            let part = (gpu.used()[1] - before) as f64 / 10.0 / MS as f64;
            println!("{lie:?}, {slice} ns, cap {cap:?}: {part:.1} %");
            assert!(part > due, "{lie:?}, {slice} ns, cap {cap:?}: {part}");
        }
    }
}

/// What a context says of its engine time is no more than the time that has passed.
#[test]
fn a_context_counts_no_more_than_the_time_that_has_passed() {
    let mut gpu = Gpu::new(vec![(Sim::busy(), 2 * MS), (Sim::busy(), 2 * MS)]);
    gpu.run(20 * MS);
    let said = u64::MAX / 2;
    let engine_ns = |gpu: &Gpu| gpu.rotation.engine_ns(0, said, gpu.now);
    assert!(engine_ns(&gpu) <= 20 * MS);
    gpu.contexts[0].page.count(&Usage { engine_ns: said, ..Usage::default() });
    gpu.looks_at = Some(gpu.now);
    gpu.run(20 * MS);
    assert!(engine_ns(&gpu) <= 40 * MS);
    // One that an earlier arbiter had is taken at its word, up to the time on the clock.
    let seat = gpu.rotation.add(MS, gpu.now);
    assert_eq!(gpu.rotation.engine_ns(seat, 30 * MS, gpu.now), 30 * MS);
    assert_eq!(gpu.rotation.engine_ns(seat, said, gpu.now), gpu.now);
}

#[test]
fn a_context_that_comes_back_at_once_gains_nothing() {
    let mut gpu = Gpu::new(vec![(Sim::busy(), 2 * MS), (Sim::new((100_000, 110_000)), 2 * MS)]);
    gpu.run(2000 * MS);
    let parts = gpu.parts();
    assert!(parts[1] < 53.0, "{parts:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// A context that has been taken over takes no more than its share.
    #[test]
    fn a_context_that_says_anything_leaves_the_others_their_turns(seed in 1_u64..) {
        let mut gpu = Gpu::new(vec![(Sim::busy(), 2 * MS), (Sim::busy(), 2 * MS)]);
        gpu.contexts[0].random = Some(seed);
        gpu.run(500 * MS);
        gpu.rotation.set_gate(0, false);
        gpu.run(10 * MS);
        gpu.contexts[0].page.usage(gpu.now);
        prop_assert!(gpu.parts()[1] > 48.0, "{:?}", gpu.parts());
    }

    /// Whatever contexts do, a busy one gets its share, and time is used.
    #[test]
    fn a_busy_context_gets_its_share_beside_any_others(
        others in prop::collection::vec((1_u64..60, 1_u64..80, 1_u64..8), 1..5),
        slice in 1_u64..8,
        removed in 0_usize..5,
    ) {
        let mut contexts = vec![(Sim::busy(), slice * MS)];
        contexts.extend(others.iter().map(|(work, period, slice)| {
            (Sim::new((work * 25_000, period * 50_000)), slice * MS)
        }));
        let slices: u64 = contexts.iter().map(|(_, slice)| slice).sum();
        let mut gpu = Gpu::new(contexts);
        gpu.run(1500 * MS);
        let part = gpu.parts()[0] / 100.0;
        let due = (slice * MS) as f64 / slices as f64;
        prop_assert!(part > due * 0.95 - 0.01, "{part} of {due}");
        let before = gpu.used()[0];
        if removed > 0 && removed < gpu.contexts.len() {
            gpu.contexts.remove(removed);
            gpu.rotation.remove(removed);
            gpu.looks_at = Some(gpu.now);
        }
        gpu.run(500 * MS);
        prop_assert!((gpu.used()[0] - before) as f64 > due * 450e6, "after another one has left");
    }
}
