//! A runlist in simulated time, to try policies on: same actions in, same counters out, no silicon.

use std::time::Duration;

use super::engine::{Action, Event, Scheduler, ShareError};
use super::policy::{Config, Enforcement};
use super::share::{Core, Share};
use crate::gpu::{Usage, UsageReport};
use crate::ids::VgpuId;

/// How often the counters are read.
pub const REPORT_NS: u64 = 100_000_000;

/// What a simulated vGPU has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Length of one piece of work, in nanoseconds. It is preempted between pieces only.
    pub piece_ns: u64,
    /// Work that comes at once, in nanoseconds of engine time; `u64::MAX` never ends.
    pub burst_ns: u64,
    /// Pause after a burst is done, in nanoseconds.
    pub idle_ns: u64,
}

impl Workload {
    /// Work without an end.
    pub const fn steady(piece_ns: u64) -> Self {
        Self { piece_ns, burst_ns: u64::MAX, idle_ns: 0 }
    }

    /// No work at all.
    pub const IDLE: Self = Self { piece_ns: 1, burst_ns: 0, idle_ns: u64::MAX };

    /// Work in bursts.
    pub const fn bursty(piece_ns: u64, burst_ns: u64, idle_ns: u64) -> Self {
        Self { piece_ns, burst_ns, idle_ns }
    }
}

#[derive(Clone, Debug)]
struct Group {
    id: VgpuId,
    workload: Workload,
    slice_ns: u64,
    open: bool,
    /// Work left of this burst.
    left_ns: u64,
    /// When it has work (again).
    ready_ns: u64,
    usage: Usage,
}

impl Group {
    fn runnable(&self, now_ns: u64) -> bool {
        self.open && self.left_ns > 0 && self.ready_ns <= now_ns
    }

    /// The counters at an instant at which it does not run.
    fn usage(&self, now_ns: u64) -> Usage {
        let runnable = self.runnable(now_ns);
        let waits_ns = if runnable { now_ns - self.ready_ns } else { 0 };
        Usage { wait_ns: self.usage.wait_ns + waits_ns, runnable, ..self.usage }
    }

    /// Runs from `now_ns` until its slice or its work ends; how long that was.
    fn run(&mut self, now_ns: u64) -> u64 {
        let piece_ns = self.workload.piece_ns.max(1);
        let granted_ns = self.slice_ns.div_ceil(piece_ns) * piece_ns;
        let ran_ns = granted_ns.min(self.left_ns);
        self.usage.wait_ns += now_ns - self.ready_ns;
        self.usage.engine_ns += ran_ns;
        self.usage.submissions += ran_ns.div_ceil(piece_ns);
        self.ready_ns = now_ns + ran_ns;
        if self.left_ns != u64::MAX {
            self.left_ns -= ran_ns;
        }
        if self.left_ns == 0 {
            self.left_ns = self.workload.burst_ns;
            self.ready_ns = self.ready_ns.saturating_add(self.workload.idle_ns);
        } else {
            self.usage.preemptions += 1;
        }
        ran_ns
    }
}

/// One parent: a scheduler and the runlist that it steers.
#[derive(Clone, Debug)]
pub struct Simulation {
    scheduler: Scheduler,
    groups: Vec<Group>,
    now_ns: u64,
    /// Whose turn is next.
    next: usize,
    next_report_ns: u64,
    /// What it costs to switch from one group to another, in nanoseconds.
    switch_ns: u64,
    /// Every action so far, with its time.
    log: Vec<(u64, Action)>,
}

impl Simulation {
    /// A parent without vGPUs.
    pub fn new(config: Config, switch_ns: u64) -> Self {
        Self {
            scheduler: Scheduler::new(config, Enforcement::Gates),
            groups: Vec::new(),
            now_ns: 0,
            next: 0,
            next_report_ns: REPORT_NS,
            switch_ns,
            log: Vec::new(),
        }
    }

    /// The scheduler.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Every action so far, with its time in nanoseconds.
    pub fn log(&self) -> &[(u64, Action)] {
        &self.log
    }

    /// Starts a vGPU.
    pub fn start(
        &mut self,
        id: VgpuId,
        core: Option<Core>,
        workload: Workload,
    ) -> Result<(), ShareError> {
        let actions = self.scheduler.handle(Event::VgpuStarted {
            id,
            share: Share::of(core),
            max_instances: 8,
        })?;
        self.groups.push(Group {
            id,
            workload,
            slice_ns: 0,
            open: false,
            left_ns: workload.burst_ns,
            ready_ns: self.now_ns,
            usage: Usage::default(),
        });
        self.apply(actions);
        Ok(())
    }

    /// Stops a vGPU.
    pub fn stop(&mut self, id: VgpuId) -> Result<(), ShareError> {
        self.groups.retain(|group| group.id != id);
        self.next = 0;
        self.event(Event::VgpuStopped { id })
    }

    /// Gives the scheduler an event, and the runlist what comes of it.
    pub fn event(&mut self, event: Event<'_>) -> Result<(), ShareError> {
        let actions = self.scheduler.handle(event)?;
        self.apply(actions);
        Ok(())
    }

    /// Lets time pass. Ends with the slice that is running then.
    pub fn run(&mut self, time: Duration) -> Result<(), ShareError> {
        let end_ns = self.now_ns.saturating_add(time.as_nanos() as u64);
        while self.now_ns < end_ns {
            self.step(end_ns);
            if self.now_ns >= self.next_report_ns {
                self.next_report_ns = self.now_ns + REPORT_NS;
                let report = self.usage();
                self.event(Event::UsageReport(&report))?;
            }
        }
        Ok(())
    }

    /// The counters now.
    pub fn usage(&self) -> UsageReport {
        let vgpus = self.groups.iter().map(|group| (group.id, group.usage(self.now_ns)));
        UsageReport { now_ns: self.now_ns, vgpus: vgpus.collect() }
    }

    fn step(&mut self, end_ns: u64) {
        let count = self.groups.len();
        let turns = (0..count).map(|turn| (self.next + turn) % count);
        let turn = turns.clone().find(|turn| self.groups[*turn].runnable(self.now_ns));
        if let Some(turn) = turn {
            let ran_ns = self.groups[turn].run(self.now_ns);
            self.now_ns += ran_ns + self.switch_ns;
            self.next = (turn + 1) % count;
        } else {
            let open = self.groups.iter().filter(|group| group.open && group.left_ns > 0);
            let ready_ns = open.map(|group| group.ready_ns).min().unwrap_or(u64::MAX);
            self.now_ns = ready_ns.min(self.next_report_ns).min(end_ns);
        }
    }

    fn apply(&mut self, actions: Vec<Action>) {
        for action in actions {
            self.log.push((self.now_ns, action));
            let (Action::SetTimeslice(id, _) | Action::Gate(id, _) | Action::SetBudget(id, _)) =
                action;
            let Some(group) = self.groups.iter_mut().find(|group| group.id == id) else { continue };
            match action {
                Action::SetTimeslice(_, slice) => group.slice_ns = slice.as_nanos() as u64,
                Action::Gate(_, open) => group.open = open,
                Action::SetBudget(..) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;
    use crate::sched::Policy;
    use crate::sched::policy::{MAX_SLICE, MIN_SLICE};

    const US: u64 = 1_000;
    const MS: u64 = 1_000_000;
    /// As the software GPU is: a switch costs little, and comes within 50 us.
    const SWITCH_NS: u64 = 2 * US;
    const PREEMPT_NS: u64 = 50 * US;

    fn id(n: usize) -> VgpuId {
        VgpuId(Uuid::from_u128(n as u128))
    }

    fn config(policy: Policy) -> Config {
        Config { policy, ..Config::new(Duration::from_millis(2)) }
    }

    fn simulate(groups: &[(Option<u8>, Workload)]) -> Simulation {
        let mut sim = Simulation::new(config(Policy::Weighted), SWITCH_NS);
        for (n, (core, workload)) in groups.iter().enumerate() {
            let core = core.map(|core| Core::try_from(core).unwrap());
            sim.start(id(n), core, *workload).unwrap();
        }
        sim
    }

    /// Shares of the engine's busy time, in points, over 10 s after 1 s.
    fn shares(sim: &mut Simulation) -> Vec<f64> {
        sim.run(Duration::from_secs(1)).unwrap();
        shares_over(sim, Duration::from_secs(10))
    }

    fn shares_over(sim: &mut Simulation, time: Duration) -> Vec<f64> {
        let before = sim.usage();
        sim.run(time).unwrap();
        let after = sim.usage();
        let used = before.vgpus.iter().zip(&after.vgpus);
        let used: Vec<_> =
            used.map(|((_, b), (_, a))| (a.engine_ns - b.engine_ns) as f64).collect();
        let total: f64 = used.iter().sum();
        used.into_iter().map(|used| 100.0 * used / total).collect()
    }

    fn assert_near(got: &[f64], asked: &[f64], points: f64) {
        let near = got.iter().zip(asked).all(|(got, asked)| (got - asked).abs() <= points);
        assert!(near && got.len() == asked.len(), "got {got:?}, asked {asked:?}");
    }

    #[test]
    fn eighty_twenty_is_eighty_twenty() {
        let busy = Workload::steady(PREEMPT_NS);
        let mut sim = simulate(&[(Some(80), busy), (Some(20), busy)]);
        let slices = [sim.scheduler().slice(id(0)), sim.scheduler().slice(id(1))];
        assert_eq!(slices.map(Option::unwrap).map(|slice| slice.as_micros()), [3200, 800]);
        assert_near(&shares(&mut sim), &[80.0, 20.0], 0.2);
    }

    #[test]
    fn kernels_that_outrun_their_slice_are_charged_for_it() {
        let (long, short) = (Workload::steady(MS), Workload::steady(PREEMPT_NS));
        for (core, workloads) in [((80, 20), (short, long)), ((80, 20), (long, short))] {
            let mut sim = simulate(&[(Some(core.0), workloads.0), (Some(core.1), workloads.1)]);
            assert_near(&shares(&mut sim), &[80.0, 20.0], 1.0);
        }
    }

    #[test]
    fn those_that_do_not_ask_share_what_is_left() {
        let busy = Workload::steady(PREEMPT_NS);
        let mut sim = simulate(&[(Some(40), busy), (None, busy), (None, busy)]);
        assert_near(&shares(&mut sim), &[40.0, 30.0, 30.0], 0.5);
        let mut sim = simulate(&[(None, busy); 3]);
        assert_near(&shares(&mut sim), &[100.0 / 3.0; 3], 0.2);
        // All is asked for: the third is not starved.
        let mut sim = simulate(&[(Some(80), busy), (Some(20), busy), (None, busy)]);
        assert_near(&shares(&mut sim), &[80.0, 20.0, 1.0].map(|s| s / 1.01), 0.5);
    }

    #[test]
    fn idle_time_goes_to_whoever_can_use_it() {
        let mut sim =
            simulate(&[(Some(80), Workload::IDLE), (Some(20), Workload::steady(PREEMPT_NS))]);
        sim.run(Duration::from_secs(5)).unwrap();
        let used = sim.usage().vgpus[1].1.engine_ns;
        assert!(used as f64 > 0.98 * 5e9, "{used}");
    }

    #[test]
    fn a_vgpu_that_was_idle_gets_its_share_and_no_more_when_it_comes_back() {
        let busy = Workload::steady(PREEMPT_NS);
        let away = Workload::bursty(PREEMPT_NS, u64::MAX, 0);
        let mut sim = simulate(&[(Some(20), busy), (Some(80), away)]);
        sim.groups[1].ready_ns = 5_000 * MS;
        sim.run(Duration::from_secs(5)).unwrap();
        assert_near(&shares_over(&mut sim, Duration::from_millis(500)), &[20.0, 80.0], 1.0);
    }

    #[test]
    fn best_effort_ignores_core_and_policies_change_while_running() {
        let busy = Workload::steady(PREEMPT_NS);
        let mut sim = simulate(&[(Some(90), busy), (Some(10), busy)]);
        assert_near(&shares(&mut sim), &[90.0, 10.0], 0.5);
        sim.event(Event::ConfigChanged(config(Policy::BestEffort))).unwrap();
        assert_near(&shares(&mut sim), &[50.0, 50.0], 0.5);
        sim.event(Event::ConfigChanged(config(Policy::Weighted))).unwrap();
        assert_near(&shares_over(&mut sim, Duration::from_secs(1)), &[90.0, 10.0], 1.0);
    }

    #[test]
    fn a_share_changes_at_once() {
        let busy = Workload::steady(PREEMPT_NS);
        let mut sim = simulate(&[(Some(50), busy), (Some(20), busy)]);
        sim.run(Duration::from_secs(2)).unwrap();
        let core = Some(Core::try_from(80).unwrap());
        sim.event(Event::ShareChanged { id: id(0), share: Share::of(core) }).unwrap();
        assert_near(&shares_over(&mut sim, Duration::from_millis(200)), &[80.0, 20.0], 1.5);
    }

    #[test]
    fn unequal_sixteen_have_what_they_asked_for() {
        let asked = [20, 15, 12, 10, 8, 6, 5, 5, 4, 4, 3, 2, 2, 2, 1, 1_u8];
        let pieces = [5 * US, PREEMPT_NS, 20 * US];
        let groups: Vec<_> =
            (0..16).map(|n| (Some(asked[n]), Workload::steady(pieces[n % 3]))).collect();
        assert_near(&shares(&mut simulate(&groups)), &asked.map(f64::from), 1.0);
    }

    /// Weights that sum up to at most 100.
    fn any_cores() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(1_u8..=100, 1..8).prop_map(|mut cores| {
            let mut left = 100;
            for core in &mut cores {
                *core = (*core).min(left);
                left -= *core;
            }
            cores.retain(|core| *core > 0);
            cores
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn busy_groups_get_their_shares(
            cores in any_cores(),
            pieces in prop::collection::vec(1..=50_u64, 8),
        ) {
            let groups: Vec<_> = cores
                .iter()
                .zip(pieces)
                .map(|(core, piece)| (Some(*core), Workload::steady(piece * US)))
                .collect();
            let total: f64 = cores.iter().copied().map(f64::from).sum();
            let mut sim = simulate(&groups);
            let got = shares(&mut sim);
            for (got, core) in got.iter().zip(&cores) {
                let asked = 100.0 * f64::from(*core) / total;
                prop_assert!((got - asked).abs() <= 1.0, "got {got}, asked {asked}");
            }
        }

        #[test]
        fn nobody_starves_and_nothing_is_wasted(
            cores in prop::collection::vec(prop::option::of(1..=10_u8), 2..10),
            loads in prop::collection::vec((1..=2000_u64, 1..=20_000_u64, 0..=50_000_u64), 10),
        ) {
            // Whatever the others do (steady, bursty, long pieces), one busy vGPU is never left waiting.
            let mut groups: Vec<_> = cores
                .iter()
                .zip(&loads)
                .map(|(core, (piece, burst, idle))| {
                    (*core, Workload::bursty(piece * US, burst * US, idle * US))
                })
                .collect();
            groups[0].1 = Workload::steady(PREEMPT_NS);
            let mut sim = simulate(&groups);
            let mut used = 0;
            for _ in 0..30 {
                sim.run(Duration::from_secs(1)).unwrap();
                let now = sim.usage().vgpus[0].1.engine_ns;
                prop_assert!(now - used >= 5 * MS, "ran {} ns in a second", now - used);
                used = now;
            }
            let engine: u64 = sim.usage().vgpus.iter().map(|(_, usage)| usage.engine_ns).sum();
            let lost = 1.0 - engine as f64 / sim.now_ns as f64;
            prop_assert!(lost < 0.25, "{lost}");
        }

        #[test]
        fn slices_keep_their_bounds_and_their_mean(
            cores in any_cores(),
            silent in 0..20_usize,
            default_us in 1..=100_000_u64,
        ) {
            let default_slice = Duration::from_micros(default_us);
            let mut sched = Scheduler::new(Config::new(default_slice), Enforcement::Gates);
            let cores = cores.iter().map(|core| Some(Core::try_from(*core).unwrap()));
            let mut count = 0;
            for core in cores.chain(std::iter::repeat_n(None, silent)) {
                sched.handle(Event::VgpuStarted { id: id(count), share: Share::of(core), max_instances: 8 }).unwrap();
                count += 1;
            }
            let slices: Vec<_> = (0..count).map(|n| sched.slice(id(n)).unwrap()).collect();
            prop_assert!(slices.iter().all(|slice| (MIN_SLICE..=MAX_SLICE).contains(slice)));
            let bound = slices.iter().any(|s| *s == MIN_SLICE || s.abs_diff(MAX_SLICE).as_nanos() < 2);
            let mean = slices.iter().sum::<Duration>() / count as u32;
            prop_assert!(bound || mean.abs_diff(default_slice) < Duration::from_micros(1));
        }

        #[test]
        fn the_same_events_have_the_same_actions(
            cores in any_cores(),
            loads in prop::collection::vec((1..=500_u64, 1..=5000_u64, 0..=5000_u64), 8),
        ) {
            let groups: Vec<_> = cores
                .iter()
                .zip(&loads)
                .map(|(core, (piece, burst, idle))| {
                    (Some(*core), Workload::bursty(piece * US, burst * US, idle * US))
                })
                .collect();
            let run = || {
                let mut sim = simulate(&groups);
                sim.run(Duration::from_secs(3)).unwrap();
                sim.stop(id(0)).unwrap();
                sim.run(Duration::from_secs(1)).unwrap();
                (sim.log().to_vec(), sim.usage())
            };
            prop_assert_eq!(run(), run());
        }
    }
}
