//! Promises of the policies, checked on a runlist in simulated time.

use proptest::prelude::*;
use uuid::Uuid;

use super::*;
use crate::sched::{Core, Enforcement, Mode, Policy};

mod brief;
mod caps;
mod changes;
mod counter_faults;
mod long_kernels;
mod many;
mod weights;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
/// Cost of a switch on the software GPU.
const SWITCH_NS: u64 = 2 * US;
/// Latency of preemption on the software GPU.
const PREEMPT_NS: u64 = 50 * US;

/// An NVIDIA GPU, whose contexts take about 0.2 ms to switch.
const NVIDIA: GpuFeatures =
    GpuFeatures { enforcement: Enforcement::Gates, preempts: false, exact_slices: false };
const NVIDIA_SWITCH_NS: u64 = 170 * US;

const ENFORCEMENTS: [Enforcement; 2] = [Enforcement::Budgets, Enforcement::Gates];

fn id(n: usize) -> VgpuId {
    VgpuId(Uuid::from_u128(n as u128))
}

fn config(policy: Policy) -> Config {
    Config { policy, ..Config::new(Duration::from_millis(2)) }
}

fn soft(core: u8) -> ShareRequest {
    ShareRequest::with_core(Core::try_from(core).ok())
}

fn hard(core: u8) -> ShareRequest {
    ShareRequest { mode: Mode::Hard, ..soft(core) }
}

fn simulate(groups: &[(Option<u8>, Workload)]) -> Simulation {
    let mut sim = Simulation::new(config(Policy::Weighted), Enforcement::Budgets, SWITCH_NS);
    for (n, (core, workload)) in groups.iter().enumerate() {
        let core = core.map(|core| Core::try_from(core).unwrap());
        sim.start(id(n), ShareRequest::with_core(core), *workload).unwrap();
    }
    sim
}

fn simulate_under(
    config: Config,
    enforcement: Enforcement,
    groups: &[(ShareRequest, Workload)],
) -> Simulation {
    let mut sim = Simulation::new(config, enforcement, SWITCH_NS);
    // The manager runs on a busy machine.
    sim.set_report_delay(Duration::from_millis(2));
    for (n, (share, workload)) in groups.iter().enumerate() {
        sim.start(id(n), *share, *workload).unwrap();
    }
    sim
}

/// Returns shares of the used engine time, in percent, over 10 s after 1 s.
fn shares(sim: &mut Simulation) -> Vec<f64> {
    sim.run(Duration::from_secs(1)).unwrap();
    shares_over(sim, Duration::from_secs(10))
}

/// Returns shares of the used engine time, in percent.
fn shares_over(sim: &mut Simulation, time: Duration) -> Vec<f64> {
    let before = sim.usage();
    sim.run(time).unwrap();
    let after = sim.usage();
    let used = before.vgpus.iter().zip(&after.vgpus);
    let used: Vec<_> = used.map(|((_, b), (_, a))| (a.engine_ns - b.engine_ns) as f64).collect();
    let total: f64 = used.iter().sum();
    used.into_iter().map(|used| 100.0 * used / total).collect()
}

/// Returns shares of the wall time, in percent, over 10 s after 1 s.
fn parts(sim: &mut Simulation) -> Vec<f64> {
    sim.run(Duration::from_secs(1)).unwrap();
    parts_over(sim, Duration::from_secs(10))
}

/// Returns shares of the wall time, in percent.
fn parts_over(sim: &mut Simulation, time: Duration) -> Vec<f64> {
    let before = sim.usage();
    sim.run(time).unwrap();
    let after = sim.usage();
    let wall = (after.now_ns - before.now_ns) as f64;
    let used = before.vgpus.iter().zip(&after.vgpus);
    used.map(|((_, b), (_, a))| 100.0 * (a.engine_ns - b.engine_ns) as f64 / wall).collect()
}

fn assert_near(got: &[f64], asked: &[f64], points: f64) {
    let near = got.iter().zip(asked).all(|(got, asked)| (got - asked).abs() <= points);
    assert!(near && got.len() == asked.len(), "got {got:?}, asked {asked:?}");
}

/// Generates values of `core` with a sum of at most 100.
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
