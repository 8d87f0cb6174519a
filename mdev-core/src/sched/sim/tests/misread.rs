//! Counters that are wrong: what is read from outside a GPU may be. Those that are read right keep their shares.

use super::*;
use crate::sched::policy::Silicon;

const NVIDIA: Silicon = Silicon { enforcement: Enforcement::Gates, preempts: false, exact: false };
const SOME: Workload = Workload::steady(500 * US);

/// Two at work, and one whose counters are wrong: what the two keep of what they had, the lesser of them.
fn kept(misread: Misread, seconds: u64) -> f64 {
    let mut sim = Simulation::new(Config::new(Duration::from_millis(12)), NVIDIA, 170 * US);
    sim.set_late(Duration::from_millis(2));
    for (n, (core, load)) in [(50, SOME), (30, SOME), (20, Workload::IDLE)].into_iter().enumerate()
    {
        sim.start(id(n), soft(core), load).unwrap();
    }
    let second = Duration::from_secs(1);
    sim.run(second).unwrap();
    let before = parts_over(&mut sim, 5 * second);
    sim.set_misread(misread);
    let during = parts_over(&mut sim, Duration::from_secs(seconds));
    (during[0] / before[0]).min(during[1] / before[1])
}

fn the_others_keep_their_shares(misread: Misread, over: &[u64]) {
    for seconds in over {
        let kept = kept(misread, *seconds);
        assert!(kept >= 0.98, "{kept} over {seconds} s");
    }
}

fn third(report: &mut UsageReport) -> (u64, &mut Usage) {
    (report.now_ns, &mut report.vgpus[2].1)
}

#[test]
fn who_has_work_and_never_runs_is_not_waited_for() {
    let waits: Misread = |report| {
        let (now_ns, usage) = third(report);
        *usage = Usage { wait_ns: now_ns, runnable: true, ..*usage };
    };
    the_others_keep_their_shares(waits, &[3, 5, 20]);
}

#[test]
fn who_is_charged_without_running_costs_the_others_nothing() {
    let charged: Misread = |report| {
        let (now_ns, usage) = third(report);
        *usage = Usage { engine_ns: usage.engine_ns + now_ns, runnable: true, ..*usage };
    };
    the_others_keep_their_shares(charged, &[3, 5, 20]);
}

#[test]
fn what_is_owed_to_one_that_has_no_work_any_more_is_forgotten() {
    // It waits for a second, and has had nothing to do since then.
    let waited: Misread = |report| {
        let (now_ns, usage) = third(report);
        let runnable = now_ns < 7_000 * MS;
        *usage = Usage { wait_ns: now_ns, runnable, ..*usage };
    };
    the_others_keep_their_shares(waited, &[3, 20]);
}
