//! Contexts with real pages in simulated time.

use std::sync::Arc;
use std::time::Duration;

use ipc::mem::{Mapping, SharedMemory};
use mdev_core::gpu::Usage;
use proptest::prelude::*;

use super::*;
use crate::mediator::turn_page::{NoTurn, PAGE_BYTES};

const TICK: u64 = 5_000;
const MS: u64 = 1_000_000;
/// Time that a thread takes to wake up.
const WAKE: u64 = 40_000;

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
    /// It says nothing of what it uses.
    is_silent: bool,
    /// It sleeps in its turn at that time, for that long.
    sleep: Option<(u64, u64)>,
    is_asleep_until: u64,
    /// The host runs something else for the second time after each first time of use.
    stolen: Option<(u64, u64)>,
    ran_ns: u64,
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
            is_silent: false,
            sleep: None,
            is_asleep_until: 0,
            stolen: None,
            ran_ns: 0,
            counted_at: 0,
            used_ns: 0,
        }
    }

    fn busy() -> Self {
        Self::new((u64::MAX, u64::MAX))
    }

    fn count(&mut self, now: u64) {
        self.counted_at = now;
        if !self.is_silent {
            self.page.count(&self.usage);
        }
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
            rotation.add(slice_ns);
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

#[test]
fn a_context_that_counts_nothing_gets_four_slices_at_most() {
    let mut gpu = Gpu::new(vec![(Sim::busy(), 2 * MS), (Sim::busy(), 2 * MS)]);
    gpu.contexts[0].is_silent = true;
    gpu.run(2000 * MS);
    let parts = gpu.parts();
    assert!(parts[0] < 81.0, "{parts:?}");
}

#[test]
fn a_context_that_comes_back_at_once_gains_nothing() {
    let mut gpu = Gpu::new(vec![(Sim::busy(), 2 * MS), (Sim::new((100_000, 110_000)), 2 * MS)]);
    gpu.run(2000 * MS);
    let parts = gpu.parts();
    assert!(parts[1] < 53.0, "{parts:?}");
}

#[test]
fn a_context_cannot_end_turns_that_were_not_given() {
    let mut gpu = Gpu::new(vec![(Sim::busy(), 2 * MS), (Sim::busy(), 2 * MS)]);
    gpu.run(20 * MS);
    let before = gpu.used()[1];
    // Its threads are stopped, and its page says: work, not active, all turns have ended.
    gpu.contexts[0].is_asleep_until = u64::MAX;
    for (word, value) in [(64, 1), (72, 0), (96, u64::MAX)] {
        gpu.contexts[0].memory.store_u64(word, value).unwrap();
    }
    gpu.run(500 * MS);
    let used = gpu.used()[1] - before;
    assert!(used > 250 * MS, "{} ms of 500", used / MS);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// A context that has been taken over takes no more than four slices for one of another's.
    #[test]
    fn a_context_that_says_anything_leaves_the_others_their_turns(seed in 1_u64..) {
        let mut gpu = Gpu::new(vec![(Sim::busy(), 2 * MS), (Sim::busy(), 2 * MS)]);
        gpu.contexts[0].random = Some(seed);
        gpu.run(500 * MS);
        gpu.rotation.set_gate(0, false);
        gpu.run(10 * MS);
        gpu.contexts[0].page.usage(gpu.now);
        prop_assert!(gpu.parts()[1] > 18.0, "{:?}", gpu.parts());
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
