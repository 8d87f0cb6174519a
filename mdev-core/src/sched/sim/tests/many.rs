//! Many busy vGPUs: rounds of the runlist stay short, and each vGPU gets what is due.

use super::*;

/// Programs that keep kernels of 0.6 ms queued.
const BUSY: Workload = Workload::steady(600 * US);

/// Starts `count` busy vGPUs, the second half with twice the share of the first.
fn busy(gpu: GpuFeatures, slice_ms: u64, switch_ns: u64, count: usize) -> Simulation {
    let config = Config::new(Duration::from_millis(slice_ms));
    let mut sim = Simulation::new(config, gpu, switch_ns);
    sim.set_report_delay(Duration::from_millis(2));
    if gpu == NVIDIA {
        sim.imitate_nvidia();
    }
    for n in 0..count {
        let part = if n < count / 2 { 1 } else { 2 };
        let core = (64 / count as u8).max(1) * part;
        sim.start(id(n), soft(core), BUSY).unwrap();
    }
    sim
}

/// Returns what each vGPU got of its due, the least and the most, and the part of the time in which
/// the engine worked.
fn of_due(sim: &mut Simulation, count: usize) -> (f64, f64, f64) {
    // What some got ahead of others while they started is repaid first.
    sim.run(Duration::from_secs(if count <= 32 { 4 } else { 16 })).unwrap();
    // A turn more or less is less in a longer time.
    of_due_over(sim, count, Duration::from_secs(16))
}

fn of_due_over(sim: &mut Simulation, count: usize, time: Duration) -> (f64, f64, f64) {
    let got = parts_over(sim, time);
    let used: f64 = got.iter().sum();
    let half = count / 2;
    let weight = |n: usize| if n < half { 1.0 } else { 2.0 };
    let total: f64 = (0..count).map(weight).sum();
    let parts = got.iter().enumerate().map(|(n, got)| got / (used * weight(n) / total));
    let (least, most) =
        parts.fold((f64::MAX, 0.0_f64), |(least, most), part| (least.min(part), most.max(part)));
    (least, most, used)
}

#[test]
fn each_of_2_to_64_busy_vgpus_gets_its_due() {
    for (gpu, slice_ms, switch_ns) in
        [(NVIDIA, 12, NVIDIA_SWITCH_NS), (Enforcement::Budgets.into(), 2, SWITCH_NS)]
    {
        for count in [2, 4, 8, 12, 16, 24, 32, 48, 64] {
            let mut sim = busy(gpu, slice_ms, switch_ns, count);
            let (least, most, used) = of_due(&mut sim, count);
            let what = format!("{count} vGPUs, {gpu:?}: {least:.3} to {most:.3}, {used:.1} %");
            assert!(least >= 0.98 && most <= 1.02 && used >= 94.0, "{what}");
        }
    }
}

#[test]
fn a_round_of_many_vgpus_stays_short() {
    for count in [2, 8, 16, 32] {
        let mut sim = busy(NVIDIA, 12, NVIDIA_SWITCH_NS, count);
        sim.run(Duration::from_secs(4)).unwrap();
        sim.reset_waits();
        sim.run(Duration::from_secs(8)).unwrap();
        let longest = (0..count).map(|n| sim.waits(id(n)).unwrap().quantile(1.0)).max().unwrap();
        // 120 ms, the switches, and kernels that run beyond their slices.
        let usual = (0..count).map(|n| sim.waits(id(n)).unwrap().quantile(0.5)).max().unwrap();
        assert!(usual < 160 * MS, "{count}: {} ms", usual / MS);
        // One that is ahead by a turn skips the next one.
        assert!(longest < 400 * MS, "{count}: {} ms", longest / MS);
    }
}

#[test]
fn shares_stay_when_vgpus_come_and_go() {
    let mut sim = busy(NVIDIA, 12, NVIDIA_SWITCH_NS, 16);
    sim.run(Duration::from_secs(3)).unwrap();
    for n in (0..16).filter(|n| n % 4 != 0) {
        sim.stop(id(n)).unwrap();
        sim.run(Duration::from_millis(70)).unwrap();
    }
    assert_near(&shares(&mut sim), &[16.7, 16.7, 33.3, 33.3], 1.0);
    for n in (0..16).filter(|n| n % 4 != 0) {
        sim.start(id(n), soft(2), BUSY).unwrap();
        sim.run(Duration::from_millis(70)).unwrap();
    }
    let got = shares(&mut sim);
    assert_near(&got[..4], &[8.3, 8.3, 16.7, 16.7], 0.5);
    assert_near(&got[4..], &[4.2; 12], 0.5);
}

#[test]
fn a_crowded_start_is_made_good_within_seconds() {
    for count in [12, 16, 32] {
        let mut sim = busy(NVIDIA, 12, NVIDIA_SWITCH_NS, count);
        for n in 0..count {
            // Programs begin one after the other, some of them with long work.
            let piece_ns = if n % 5 == 0 { 5 * MS } else { 600 * US };
            sim.vgpus[n].workload = Workload::steady(piece_ns).after(n as u64 * 11 * MS);
        }
        sim.run(Duration::from_millis(400)).unwrap();
        for n in 0..count {
            sim.vgpus[n].workload = BUSY;
        }
        let (least, most, _) = of_due(&mut sim, count);
        assert!(least >= 0.98 && most <= 1.02, "{count}: {least:.3} to {most:.3}");
    }
}

#[test]
fn vgpus_that_begin_together_after_a_rest_get_their_dues_from_the_start() {
    for count in [2, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64] {
        // At different times after the last reading.
        for phase_ms in [3, 37, 71] {
            let mut sim = busy(NVIDIA, 12, NVIDIA_SWITCH_NS, count);
            let rest_ms = 1000 + phase_ms;
            for n in 0..count {
                sim.vgpus[n].begin_at(rest_ms * MS + (n as u64 * 7 % 5) * 300 * US);
            }
            sim.run(Duration::from_millis(rest_ms)).unwrap();
            let seconds = if count <= 32 { 8 } else { 24 };
            let (least, most, used) = of_due_over(&mut sim, count, Duration::from_secs(seconds));
            let what = format!("{count} after {phase_ms} ms: {least:.3} to {most:.3}, {used:.1} %");
            assert!(least >= 0.98 && most <= 1.02 && used >= 94.0, "{what}");
        }
    }
}
