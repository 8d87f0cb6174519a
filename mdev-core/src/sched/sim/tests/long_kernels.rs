//! Shares on a GPU that does not preempt: a vGPU keeps the engine until its last kernel ends.

use super::*;
use crate::sched::log::{Cause, Decision};

const LONG: Workload = Workload::steady(20 * MS);
const SHORT: Workload = Workload::steady(50 * US);

fn on(gpu: GpuFeatures, slice_ms: u64, groups: &[(ShareRequest, Workload)]) -> Simulation {
    let config = Config::new(Duration::from_millis(slice_ms));
    let mut sim = Simulation::new(config, gpu, NVIDIA_SWITCH_NS);
    sim.set_report_delay(Duration::from_millis(2));
    if gpu == NVIDIA {
        sim.imitate_nvidia();
    }
    for (n, (share, workload)) in groups.iter().enumerate() {
        sim.start(id(n), *share, *workload).unwrap();
    }
    sim
}

fn assert_shares(groups: &[(u8, Workload)]) {
    let total: f64 = groups.iter().map(|(core, _)| f64::from(*core)).sum();
    let asked: Vec<_> = groups.iter().map(|(core, _)| 100.0 * f64::from(*core) / total).collect();
    let groups: Vec<_> = groups.iter().map(|(core, load)| (soft(*core), *load)).collect();
    for slice_ms in [2, 5, 12] {
        let mut sim = on(NVIDIA, slice_ms, &groups);
        assert_near(&shares(&mut sim), &asked, 1.0);
    }
}

#[test]
fn shares_hold_between_short_and_long_kernels() {
    assert_shares(&[(80, SHORT), (20, LONG)]);
    assert_shares(&[(80, LONG), (20, SHORT)]);
    assert_shares(&[(80, LONG), (20, LONG)]);
    assert_shares(&[(50, SHORT), (50, LONG)]);
}

#[test]
fn shares_hold_among_three_vgpus_with_long_kernels() {
    for long in 0..3 {
        for cores in [[80, 10, 10], [4, 2, 1]] {
            let load = |n| if n == long { LONG } else { SHORT };
            assert_shares(&[(cores[0], load(0)), (cores[1], load(1)), (cores[2], load(2))]);
            // All but one vGPU run long kernels.
            let load = |n| if n == long { SHORT } else { LONG };
            assert_shares(&[(cores[0], load(0)), (cores[1], load(1)), (cores[2], load(2))]);
        }
    }
}

#[test]
fn a_hard_share_holds_with_long_kernels() {
    let got = parts(&mut on(NVIDIA, 12, &[(hard(25), LONG), (soft(75), SHORT)]));
    assert!((got[0] - 25.0).abs() < 1.0, "{got:?}");
    let got = parts(&mut on(NVIDIA, 12, &[(hard(25), LONG), (soft(1), Workload::IDLE)]));
    assert_near(&got, &[25.0, 0.0], 1.0);
    let got = parts(&mut on(NVIDIA, 12, &[(hard(25), SHORT), (soft(75), LONG)]));
    assert!((got[0] - 25.0).abs() < 1.0, "{got:?}");
}

#[test]
fn neighbours_of_long_kernels_keep_their_slices() {
    let mut sim = on(NVIDIA, 5, &[(soft(80), SHORT), (soft(20), LONG)]);
    shares(&mut sim);
    let slice = sim.scheduler().slice(id(0)).unwrap();
    assert!(slice <= Duration::from_millis(11), "8 ms asked, {slice:?}");
    // The neighbour waits for one kernel and no longer.
    sim.reset_waits();
    sim.run(Duration::from_secs(10)).unwrap();
    assert!(sim.waits(id(0)).unwrap().quantile(1.0) < 22 * MS);
}

#[test]
fn a_throttled_vgpu_runs_while_no_other_vgpu_has_work() {
    // The other vGPU is busy and idle for half a second each.
    let others = Workload::bursty(50 * US, 500 * MS, 500 * MS);
    let mut sim = on(NVIDIA, 5, &[(soft(80), others), (soft(20), LONG)]);
    sim.run(Duration::from_secs(1)).unwrap();
    let used: f64 = parts_over(&mut sim, Duration::from_secs(20)).iter().sum();
    assert!(used > 97.0, "{used} % of the time used");
    sim.stop(id(0)).unwrap();
    sim.run(Duration::from_millis(10)).unwrap();
    assert_near(&parts_over(&mut sim, Duration::from_secs(1)), &[100.0], 1.0);
}

#[test]
fn a_share_change_of_a_throttled_vgpu_acts_at_once() {
    let mut sim = on(NVIDIA, 5, &[(soft(80), SHORT), (soft(20), LONG)]);
    sim.run(Duration::from_secs(3)).unwrap();
    for (first, second) in [(50, 50), (90, 10), (20, 80)] {
        // The sum of requests must not exceed 100 in between.
        sim.event(Event::ShareChanged { id: id(1), share: soft(1) }).unwrap();
        sim.event(Event::ShareChanged { id: id(0), share: soft(first) }).unwrap();
        sim.event(Event::ShareChanged { id: id(1), share: soft(second) }).unwrap();
        sim.run(Duration::from_millis(500)).unwrap();
        let got = shares_over(&mut sim, Duration::from_secs(4));
        assert_near(&got, &[f64::from(first), f64::from(second)], 1.5);
    }
}

#[test]
fn gates_close_only_where_slices_cannot_repay() {
    let gates = |sim: &Simulation| {
        let closed = |record: &&crate::sched::log::Record| {
            record.cause == Cause::Ahead && record.decision == Decision::Gate(false)
        };
        sim.scheduler().log().iter().filter(closed).count()
    };
    let some = Workload::steady(500 * US);
    let mut sim = on(NVIDIA, 5, &[(soft(80), some), (soft(10), some), (soft(10), some)]);
    assert_near(&shares(&mut sim), &[80.0, 10.0, 10.0], 1.0);
    assert_eq!(gates(&sim), 0, "kernels of half a millisecond need none");
    let preempting = GpuFeatures { preempts: true, ..NVIDIA };
    let mut sim = on(preempting, 5, &[(soft(80), SHORT), (soft(20), LONG)]);
    shares(&mut sim);
    assert_eq!(gates(&sim), 0, "a GPU that preempts needs no gates");
    // A vGPU that changes to short kernels loses its throttle.
    let mut sim = on(NVIDIA, 5, &[(soft(80), SHORT), (soft(20), LONG)]);
    sim.run(Duration::from_secs(3)).unwrap();
    assert!(gates(&sim) > 10);
    sim.vgpus[1].workload = SHORT;
    sim.run(Duration::from_secs(3)).unwrap();
    let reports = sim.effort().0;
    assert_near(&shares(&mut sim), &[80.0, 20.0], 1.0);
    assert!(sim.effort().0 - reports < 150, "read only every 100 ms again");
}

#[test]
fn an_engine_stall_closes_no_gate() {
    let some = Workload::steady(500 * US);
    let mut sim = on(NVIDIA, 12, &[(soft(50), some), (soft(30), some), (soft(20), some)]);
    for pause in 0..100 {
        sim.run(Duration::from_millis(300 + 7 * pause)).unwrap();
        sim.stall(Duration::from_millis(120));
    }
    let closed = |record: &&crate::sched::log::Record| record.cause == Cause::Ahead;
    assert_eq!(sim.scheduler().log().iter().filter(closed).count(), 0);
    assert_near(&shares(&mut sim), &[50.0, 30.0, 20.0], 1.0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every vGPU gets its share, and the engine is used, for kernels of any length.
    #[test]
    fn shares_hold_for_any_kernel_length(
        cores in any_cores(),
        pieces in prop::collection::vec(prop_oneof![20..1000_u64, 1000..30_000_u64], 8),
        slice_ms in prop::sample::select(vec![2_u64, 5, 12]),
    ) {
        let total: f64 = cores.iter().copied().map(f64::from).sum();
        let groups: Vec<_> = cores
            .iter()
            .zip(&pieces)
            .map(|(core, piece)| (soft(*core), Workload::steady(piece * US)))
            .collect();
        let mut sim = on(NVIDIA, slice_ms, &groups);
        sim.run(Duration::from_secs(4)).unwrap();
        let before = sim.usage();
        let got = shares_over(&mut sim, Duration::from_secs(10));
        for (got, core) in got.iter().zip(&cores) {
            let asked = 100.0 * f64::from(*core) / total;
            prop_assert!((got - asked).abs() <= 1.0, "got {got}, asked {asked}");
        }
        let wall = sim.usage().now_ns - before.now_ns;
        let used = |report: &UsageReport| -> u64 {
            report.vgpus.iter().map(|(_, usage)| usage.engine_ns).sum()
        };
        let idle = 1.0 - (used(&sim.usage()) - used(&before)) as f64 / wall as f64;
        // A switch takes 0.17 ms, and the shortest slice is 0.1 ms.
        prop_assert!(idle < 0.6, "{idle}");
    }
}
