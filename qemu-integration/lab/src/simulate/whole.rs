//! Shares with kernels longer than a slice, on a GPU without preemption.

use std::time::Duration;

use anyhow::Result;
use comfy_table::{Table, presets};
use mdev_core::sched::sim::{Simulation, Workload};
use mdev_core::sched::{Config, Core, Enforcement, GpuFeatures, Mode, ShareRequest};

use super::{LATE, id};

/// Parameters of an H100: a switch takes 0.17 ms, and the default slice is 12 ms.
const H100: GpuFeatures =
    GpuFeatures { enforcement: Enforcement::Gates, preempts: false, exact_slices: false };
const SWITCH_NS: u64 = 170_000;
const SLICE: Duration = Duration::from_millis(12);

const LONG: Workload = Workload::steady(20_000_000);
const SHORT: Workload = Workload::steady(50_000);

/// Requested shares, whether they are caps, and the workloads.
type Tenant = (u8, Mode, Workload);

const CASES: [(&str, &[Tenant]); 8] = [
    ("80 of 50 us, 20 of 20 ms", &[(80, Mode::Soft, SHORT), (20, Mode::Soft, LONG)]),
    ("80 of 20 ms, 20 of 50 us", &[(80, Mode::Soft, LONG), (20, Mode::Soft, SHORT)]),
    ("80 of 20 ms, 20 of 20 ms", &[(80, Mode::Soft, LONG), (20, Mode::Soft, LONG)]),
    (
        "80 and 10 of 50 us, 10 of 20 ms",
        &[(80, Mode::Soft, SHORT), (10, Mode::Soft, SHORT), (10, Mode::Soft, LONG)],
    ),
    (
        "4 and 2 of 50 us, 1 of 20 ms",
        &[(4, Mode::Soft, SHORT), (2, Mode::Soft, SHORT), (1, Mode::Soft, LONG)],
    ),
    (
        "4 of 50 us, 2 and 1 of 20 ms",
        &[(4, Mode::Soft, SHORT), (2, Mode::Soft, LONG), (1, Mode::Soft, LONG)],
    ),
    ("hard 25 of 20 ms, 75 of 50 us", &[(25, Mode::Hard, LONG), (75, Mode::Soft, SHORT)]),
    ("hard 25 of 50 us, 75 of 20 ms", &[(25, Mode::Hard, SHORT), (75, Mode::Soft, LONG)]),
];

/// Prints the shares received in the 10 s after the first second. Returns the largest error in
/// points.
pub fn run() -> Result<f64> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["kernels that are not preempted", "got", "error max", "wait p99", "gates"]);
    let mut worst = 0.0_f64;
    for (what, tenants) in CASES {
        let mut sim = Simulation::new(Config::new(SLICE), H100, SWITCH_NS);
        sim.set_report_delay(LATE);
        for (index, (core, mode, workload)) in tenants.iter().enumerate() {
            let share =
                ShareRequest { mode: *mode, ..ShareRequest::with_core(Core::try_from(*core).ok()) };
            sim.start(id(index), share, *workload)?;
        }
        sim.run(Duration::from_secs(1))?;
        sim.reset_waits();
        let before = sim.usage();
        sim.run(Duration::from_secs(10))?;
        let after = sim.usage();
        let used = before.vgpus.iter().zip(&after.vgpus);
        let used: Vec<f64> =
            used.map(|((_, b), (_, a))| (a.engine_ns - b.engine_ns) as f64).collect();
        let (total, asked): (f64, f64) =
            (used.iter().sum(), tenants.iter().map(|(core, ..)| f64::from(*core)).sum());
        let got: Vec<f64> = used.iter().map(|used| 100.0 * used / total).collect();
        let off = got.iter().zip(tenants);
        let off = off.map(|(got, (core, ..))| (got - 100.0 * f64::from(*core) / asked).abs());
        let off = off.fold(0.0, f64::max);
        worst = worst.max(off);
        let waits = (0..tenants.len()).filter_map(|index| sim.waits(id(index)));
        let wait = waits.map(|waits| waits.quantile(0.99)).max().unwrap_or_default();
        let gates = (0..tenants.len()).filter_map(|index| sim.scheduler().snapshot(id(index)));
        let gates: u64 = gates.map(|one| one.gates_closed).sum();
        table.add_row([
            what.to_owned(),
            got.iter().map(|got| format!("{got:.2}")).collect::<Vec<_>>().join(" / "),
            format!("{off:.3} pt"),
            format!("{:.1} ms", wait as f64 / 1e6),
            format!("{:.1} a second", gates as f64 / (sim.now_ns() as f64 / 1e9)),
        ]);
    }
    println!("{table}");
    Ok(worst)
}

#[cfg(test)]
mod tests {
    #[test]
    fn long_kernels_keep_their_shares() {
        let worst = super::run().unwrap();
        assert!(worst <= super::super::OFF, "{worst}");
    }
}
