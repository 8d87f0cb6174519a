//! Changes of shares and policies while vGPUs run.

use super::*;

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
fn a_share_change_acts_at_once() {
    let busy = Workload::steady(PREEMPT_NS);
    let mut sim = simulate(&[(Some(50), busy), (Some(20), busy)]);
    sim.run(Duration::from_secs(2)).unwrap();
    let core = Some(Core::try_from(80).unwrap());
    sim.event(Event::ShareChanged { id: id(0), share: ShareRequest::with_core(core) }).unwrap();
    assert_near(&shares_over(&mut sim, Duration::from_millis(200)), &[80.0, 20.0], 1.5);
}

#[test]
fn a_live_change_is_in_force_within_fifty_milliseconds() {
    let busy = Workload::steady(PREEMPT_NS);
    for enforcement in ENFORCEMENTS {
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
fn requests_over_the_whole_gpu_require_overcommit() {
    let busy = Workload::steady(PREEMPT_NS);
    let groups = [(soft(80), busy)];
    let mut sim = simulate_under(config(Policy::Weighted), Enforcement::Budgets, &groups);
    assert!(sim.start(id(1), soft(80), busy).is_err());
    let overcommit = Config { overcommit: true, ..config(Policy::Weighted) };
    sim.event(Event::ConfigChanged(overcommit)).unwrap();
    sim.start(id(1), soft(80), busy).unwrap();
    assert_near(&parts(&mut sim), &[50.0, 50.0], 0.5);
}
