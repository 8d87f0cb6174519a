//! Faults of the counters, which may occur where they are read from outside the GPU. vGPUs with
//! true counters keep their shares.

use super::*;
use crate::gpu::Usage;

const BUSY: Workload = Workload::steady(500 * US);

/// Returns the part of its usage that each of two busy vGPUs keeps beside a vGPU with false
/// counters: the lesser of the two.
fn kept_part(fault: CounterFault, seconds: u64) -> f64 {
    let mut sim = Simulation::new(Config::new(Duration::from_millis(12)), NVIDIA, 170 * US);
    sim.set_report_delay(Duration::from_millis(2));
    for (n, (core, load)) in [(50, BUSY), (30, BUSY), (20, Workload::IDLE)].into_iter().enumerate()
    {
        sim.start(id(n), soft(core), load).unwrap();
    }
    let second = Duration::from_secs(1);
    sim.run(second).unwrap();
    let before = parts_over(&mut sim, 5 * second);
    sim.set_counter_fault(fault);
    let during = parts_over(&mut sim, Duration::from_secs(seconds));
    (during[0] / before[0]).min(during[1] / before[1])
}

fn assert_others_keep_their_shares(fault: CounterFault, over: &[u64]) {
    for seconds in over {
        let kept = kept_part(fault, *seconds);
        assert!(kept >= 0.98, "{kept} over {seconds} s");
    }
}

fn third(report: &mut UsageReport) -> (u64, &mut Usage) {
    (report.now_ns, &mut report.vgpus[2].1)
}

#[test]
fn a_vgpu_that_waits_without_running_costs_the_others_nothing() {
    let waiting: CounterFault = |report| {
        let (now_ns, usage) = third(report);
        *usage = Usage { wait_ns: now_ns, runnable: true, ..*usage };
    };
    assert_others_keep_their_shares(waiting, &[3, 5, 20]);
}

#[test]
fn engine_time_without_running_costs_the_others_nothing() {
    let charged: CounterFault = |report| {
        let (now_ns, usage) = third(report);
        *usage = Usage { engine_ns: usage.engine_ns + now_ns, runnable: true, ..*usage };
    };
    assert_others_keep_their_shares(charged, &[3, 5, 20]);
}

#[test]
fn a_debt_to_a_vgpu_without_work_is_forgotten() {
    // The vGPU waits for a second, and has no work after that.
    let waited: CounterFault = |report| {
        let (now_ns, usage) = third(report);
        let runnable = now_ns < 7_000 * MS;
        *usage = Usage { wait_ns: now_ns, runnable, ..*usage };
    };
    assert_others_keep_their_shares(waited, &[3, 20]);
}
