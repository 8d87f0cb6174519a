//! Shares of busy vGPUs by weight, and idle time.

use super::*;
use crate::sched::policy::{MAX_SLICE, MIN_SLICE};
use crate::sched::{Averaging, Priority};

#[test]
fn shares_of_eighty_and_twenty_hold() {
    let busy = Workload::steady(PREEMPT_NS);
    let mut sim = simulate(&[(Some(80), busy), (Some(20), busy)]);
    let slices = [sim.scheduler().slice(id(0)), sim.scheduler().slice(id(1))];
    assert_eq!(slices.map(Option::unwrap).map(|slice| slice.as_micros()), [3200, 800]);
    assert_near(&shares(&mut sim), &[80.0, 20.0], 0.2);
}

#[test]
fn kernel_overruns_are_charged() {
    let (long, short) = (Workload::steady(MS), Workload::steady(PREEMPT_NS));
    for (core, workloads) in [((80, 20), (short, long)), ((80, 20), (long, short))] {
        let mut sim = simulate(&[(Some(core.0), workloads.0), (Some(core.1), workloads.1)]);
        assert_near(&shares(&mut sim), &[80.0, 20.0], 1.0);
    }
}

#[test]
fn vgpus_without_core_divide_the_remainder() {
    let busy = Workload::steady(PREEMPT_NS);
    let mut sim = simulate(&[(Some(40), busy), (None, busy), (None, busy)]);
    assert_near(&shares(&mut sim), &[40.0, 30.0, 30.0], 0.5);
    let mut sim = simulate(&[(None, busy); 3]);
    assert_near(&shares(&mut sim), &[100.0 / 3.0; 3], 0.2);
    // The whole GPU is requested, and the third vGPU still gets a minimum.
    let mut sim = simulate(&[(Some(80), busy), (Some(20), busy), (None, busy)]);
    assert_near(&shares(&mut sim), &[80.0, 20.0, 1.0].map(|s| s / 1.01), 0.5);
}

#[test]
fn a_busy_vgpu_gets_idle_time() {
    let mut sim = simulate(&[(Some(80), Workload::IDLE), (Some(20), Workload::steady(PREEMPT_NS))]);
    sim.run(Duration::from_secs(5)).unwrap();
    let used = sim.usage().vgpus[1].1.engine_ns;
    assert!(used as f64 > 0.98 * 5e9, "{used}");
}

#[test]
fn a_vgpu_that_was_idle_gets_exactly_its_share() {
    let busy = Workload::steady(PREEMPT_NS);
    let away = busy.after(5_000 * MS);
    let mut sim = simulate(&[(Some(20), busy), (Some(80), away)]);
    sim.run(Duration::from_secs(5)).unwrap();
    assert_near(&shares_over(&mut sim, Duration::from_millis(500)), &[20.0, 80.0], 1.0);
}

#[test]
fn tiny_bursts_do_not_delay_vgpus_that_outrun_their_slices() {
    let (flood, long) = (Workload::bursty(US, US, 0), Workload::steady(4 * MS));
    let busy = Workload::steady(PREEMPT_NS);
    let mut sim =
        simulate(&[(Some(25), busy), (Some(25), long), (Some(25), flood), (Some(25), busy)]);
    let got = shares(&mut sim);
    let each = (100.0 - got[2]) / 3.0;
    assert_near(&got, &[each, each, got[2], each], 1.0);
}

#[test]
fn sixteen_unequal_shares_hold() {
    let asked = [20, 15, 12, 10, 8, 6, 5, 5, 4, 4, 3, 2, 2, 2, 1, 1_u8];
    let pieces = [5 * US, PREEMPT_NS, 20 * US];
    let groups: Vec<_> =
        (0..16).map(|n| (Some(asked[n]), Workload::steady(pieces[n % 3]))).collect();
    assert_near(&shares(&mut simulate(&groups)), &asked.map(f64::from), 1.0);
}

#[test]
fn priority_divides_only_spare_time() {
    let busy = Workload::steady(PREEMPT_NS);
    let of = |core, priority| ShareRequest { priority, ..soft(core) };
    let (low, high) = (of(20, Priority::Low), of(20, Priority::High));
    // 60 percent are spare: one part of 17 goes to low priority.
    let mut sim = simulate_under(
        config(Policy::Weighted),
        Enforcement::Budgets,
        &[(low, busy), (high, busy)],
    );
    let extra = 60.0 / 17.0;
    assert_near(&parts(&mut sim), &[20.0 + extra, 80.0 - extra], 1.0);
    // The same holds while the 60 are promised to an idle vGPU, which gets them as soon as it has
    // work.
    let away = busy.after(11_000 * MS);
    let groups = [(low, busy), (high, busy), (soft(60), away)];
    let mut sim = simulate_under(config(Policy::Weighted), Enforcement::Budgets, &groups);
    assert_near(&parts(&mut sim), &[20.0 + extra, 80.0 - extra, 0.0], 1.0);
    sim.run(Duration::from_millis(300)).unwrap();
    assert_near(&parts(&mut sim), &[20.0, 20.0, 60.0], 1.0);
}

#[test]
fn a_slice_limit_changes_slices_and_keeps_shares() {
    let busy = Workload::steady(20 * US);
    let short = ShareRequest { timeslice: Some(Duration::from_micros(400)), ..soft(80) };
    let groups = [(short, busy), (soft(20), busy)];
    let mut sim = simulate_under(config(Policy::Weighted), Enforcement::Budgets, &groups);
    assert_near(&parts(&mut sim), &[80.0, 20.0], 1.0);
    assert!(sim.scheduler().slice(id(0)).unwrap() <= Duration::from_micros(400));
    assert!(sim.waits(id(1)).unwrap().quantile(0.5) < 600 * US);
}

#[test]
fn averaging_sets_the_mean_slice_and_the_time_of_repayment() {
    let averaging = Some(Averaging { factor: 60, frequency: 960 });
    let config = Config { averaging, ..config(Policy::Weighted) };
    let groups = [(soft(80), Workload::steady(PREEMPT_NS)), (soft(20), Workload::steady(MS))];
    let mut sim = simulate_under(config, Enforcement::Budgets, &groups);
    assert_near(&parts(&mut sim), &[80.0, 20.0], 1.0);
    let deadline = sim.scheduler().next_deadline().unwrap() - sim.now_ns();
    assert!(deadline <= 31_250 * US + 10 * MS, "{deadline}");
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
    fn no_vgpu_starves_and_no_time_is_wasted(
        cores in prop::collection::vec(prop::option::of(1..=10_u8), 2..10),
        loads in prop::collection::vec((1..=2000_u64, 1..=20_000_u64, 0..=50_000_u64), 10),
    ) {
        // One busy vGPU always runs, whatever the others do (steady, bursty, long pieces).
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
        without_core in 0..20_usize,
        default_us in 1..=100_000_u64,
    ) {
        let default_slice = Duration::from_micros(default_us);
        let mut sched = Scheduler::new(Config::new(default_slice), Enforcement::Gates, 0);
        let cores = cores.iter().map(|core| Some(Core::try_from(*core).unwrap()));
        let mut count = 0;
        for core in cores.chain(std::iter::repeat_n(None, without_core)) {
            let share = ShareRequest::with_core(core);
            let started = Event::VgpuStarted { id: id(count), share, max_instances: 8 };
            sched.handle(started).unwrap();
            count += 1;
        }
        let slices: Vec<_> = (0..count).map(|n| sched.slice(id(n)).unwrap()).collect();
        prop_assert!(slices.iter().all(|slice| (MIN_SLICE..=MAX_SLICE).contains(slice)));
        // Small deviations from the mean do not change all slices.
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Time that is not promised, or not used, goes to a soft vGPU that has work.
    #[test]
    fn soft_vgpus_use_spare_time(
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
        // Switches between very short bursts take time.
        let least = if loads.iter().any(|(_, burst, _)| *burst < 500) { 50.0 } else { 98.0 };
        prop_assert!(got.iter().sum::<f64>() >= least, "{got:?}");
    }
}
