//! What the policies promise, tried on a runlist in simulated time.

use proptest::prelude::*;
use uuid::Uuid;

use super::*;
use crate::sched::policy::{MAX_SLICE, MIN_SLICE};
use crate::sched::{Averaging, Core, Enforcement, Mode, Policy, Priority};

mod long_kernels;
mod misread;

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
    let mut sim = Simulation::new(config(Policy::Weighted), Enforcement::Budgets, SWITCH_NS);
    for (n, (core, workload)) in groups.iter().enumerate() {
        let core = core.map(|core| Core::try_from(core).unwrap());
        sim.start(id(n), Share::of(core), *workload).unwrap();
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
    let used: Vec<_> = used.map(|((_, b), (_, a))| (a.engine_ns - b.engine_ns) as f64).collect();
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
    let mut sim = simulate(&[(Some(80), Workload::IDLE), (Some(20), Workload::steady(PREEMPT_NS))]);
    sim.run(Duration::from_secs(5)).unwrap();
    let used = sim.usage().vgpus[1].1.engine_ns;
    assert!(used as f64 > 0.98 * 5e9, "{used}");
}

#[test]
fn a_vgpu_that_was_idle_gets_its_share_and_no_more_when_it_comes_back() {
    let busy = Workload::steady(PREEMPT_NS);
    let away = busy.after(5_000 * MS);
    let mut sim = simulate(&[(Some(20), busy), (Some(80), away)]);
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
fn a_flood_of_nothing_is_not_waited_for_while_others_outrun_their_slices() {
    let (flood, long) = (Workload::bursty(US, US, 0), Workload::steady(4 * MS));
    let busy = Workload::steady(PREEMPT_NS);
    let mut sim =
        simulate(&[(Some(25), busy), (Some(25), long), (Some(25), flood), (Some(25), busy)]);
    let got = shares(&mut sim);
    let each = (100.0 - got[2]) / 3.0;
    assert_near(&got, &[each, each, got[2], each], 1.0);
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
        let mut sched = Scheduler::new(Config::new(default_slice), Enforcement::Gates, 0);
        let cores = cores.iter().map(|core| Some(Core::try_from(*core).unwrap()));
        let mut count = 0;
        for core in cores.chain(std::iter::repeat_n(None, silent)) {
            sched.handle(Event::VgpuStarted { id: id(count), share: Share::of(core), max_instances: 8 }).unwrap();
            count += 1;
        }
        let slices: Vec<_> = (0..count).map(|n| sched.slice(id(n)).unwrap()).collect();
        prop_assert!(slices.iter().all(|slice| (MIN_SLICE..=MAX_SLICE).contains(slice)));
        // Bounds and the mean are kept as long as they are near: not everybody is told of a little.
        let bound = slices.iter().any(|s| *s <= MIN_SLICE * 7 / 6 || *s >= MAX_SLICE * 5 / 6);
        let mean = slices.iter().sum::<Duration>() / count as u32;
        prop_assert!(bound || mean.abs_diff(default_slice) <= default_slice / 6, "{mean:?}");
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
            (sim.scheduler().log().iter().copied().collect::<Vec<_>>(), sim.usage())
        };
        prop_assert_eq!(run(), run());
    }
}

const BOTH: [Enforcement; 2] = [Enforcement::Budgets, Enforcement::Gates];

fn soft(core: u8) -> Share {
    Share::of(Core::try_from(core).ok())
}

fn hard(core: u8) -> Share {
    Share { mode: Mode::Hard, ..soft(core) }
}

fn simulate_under(
    config: Config,
    enforcement: Enforcement,
    groups: &[(Share, Workload)],
) -> Simulation {
    let mut sim = Simulation::new(config, enforcement, SWITCH_NS);
    // A manager on a busy machine.
    sim.set_late(Duration::from_millis(2));
    for (n, (share, workload)) in groups.iter().enumerate() {
        sim.start(id(n), *share, *workload).unwrap();
    }
    sim
}

/// Hundredths of the wall time, over a time.
fn parts_over(sim: &mut Simulation, time: Duration) -> Vec<f64> {
    let before = sim.usage();
    sim.run(time).unwrap();
    let after = sim.usage();
    let wall = (after.now_ns - before.now_ns) as f64;
    let used = before.vgpus.iter().zip(&after.vgpus);
    used.map(|((_, b), (_, a))| 100.0 * (a.engine_ns - b.engine_ns) as f64 / wall).collect()
}

/// The same over 10 s, after 1 s.
fn parts(sim: &mut Simulation) -> Vec<f64> {
    sim.run(Duration::from_secs(1)).unwrap();
    parts_over(sim, Duration::from_secs(10))
}

#[test]
fn a_hard_share_is_never_more_even_alone() {
    let busy = Workload::steady(PREEMPT_NS);
    for enforcement in BOTH {
        for core in [1, 10, 25, 50, 99] {
            let mut sim = simulate_under(
                config(Policy::Weighted),
                enforcement,
                &[(hard(core), busy), (soft(1), Workload::IDLE)],
            );
            let got = parts(&mut sim);
            assert_near(&got, &[f64::from(core), 0.0], 0.25);
        }
    }
}

#[test]
fn what_a_hard_share_may_not_have_goes_to_soft_ones() {
    let busy = Workload::steady(PREEMPT_NS);
    for enforcement in BOTH {
        let groups = [(hard(10), busy), (Share::default(), busy)];
        let got = parts(&mut simulate_under(config(Policy::Weighted), enforcement, &groups));
        assert_near(&got, &[10.0, 90.0], 1.0);
        assert!(got.iter().sum::<f64>() > 98.0);
        // The soft one asked for less than what is left to it.
        let groups = [(hard(30), busy), (soft(10), busy), (soft(20), Workload::IDLE)];
        let got = parts(&mut simulate_under(config(Policy::Weighted), enforcement, &groups));
        assert_near(&got, &[30.0, 70.0, 0.0], 1.0);
    }
}

#[test]
fn equal_shares_are_equal_whether_the_others_are_busy_or_not() {
    let busy = Workload::steady(PREEMPT_NS);
    for enforcement in BOTH {
        let mut sim = simulate_under(
            config(Policy::EqualShare),
            enforcement,
            &[(soft(90), busy), (soft(5), busy), (soft(1), Workload::IDLE)],
        );
        assert_near(&parts(&mut sim), &[100.0 / 3.0, 100.0 / 3.0, 0.0], 0.5);
        sim.start(id(3), soft(1), busy).unwrap();
        assert_near(&parts(&mut sim), &[25.0, 25.0, 0.0, 25.0], 0.5);
        sim.stop(id(2)).unwrap();
        sim.stop(id(3)).unwrap();
        assert_near(&parts(&mut sim), &[50.0, 50.0], 0.5);
        // Alone it has all of it.
        sim.stop(id(1)).unwrap();
        assert_near(&parts(&mut sim), &[100.0], 0.5);
    }
}

#[test]
fn fixed_shares_are_what_the_type_says() {
    let busy = Workload::steady(PREEMPT_NS);
    for enforcement in BOTH {
        let mut sim = simulate_under(
            config(Policy::FixedShare),
            enforcement,
            &[(soft(90), busy), (soft(5), busy)],
        );
        assert_near(&parts(&mut sim), &[12.5, 12.5], 0.2);
        sim.event(Event::ConfigChanged(config(Policy::BestEffort))).unwrap();
        assert_near(&parts(&mut sim), &[50.0, 50.0], 0.5);
    }
}

#[test]
fn long_kernels_under_a_cap_are_paid_back() {
    // 25 ms at a time, which nobody can preempt, where 2.5 ms in 10 are allowed.
    let long = Workload::steady(25 * MS);
    for enforcement in BOTH {
        let groups = [(hard(25), long), (soft(75), Workload::steady(PREEMPT_NS))];
        let got = parts(&mut simulate_under(config(Policy::Weighted), enforcement, &groups));
        assert_near(&got, &[25.0, 75.0], 1.0);
    }
}

#[test]
fn priority_decides_over_what_nobody_was_promised_and_nothing_else() {
    let busy = Workload::steady(PREEMPT_NS);
    let of = |core, priority| Share { priority, ..soft(core) };
    let (low, high) = (of(20, Priority::Low), of(20, Priority::High));
    // 60 are left: one part of 17 to the low one.
    let mut sim = simulate_under(
        config(Policy::Weighted),
        Enforcement::Budgets,
        &[(low, busy), (high, busy)],
    );
    let extra = 60.0 / 17.0;
    assert_near(&parts(&mut sim), &[20.0 + extra, 80.0 - extra], 1.0);
    // The same where the 60 are promised to one that idles, and it has them as soon as it wants them.
    let away = busy.after(11_000 * MS);
    let groups = [(low, busy), (high, busy), (soft(60), away)];
    let mut sim = simulate_under(config(Policy::Weighted), Enforcement::Budgets, &groups);
    assert_near(&parts(&mut sim), &[20.0 + extra, 80.0 - extra, 0.0], 1.0);
    sim.run(Duration::from_millis(300)).unwrap();
    assert_near(&parts(&mut sim), &[20.0, 20.0, 60.0], 1.0);
}

#[test]
fn a_live_change_is_in_force_within_fifty_milliseconds() {
    let busy = Workload::steady(PREEMPT_NS);
    for enforcement in BOTH {
        let groups = [(soft(20), busy), (soft(20), busy)];
        let mut sim = simulate_under(config(Policy::Weighted), enforcement, &groups);
        sim.run(Duration::from_secs(2)).unwrap();
        for (share, expected) in [
            (soft(80), [80.0, 20.0]),
            (hard(25), [25.0, 75.0]),
            (hard(50), [50.0, 50.0]),
            (soft(5), [20.0, 80.0]),
        ] {
            sim.event(Event::ShareChanged { id: id(0), share }).unwrap();
            sim.run(Duration::from_millis(50)).unwrap();
            assert_near(&parts_over(&mut sim, Duration::from_millis(400)), &expected, 2.0);
        }
    }
}

#[test]
fn more_than_the_whole_can_be_promised_only_where_that_is_switched_on() {
    let busy = Workload::steady(PREEMPT_NS);
    let groups = [(soft(80), busy)];
    let mut sim = simulate_under(config(Policy::Weighted), Enforcement::Budgets, &groups);
    assert!(sim.start(id(1), soft(80), busy).is_err());
    let overcommit = Config { overcommit: true, ..config(Policy::Weighted) };
    sim.event(Event::ConfigChanged(overcommit)).unwrap();
    sim.start(id(1), soft(80), busy).unwrap();
    assert_near(&parts(&mut sim), &[50.0, 50.0], 0.5);
}

#[test]
fn a_longest_slice_changes_turns_and_not_shares() {
    let busy = Workload::steady(20 * US);
    let short = Share { timeslice: Some(Duration::from_micros(400)), ..soft(80) };
    let groups = [(short, busy), (soft(20), busy)];
    let mut sim = simulate_under(config(Policy::Weighted), Enforcement::Budgets, &groups);
    assert_near(&parts(&mut sim), &[80.0, 20.0], 1.0);
    assert!(sim.scheduler().slice(id(0)).unwrap() <= Duration::from_micros(400));
    assert!(sim.waits(id(1)).unwrap().quantile(0.5) < 600 * US);
}

#[test]
fn averaging_sets_the_mean_slice_and_the_time_to_repay() {
    let averaging = Some(Averaging { factor: 60, frequency: 960 });
    let config = Config { averaging, ..config(Policy::Weighted) };
    let groups = [(soft(80), Workload::steady(PREEMPT_NS)), (soft(20), Workload::steady(MS))];
    let mut sim = simulate_under(config, Enforcement::Budgets, &groups);
    assert_near(&parts(&mut sim), &[80.0, 20.0], 1.0);
    let deadline = sim.scheduler().next_deadline().unwrap() - sim.now_ns();
    assert!(deadline <= 31_250 * US + 10 * MS, "{deadline}");
}

#[test]
fn caps_do_not_drift_over_a_day() {
    let mut config = config(Policy::Weighted);
    config.slice = Duration::from_millis(30);
    let groups = [(hard(30), Workload::steady(7 * MS)), (soft(70), Workload::steady(11 * MS))];
    let mut sim = simulate_under(config, Enforcement::Budgets, &groups);
    assert_near(&parts_over(&mut sim, Duration::from_secs(86_400)), &[30.0, 70.0], 0.05);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// In every window of time a capped vGPU has at most its part, what it may have saved up, and one overrun.
    #[test]
    fn caps_hold_in_every_window(
        core in 1..=60_u8,
        piece in 1..=2000_u64,
        burst in prop::option::of(1..=20_000_u64),
        idle in 0..=50_000_u64,
        neighbour in any::<bool>(),
        windows in prop::collection::vec(1..=200_u64, 50),
        gates in any::<bool>(),
    ) {
        let piece_ns = piece * US;
        let burst_ns = burst.map_or(u64::MAX, |burst| burst * US);
        let other = if neighbour { Workload::steady(PREEMPT_NS) } else { Workload::IDLE };
        let groups =
            [(hard(core), Workload::bursty(piece_ns, burst_ns, idle * US)), (soft(40), other)];
        let enforcement = if gates { Enforcement::Gates } else { Enforcement::Budgets };
        let mut sim = simulate_under(config(Policy::Weighted), enforcement, &groups);
        // Where gates are decided from outside, an overrun lasts until somebody looks.
        let overrun_ms = if gates { 14.0 } else { 0.0 } + piece_ns as f64 / 1e6;
        let mut runs = vec![(0.0, 0.0)];
        for window in windows {
            sim.run(Duration::from_millis(window)).unwrap();
            let now = (sim.now_ns() as f64 / 1e6, sim.usage().vgpus[0].1.engine_ns as f64 / 1e6);
            for (at, used) in &runs {
                let part = f64::from(core) / 100.0;
                let most = part * (now.0 - at) + part * 100.0 + overrun_ms + 0.1;
                prop_assert!(now.1 - used <= most, "{} of {most} ms", now.1 - used);
            }
            runs.push(now);
        }
        let credit = sim.groups[0].meter.map_or(0, |meter| meter.credit_ns());
        prop_assert!(credit <= i64::from(core) * 1_000_000, "{credit}");
    }

    /// Time that nobody is promised, or that its owner does not use, is used as long as one soft vGPU has work.
    #[test]
    fn soft_vgpus_use_what_is_left(
        cores in prop::collection::vec((1..=10_u8, any::<bool>()), 1..8),
        loads in prop::collection::vec((1..=500_u64, 1..=20_000_u64, 0..=50_000_u64), 8),
        gates in any::<bool>(),
    ) {
        let mut groups: Vec<_> = cores
            .iter()
            .zip(&loads)
            .map(|((core, capped), (piece, burst, idle))| {
                let share = if *capped { hard(*core) } else { soft(*core) };
                (share, Workload::bursty(piece * US, burst * US, idle * US))
            })
            .collect();
        groups.push((soft(5), Workload::steady(PREEMPT_NS)));
        let enforcement = if gates { Enforcement::Gates } else { Enforcement::Budgets };
        let mut sim = simulate_under(config(Policy::Weighted), enforcement, &groups);
        let got = parts(&mut sim);
        prop_assert!(got.last().is_some_and(|own| *own >= 4.5), "{got:?}");
        // Switches between very short bursts cost what they cost.
        let least = if loads.iter().any(|(_, burst, _)| *burst < 500) { 50.0 } else { 98.0 };
        prop_assert!(got.iter().sum::<f64>() >= least, "{got:?}");
    }
}
