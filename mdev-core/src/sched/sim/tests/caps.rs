//! Caps: hard, equal and fixed shares, with budgets and with gates.

use super::*;

#[test]
fn a_hard_share_is_a_limit_even_alone() {
    let busy = Workload::steady(PREEMPT_NS);
    for enforcement in ENFORCEMENTS {
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
fn time_above_a_hard_share_goes_to_soft_shares() {
    let busy = Workload::steady(PREEMPT_NS);
    for enforcement in ENFORCEMENTS {
        let groups = [(hard(10), busy), (ShareRequest::default(), busy)];
        let got = parts(&mut simulate_under(config(Policy::Weighted), enforcement, &groups));
        assert_near(&got, &[10.0, 90.0], 1.0);
        assert!(got.iter().sum::<f64>() > 98.0);
        // The soft share gets more than requested.
        let groups = [(hard(30), busy), (soft(10), busy), (soft(20), Workload::IDLE)];
        let got = parts(&mut simulate_under(config(Policy::Weighted), enforcement, &groups));
        assert_near(&got, &[30.0, 70.0, 0.0], 1.0);
    }
}

#[test]
fn equal_shares_do_not_depend_on_load() {
    let busy = Workload::steady(PREEMPT_NS);
    for enforcement in ENFORCEMENTS {
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
        // A vGPU alone gets the whole GPU.
        sim.stop(id(1)).unwrap();
        assert_near(&parts(&mut sim), &[100.0], 0.5);
    }
}

#[test]
fn fixed_shares_follow_the_maximum_of_instances() {
    let busy = Workload::steady(PREEMPT_NS);
    for enforcement in ENFORCEMENTS {
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
fn kernels_that_outrun_a_cap_are_repaid() {
    // Kernels of 25 ms cannot be preempted, and the cap allows 5 ms in 20.
    let long = Workload::steady(25 * MS);
    for enforcement in ENFORCEMENTS {
        let groups = [(hard(25), long), (soft(75), Workload::steady(PREEMPT_NS))];
        let got = parts(&mut simulate_under(config(Policy::Weighted), enforcement, &groups));
        assert_near(&got, &[25.0, 75.0], 1.0);
    }
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

    /// In any window, a capped vGPU gets at most its part, its saved credit and one overrun.
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
        // The scheduler closes a gate only at the next reading.
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
        let credit = sim.vgpus[0].credit_ns().unwrap_or(0);
        prop_assert!(credit <= i64::from(core) * 1_000_000, "{credit}");
    }
}
