//! `cargo lab simulate`: the manager's scheduler on a simulated runlist and clock, with up to
//! 10,000 vGPUs.
//!
//! All results except decision costs are the same on every machine.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use mdev_core::gpu::UsageReport;
use mdev_core::ids::VgpuId;
use mdev_core::sched::sim::{Histogram, MAX_INSTANCES, Simulation, Workload};
use mdev_core::sched::{Config, Core, Enforcement, Event, Mode, Policy, ShareRequest};
use uuid::Uuid;

mod plot;
mod whole;

/// Tolerance of a share in points of the GPU: normally, and beside adversarial vGPUs.
const OFF: f64 = 1.0;
const OFF_HOSTILE: f64 = 2.0;
/// Limit of a decision's cost in nanoseconds, for one vGPU per reading and for one share change.
const COST_NS: f64 = 2000.0;
/// Number of share changes to average over.
const CHANGES: usize = 500;
/// Cost of a context switch, as on the software GPU.
const SWITCH_NS: u64 = 2000;
/// Delay of the manager's readings.
const LATE: Duration = Duration::from_millis(1);
/// Length of a unit of work that the GPU does not preempt.
const PIECE_NS: u64 = 50_000;

/// Workloads: half of the vGPUs are always busy, and the others have this workload.
const MIXES: [&str; 4] = ["steady", "bursty", "idle", "hostile"];

/// Simulated vGPU with its results.
#[derive(Clone, Copy, Debug)]
struct Member {
    share: ShareRequest,
    workload: Workload,
    /// Fraction of the GPU, 0 to 1.
    due: f64,
    got: f64,
}

/// Row of the table.
#[derive(Debug)]
struct Outcome {
    mix: &'static str,
    vgpus: usize,
    members: Vec<Member>,
    waits: Histogram,
    used: f64,
    simulated: Duration,
    /// Decision cost for one vGPU at one counter reading.
    decision_ns: f64,
    /// Decision cost of one share change, including updates of other vGPUs.
    change_ns: f64,
}

impl Outcome {
    /// Returns the differences between due and received shares of the always busy vGPUs, in points.
    fn errors(&self) -> impl Iterator<Item = f64> {
        let busy = self.members.iter().filter(|member| member.workload.is_endless());
        busy.map(|member| (member.got - member.due).abs() * 100.0)
    }

    fn worst(&self) -> f64 {
        self.errors().fold(0.0, f64::max)
    }

    fn mean(&self) -> f64 {
        self.errors().sum::<f64>() / self.errors().count().max(1) as f64
    }
}

/// Simulates all mixes with each number of vGPUs. Returns whether all checks passed.
pub fn run(counts: &[u32], policy: Policy, enforcement: Enforcement, out: &Path) -> Result<bool> {
    std::fs::create_dir_all(out).with_context(|| format!("Cannot create {}", out.display()))?;
    let mut table = table();
    let mut outcomes = Vec::new();
    for count in counts {
        for mix in MIXES {
            let outcome = simulate(mix, *count, policy, enforcement)?;
            let wait = |part| format!("{:.2} ms", outcome.waits.quantile(part) as f64 / 1e6);
            table.add_row([
                count.to_string(),
                mix.into(),
                format!("{:.0} s", outcome.simulated.as_secs_f64()),
                format!("{:.3} pt", outcome.worst()),
                format!("{:.4} pt", outcome.mean()),
                wait(0.5),
                wait(0.99),
                wait(0.999),
                format!("{:.2} %", outcome.used * 100.0),
                format!("{:.0} ns", outcome.decision_ns),
                format!("{:.1} us", outcome.change_ns / 1e3),
            ]);
            plot::shares(&out.join(format!("shares-{count}-{mix}.svg")), &outcome)?;
            outcomes.push(outcome);
        }
        let of_count = outcomes.iter().filter(|outcome| outcome.vgpus == *count as usize);
        plot::waits(&out.join(format!("waits-{count}.svg")), &of_count.collect::<Vec<_>>())?;
    }
    plot::costs(&out.join("decisions.svg"), &outcomes)?;
    println!("{table}\n");
    let whole = whole::run()?;
    println!();
    let mut kept = true;
    let mut promise = |what: String, measured: String, holds: bool| {
        println!("{}  {what}: {measured}", if holds { "kept    " } else { "NOT KEPT" });
        kept &= holds;
    };
    for (mixes, off) in [(&MIXES[..3], OFF), (&MIXES[3..], OFF_HOSTILE)] {
        let of = outcomes.iter().filter(|outcome| mixes.contains(&outcome.mix));
        let worst = of.map(Outcome::worst).fold(0.0, f64::max);
        promise(
            format!("{policy}, {}: shares within {off} point(s) of the GPU", mixes.join(", ")),
            format!("{worst:.3} at most"),
            worst <= off,
        );
    }
    promise(
        format!("kernels that are not preempted, 50 us and 20 ms: shares within {OFF} point"),
        format!("{whole:.3} at most"),
        whole <= OFF,
    );
    let most = outcomes.iter().map(|outcome| outcome.vgpus).max().unwrap_or_default();
    let largest = || outcomes.iter().filter(|outcome| outcome.vgpus == most);
    let reading = largest().map(|outcome| outcome.decision_ns).fold(0.0, f64::max);
    promise(
        format!("a decision about one of {most} vGPUs at a reading: less than 2 us"),
        format!("{reading:.0} ns"),
        reading < COST_NS,
    );
    let change = largest().map(|outcome| outcome.change_ns).fold(0.0, f64::max);
    promise(
        format!("the decision after a share among {most} has changed: less than 2 us"),
        format!("{change:.0} ns"),
        change < COST_NS,
    );
    println!("Plots are in {}", out.display());
    Ok(kept)
}

/// Returns an empty table of outcomes.
fn table() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header([
        "vgpus",
        "workload",
        "simulated",
        "error max",
        "mean",
        "wait p50",
        "p99",
        "p99.9",
        "used",
        "decision",
        "change",
    ]);
    table
}

fn id(index: usize) -> VgpuId {
    VgpuId(Uuid::from_u128(index as u128))
}

/// Half of the vGPUs are always busy. Weights are 1 to 4, and one vGPU in eight is capped at its
/// weight's share.
fn members(mix: &str, count: usize, slice: Duration) -> Vec<Member> {
    let slice_ns = slice.as_nanos() as u64;
    let member = |index: usize| {
        let core = Core::try_from(1 + (index / 2 % 4) as u8).ok();
        let mode = if index % 8 == 4 { Mode::Hard } else { Mode::Soft };
        let steady = Workload::steady(PIECE_NS);
        let workload = match (index % 2, mix) {
            (1, "bursty") => {
                let burst_ns = 200_000 + (index as u64 * 37 % 100) * 100_000;
                Workload::bursty(PIECE_NS, burst_ns, 4 * burst_ns).after(index as u64 * 10_007)
            }
            (1, "idle") => Workload::IDLE,
            // Kernels that run for twice the mean slice without preemption, and floods of empty
            // work.
            (1, "hostile") if index % 4 == 1 => Workload::steady(2 * slice_ns),
            (1, "hostile") => Workload::bursty(1000, 1000, 0),
            _ => steady,
        };
        Member {
            share: ShareRequest { mode, ..ShareRequest::with_core(core) },
            workload,
            due: 0.0,
            got: 0.0,
        }
    };
    (0..count).map(member).collect()
}

fn simulate(
    mix: &'static str,
    count: u32,
    policy: Policy,
    enforcement: Enforcement,
) -> Result<Outcome> {
    // Rounds of 200 ms, unless the shortest slice requires longer rounds.
    let slice = (Duration::from_millis(200) / count)
        .clamp(Duration::from_micros(100), Duration::from_millis(2));
    let mut members = members(mix, count as usize, slice);
    let config = Config { policy, slice, overcommit: true, ..Config::new(slice) };
    // The vGPUs start one after the other, before the policy takes effect.
    let starting = Config { policy: Policy::BestEffort, ..config };
    let mut sim = Simulation::new(starting, enforcement, SWITCH_NS);
    sim.set_report_delay(LATE);
    for (index, member) in members.iter().enumerate() {
        sim.start(id(index), member.share, member.workload)?;
    }
    sim.event(Event::ConfigChanged(config))?;
    let slices = (0..members.len()).filter_map(|index| sim.scheduler().slice(id(index)));
    let round: Duration = slices.sum();
    sim.run(Duration::from_secs(4).max((round * 8).min(Duration::from_secs(120))))?;
    sim.reset_waits();
    let before = sim.usage();
    let simulated = Duration::from_secs(10).max(round * 20);
    sim.run(simulated)?;
    let after = sim.usage();
    let wall = (after.now_ns - before.now_ns) as f64;
    for ((member, (_, before)), (_, after)) in
        members.iter_mut().zip(&before.vgpus).zip(&after.vgpus)
    {
        member.got = (after.engine_ns - before.engine_ns) as f64 / wall;
    }
    let used = members.iter().map(|member| member.got).sum();
    fill(&mut members, policy, count);
    let mut waits = Histogram::default();
    for wait in (0..members.len()).filter_map(|index| sim.waits(id(index))) {
        waits.add(wait);
    }
    let (decision_ns, change_ns) = costs(&sim, &after)?;
    Ok(Outcome {
        mix,
        vgpus: members.len(),
        members,
        waits,
        used,
        simulated,
        decision_ns,
        change_ns,
    })
}

/// Computes the due shares of the always busy vGPUs: their total time, divided by weight within
/// caps.
fn fill(members: &mut [Member], policy: Policy, count: u32) {
    let mut open: Vec<_> =
        (0..members.len()).filter(|index| members[*index].workload.is_endless()).collect();
    let mut rest: f64 = open.iter().map(|index| members[*index].got).sum();
    let weigh = |member: &Member| match policy {
        Policy::Weighted => member.share.core.map_or(1.0, |core| f64::from(core.get())),
        _ => 1.0,
    };
    let cap = |member: &Member| match (policy, member.share.mode, member.share.core) {
        (Policy::EqualShare, _, _) => 1.0 / f64::from(count),
        (Policy::FixedShare, _, _) => 1.0 / f64::from(MAX_INSTANCES),
        (Policy::Weighted, Mode::Hard, Some(core)) => f64::from(core.get()) / 100.0,
        _ => 1.0,
    };
    loop {
        let weight: f64 = open.iter().map(|index| weigh(&members[*index])).sum();
        let each = rest / weight;
        let over = |member: &Member| cap(member) < each * weigh(member);
        let (capped, free): (Vec<_>, Vec<_>) =
            open.into_iter().partition(|index| over(&members[*index]));
        for index in &capped {
            members[*index].due = cap(&members[*index]);
            rest -= members[*index].due;
        }
        if capped.is_empty() {
            for index in &free {
                members[*index].due = each * weigh(&members[*index]);
            }
            return;
        }
        open = free;
    }
}

/// Measures the minimal cost of decisions on this machine, for one vGPU at a reading and for one
/// share change.
fn costs(sim: &Simulation, usage: &UsageReport) -> Result<(f64, f64)> {
    let mut scheduler = sim.scheduler().clone();
    let mut report = usage.clone();
    let mut decision_ns = f64::INFINITY;
    for _ in 0..12 {
        report.now_ns += 100_000_000;
        for (index, (_, usage)) in report.vgpus.iter_mut().enumerate() {
            usage.engine_ns += 1000 * (1 + index as u64 % 7);
            usage.wait_ns += 99_000_000;
            usage.runnable = true;
        }
        let start = Instant::now();
        let actions = scheduler.handle(Event::UsageReport(&report))?;
        let took = start.elapsed().as_nanos() as f64;
        drop(actions);
        decision_ns = decision_ns.min(took / report.vgpus.len().max(1) as f64);
    }
    // Changes one vGPU's weight after the other, including updates of other vGPUs. Uses the mean,
    // since changes that affect many vGPUs are expensive and rare.
    let mut change_ns = f64::INFINITY;
    for round in 0..20 {
        let start = Instant::now();
        for step in 0..CHANGES {
            let core = Core::try_from(1 + ((step + round) % 4) as u8).ok();
            let id = id(step * 7 % usage.vgpus.len().max(1));
            scheduler.handle(Event::ShareChanged { id, share: ShareRequest::with_core(core) })?;
        }
        change_ns = change_ns.min(start.elapsed().as_nanos() as f64 / CHANGES as f64);
    }
    Ok((decision_ns, change_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_vgpus_receive_due_shares_and_plots_are_written() {
        let out = tempfile::tempdir().unwrap();
        for policy in Policy::ALL {
            for mix in MIXES {
                let outcome = simulate(mix, 10, policy, Enforcement::Budgets).unwrap();
                let off = if mix == "hostile" { OFF_HOSTILE } else { OFF };
                assert!(outcome.worst() <= off, "{policy} {mix}: {}", outcome.worst());
            }
        }
        let outcome = simulate("hostile", 10, Policy::Weighted, Enforcement::Gates).unwrap();
        assert!(outcome.worst() <= OFF_HOSTILE, "{}", outcome.worst());
        plot::shares(&out.path().join("shares.svg"), &outcome).unwrap();
        plot::waits(&out.path().join("waits.svg"), &[&outcome]).unwrap();
        plot::costs(&out.path().join("costs.svg"), &[outcome]).unwrap();
        for name in ["shares.svg", "waits.svg", "costs.svg"] {
            assert!(std::fs::read_to_string(out.path().join(name)).unwrap().ends_with("</svg>\n"));
        }
    }
}
