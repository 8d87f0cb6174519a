//! Brief requests beside work that never ends: the requests run at once, and no work is lost.

use super::*;

/// A training: short kernels without an end.
const TRAINING: Workload = Workload::steady(50 * US);

/// Parents: an NVIDIA GPU and the software GPU, each with slice and cost of a switch.
const GPUS: [(GpuFeatures, u64, u64); 2] = [(NVIDIA, 12, NVIDIA_SWITCH_NS), (SOFT, 2, SWITCH_NS)];
const SOFT: GpuFeatures =
    GpuFeatures { enforcement: Enforcement::Budgets, preempts: true, exact_slices: false };

/// Requests of a length at a rate.
fn requests(length_ns: u64, hz: u64) -> Workload {
    let interval_ns = 1_000_000_000 / hz;
    Workload::bursty(50 * US, length_ns, interval_ns - length_ns.min(interval_ns)).after(7 * MS)
}

fn on((gpu, slice_ms, switch_ns): (GpuFeatures, u64, u64)) -> Simulation {
    let mut sim = Simulation::new(Config::new(Duration::from_millis(slice_ms)), gpu, switch_ns);
    sim.set_report_delay(Duration::from_millis(2));
    if gpu == NVIDIA {
        sim.imitate_nvidia();
    }
    sim
}

impl Simulation {
    /// Gives a vGPU other work.
    fn turn_to(&mut self, index: usize, workload: Workload) {
        self.vgpus[index].workload = workload.after(0);
        self.vgpus[index].wake(self.now_ns);
        self.enqueue(index);
    }
}

/// Returns the engine time of each vGPU as parts of the time, in percent, over 10 s after 2 s.
fn used(sim: &mut Simulation) -> Vec<f64> {
    sim.run(Duration::from_secs(2)).unwrap();
    sim.reset_waits();
    parts_over(sim, Duration::from_secs(10))
}

#[test]
fn requests_run_at_once_and_cost_a_training_nothing_but_their_time() {
    for gpu in GPUS {
        for (length_ns, hz) in [
            (100 * US, 1),
            (100 * US, 1000),
            (300 * US, 1),
            (300 * US, 20),
            (300 * US, 100),
            (300 * US, 400),
            (MS, 100),
            (5 * MS, 1),
            (5 * MS, 20),
        ] {
            let mut sim = on(gpu);
            sim.start(id(0), soft(50), TRAINING).unwrap();
            sim.start(id(1), soft(50), requests(length_ns, hz)).unwrap();
            let got = used(&mut sim);
            let what = format!("{gpu:?}: {length_ns} ns, {hz} a second: {got:?}");
            // So many requests would cost too many switches.
            let limit = if hz == 1000 && gpu.2 > SWITCH_NS { 2_500 * US } else { 600 * US };
            let wait = sim.waits(id(1)).unwrap().quantile(0.99);
            assert!(wait < limit, "{what}: p99 {} us", wait / US);
            // Each request costs two switches.
            let hz = got[1] * 1e7 / length_ns as f64;
            let switches = 2.0 * gpu.2 as f64 * hz / 1e7 * (length_ns as f64 / 3e6).ceil();
            let left = 100.0 - got[1] - switches;
            assert!(got[0] >= 0.97 * left, "{what}: {left} are left");
        }
    }
}

/// A service loads its kernels and warms up beside a training, and is as quick as any other soon
/// after.
#[test]
fn requests_run_soon_after_their_service_has_warmed_up() {
    for (gpu, hz) in GPUS.into_iter().flat_map(|gpu| [(gpu, 100), (gpu, 400)]) {
        for (work_us, pause_us) in [(20, 30), (100, 100), (300, 40), (50, 0)] {
            for warm_up_ms in [50, 110, 240, 390] {
                let mut sim = on(gpu);
                sim.start(id(0), soft(50), TRAINING).unwrap();
                sim.start(id(1), soft(50), Workload::IDLE).unwrap();
                sim.run(Duration::from_secs(2)).unwrap();
                sim.turn_to(1, Workload::bursty(50 * US, work_us * US, pause_us * US));
                sim.run(Duration::from_millis(warm_up_ms)).unwrap();
                sim.turn_to(1, requests(300 * US, hz));
                sim.reset_waits();
                sim.run(Duration::from_secs(10)).unwrap();
                let waits = sim.waits(id(1)).unwrap();
                let (most, worst) = (waits.quantile(0.98), waits.quantile(1.0));
                let what = format!("{gpu:?}: {hz}/s after {warm_up_ms} ms of {work_us} us");
                assert!(worst < 3_200 * US, "{what}: worst {} us", worst / US);
                // As many requests may need many turns.
                assert!(hz == 400 || most < 600 * US, "{what}: {} us", most / US);
            }
        }
    }
}

/// Work that has begun to compete may be that of a service that is about to answer requests.
#[test]
fn slices_are_short_until_it_is_clear_that_all_go_on() {
    let mut sim = on(GPUS[0]);
    for n in 0..2 {
        sim.start(id(n), soft(50), TRAINING).unwrap();
    }
    let slice_after = |sim: &mut Simulation, ms| {
        sim.run(Duration::from_millis(ms)).unwrap();
        sim.scheduler().slice(id(0)).unwrap()
    };
    let [short, long] =
        [2..4, 11..13].map(|ms| Duration::from_millis(ms.start)..Duration::from_millis(ms.end));
    assert!(short.contains(&slice_after(&mut sim, 400)));
    assert!(long.contains(&slice_after(&mut sim, 1_600)));
    // A short rest changes nothing.
    sim.turn_to(1, Workload::IDLE);
    sim.run(Duration::from_millis(250)).unwrap();
    sim.turn_to(1, TRAINING);
    assert!(long.contains(&slice_after(&mut sim, 300)));
    sim.turn_to(1, Workload::IDLE);
    sim.run(Duration::from_secs(2)).unwrap();
    sim.turn_to(1, TRAINING);
    assert!(short.contains(&slice_after(&mut sim, 300)));
    assert!(long.contains(&slice_after(&mut sim, 1_000)));
}

/// A training that loads its kernels, or waits for its data, works now and then.
#[test]
fn requests_run_soon_beside_work_that_comes_and_goes() {
    for gpu in GPUS {
        for hz in [50, 100, 400] {
            for (burst_ms, idle_ms) in
                [(2, 8), (5, 5), (10, 30), (20, 20), (40, 15), (60, 60), (90, 10), (150, 300)]
            {
                let mut sim = on(gpu);
                let coming = Workload::bursty(50 * US, burst_ms * MS, idle_ms * MS);
                sim.start(id(0), soft(50), coming).unwrap();
                sim.start(id(1), soft(50), requests(300 * US, hz)).unwrap();
                let got = used(&mut sim);
                let what = format!("{gpu:?}: {hz}/s beside {burst_ms} of {idle_ms} ms: {got:?}");
                let waits = sim.waits(id(1)).unwrap();
                let (p99, worst) = (waits.quantile(0.99), waits.quantile(1.0));
                let us = (p99 / US, worst / US);
                assert!(p99 < 3_500 * US && worst < 4 * MS, "{what}: {us:?} us");
            }
        }
    }
}

#[test]
fn eight_services_run_at_once_beside_a_training() {
    // The worker takes those of the lower rate for idle now and then.
    for (gpu, hz) in GPUS.into_iter().flat_map(|gpu| [(gpu, 50), (gpu, 40)]) {
        let mut sim = on(gpu);
        sim.start(id(0), soft(20), TRAINING).unwrap();
        for n in 1..=8 {
            let service = requests(300 * US, hz).after(n as u64 * 2_300 * US);
            sim.start(id(n), soft(10), service).unwrap();
        }
        let got = used(&mut sim);
        let worst = (1..=8).map(|n| sim.waits(id(n)).unwrap().quantile(0.99)).max().unwrap();
        assert!(worst < 2_500 * US, "{gpu:?}: {} us", worst / US);
        let switches = 2.0 * gpu.2 as f64 * 8.0 * hz as f64 / 1e7;
        let left = 100.0 - got[1..].iter().sum::<f64>() - switches;
        assert!(got[0] >= 0.97 * left, "{gpu:?}: {got:?}");
    }
}

#[test]
fn the_first_request_after_a_rest_runs_at_once() {
    for gpu in GPUS {
        for rest_ms in [10, 1_000, 6_000] {
            let mut sim = on(gpu);
            sim.start(id(0), soft(50), TRAINING).unwrap();
            let service = Workload::bursty(50 * US, 300 * US, rest_ms * MS).after(2_000 * MS);
            sim.start(id(1), soft(50), service).unwrap();
            sim.run(Duration::from_secs(14)).unwrap();
            let worst = sim.waits(id(1)).unwrap().quantile(1.0);
            assert!(worst < 600 * US, "{gpu:?}: {} us after {rest_ms} ms", worst / US);
        }
    }
}

#[test]
fn busy_pairs_keep_their_slices_until_a_service_works_beside_them() {
    // Simulated requests fall into step with the rounds, at some rates into an unlucky one.
    for hz in [40, 60, 70, 80, 90, 100, 110, 130, 150, 200] {
        let mut sim = on(GPUS[0]);
        for n in 0..2 {
            sim.start(id(n), soft(40), TRAINING).unwrap();
        }
        sim.start(id(2), soft(20), Workload::IDLE).unwrap();
        let got = used(&mut sim);
        assert!(got.iter().sum::<f64>() > 98.0, "{got:?}");
        sim.turn_to(2, requests(300 * US, hz));
        let got = used(&mut sim);
        assert!((got[0] - got[1]).abs() < 1.0 && got.iter().sum::<f64>() > 88.0, "{got:?}");
        let wait = sim.waits(id(2)).unwrap().quantile(0.99);
        assert!(wait < 13 * MS, "{hz} a second: {} us", wait / US);
    }
}

#[test]
fn an_idle_vgpu_keeps_its_slice_while_only_brief_work_runs() {
    for gpu in GPUS {
        let mut sim = on(gpu);
        sim.start(id(0), soft(40), requests(MS, 40)).unwrap();
        sim.start(id(1), soft(40), requests(MS, 40).after(19 * MS)).unwrap();
        sim.start(id(2), soft(20), Workload::IDLE).unwrap();
        for step in 0..400 {
            sim.run(Duration::from_millis(10)).unwrap();
            let slice = sim.scheduler().slice(id(2)).unwrap();
            assert!(slice >= Duration::from_millis(1), "{gpu:?}, step {step}: {slice:?}");
        }
    }
}

#[test]
fn two_services_that_leave_the_engine_idle_are_not_throttled() {
    for gpu in GPUS {
        let mut sim = on(gpu);
        sim.start(id(0), soft(90), requests(5 * MS, 20)).unwrap();
        sim.start(id(1), soft(10), requests(5 * MS, 60)).unwrap();
        let got = used(&mut sim);
        assert_near(&got, &[10.0, 30.0], 1.0);
        let closed = |id| sim.scheduler().snapshot(id).unwrap().gates_closed;
        assert_eq!((closed(id(0)), closed(id(1))), (0, 0));
    }
}

/// On a GPU with cheap switches, work that comes and goes gets its share from its first moment on,
/// long before a reading shows its demand.
#[test]
fn bursts_get_their_share_and_no_more() {
    for core in [5, 20, 50] {
        // At its share, a burst takes 150 ms, and so does a pause.
        let burst = Workload::bursty(10 * US, u64::from(core) * 1500 * US, 150 * MS);
        let mut sim = on(GPUS[1]);
        sim.start(id(0), soft(100 - core), TRAINING).unwrap();
        sim.start(id(1), soft(core), burst).unwrap();
        let part = f64::from(core) / 2.0;
        assert_near(&used(&mut sim), &[100.0 - part, part], 0.6);
    }
}

/// Loads that look brief and want more than their share. Each runs beside a training.
#[test]
fn looking_brief_gains_nothing() {
    let attacks = [
        // Work for 80 ms of each 100: never busy for a whole interval.
        Workload::bursty(50 * US, 80 * MS, 20 * MS),
        Workload::bursty(50 * US, 45 * MS, 5 * MS),
        // Thousands of short runs, with pauses so short that they add up to the whole engine.
        Workload::bursty(50 * US, 300 * US, 100 * US),
        Workload::bursty(10 * US, 50 * US, 20 * US),
        // Bursts that end before long readings would show them.
        Workload::bursty(50 * US, 120 * MS, 300 * MS),
        // One long burst a second.
        Workload::bursty(50 * US, 700 * MS, 300 * MS),
    ];
    for gpu in GPUS {
        for core in [20, 50] {
            for attack in attacks {
                let mut sim = on(gpu);
                sim.start(id(0), soft(100 - core), TRAINING).unwrap();
                sim.start(id(1), soft(core), attack).unwrap();
                let got = used(&mut sim);
                let what = format!("{gpu:?}, core={core}, {attack:?}: {got:?}");
                assert!(got[1] <= f64::from(core) + 2.0, "{what}");
                assert!(got[0] >= 0.8 * f64::from(100 - core), "{what}");
            }
        }
    }
}

/// Requests that follow each other at once.
const REPEATED: Workload = Workload::bursty(50 * US, 300 * US, 50 * US);

/// A service loads its model, and tries it out, before it answers requests. Requests that come late
/// make the next ones late.
#[test]
fn a_service_that_starts_beside_a_training_soon_runs_at_once() {
    let loads = [
        Workload::steady(600 * US),
        // Kernels that are launched one by one.
        Workload::bursty(50 * US, 600 * US, 2 * MS),
        REPEATED,
    ];
    for gpu in GPUS {
        for (load, load_ms, hz) in loads
            .into_iter()
            .flat_map(|load| [70, 330, 1_010].map(|load_ms| (load, load_ms)))
            .flat_map(|(load, load_ms)| [50, 100, 400].map(|hz| (load, load_ms, hz)))
        {
            let mut sim = on(gpu);
            sim.start(id(0), soft(50), TRAINING).unwrap();
            sim.start(id(1), soft(50), Workload::IDLE).unwrap();
            sim.run(Duration::from_secs(2)).unwrap();
            sim.turn_to(1, load);
            sim.run(Duration::from_millis(load_ms)).unwrap();
            sim.turn_to(1, REPEATED.every(1_000_000_000 / hz));
            sim.reset_waits();
            sim.run(Duration::from_secs(6)).unwrap();
            let waits = sim.waits(id(1)).unwrap();
            let what = format!("{gpu:?}: {hz}/s after {load_ms} ms of {load:?}");
            // After work without an end, this takes two readings.
            let p = if load.is_endless() { 0.95 } else { 0.99 };
            let (slow, worst) = (waits.quantile(p), waits.quantile(1.0));
            assert!(
                slow < 2_000 * US && worst < 18 * MS,
                "{what}: {} {} us",
                slow / US,
                worst / US
            );
        }
    }
}

/// A training that loads its kernels takes more and more of the GPU. The service was alone before.
#[test]
fn a_training_that_starts_beside_a_service_lets_it_run() {
    for gpu in GPUS {
        for (hz, load) in [100, 400].into_iter().flat_map(|hz| {
            [(4, 1), (8, 2), (9, 3), (20, 5), (30, 20), (3, 3)].map(|load| (hz, load))
        }) {
            for load_ms in [100, 400, 700] {
                let mut sim = on(gpu);
                sim.start(id(0), soft(50), Workload::IDLE).unwrap();
                sim.start(id(1), soft(50), Workload::IDLE).unwrap();
                sim.run(Duration::from_secs(1)).unwrap();
                sim.turn_to(1, Workload::bursty(50 * US, 600 * US, MS));
                sim.run(Duration::from_millis(400)).unwrap();
                sim.turn_to(1, REPEATED.every(1_000_000_000 / hz));
                sim.run(Duration::from_secs(2)).unwrap();
                sim.reset_waits();
                sim.turn_to(0, Workload::bursty(50 * US, load.0 * MS, load.1 * MS));
                sim.run(Duration::from_millis(load_ms)).unwrap();
                sim.turn_to(0, TRAINING);
                sim.run(Duration::from_secs(6)).unwrap();
                let waits = sim.waits(id(1)).unwrap();
                let (p99, worst) = (waits.quantile(0.99), waits.quantile(1.0));
                let what = format!("{gpu:?}: {hz}/s beside {load:?} for {load_ms} ms");
                let us = (p99 / US, worst / US);
                assert!(p99 < 2_500 * US && worst < 4_500 * US, "{what}: {us:?} us");
            }
        }
    }
}
