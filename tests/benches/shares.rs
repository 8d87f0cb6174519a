//! Two busy vGPUs at 80 and 20 hundredths, by the scheduler that the manager runs.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mdev_core::gpu::{Gpu, UsageReport};
use mdev_core::ids::VgpuId;
use mdev_core::sched::{Action, Config, Core, Event, Scheduler, Share};
use mdev_core::units::MIB;
use serde_json::json;
use system_tests::outcome::{Outcome, measuring, report};
use system_tests::parent::{Parent, Vgpu};
use vgpu_guest::bench::{self, Load, Measured};

/// Hundredths asked for.
const CORES: [u8; 2] = [80, 20];
/// Points of a hundred that it may be off.
const OFF: f64 = 2.0;

fn main() -> ExitCode {
    report("shares", run)
}

fn run() -> Result<Outcome> {
    let time = Duration::from_millis(if measuring() { 5000 } else { 500 });
    let mut parent = Parent::start(256 * MIB)?;
    let guests = [parent.guest(Vgpu::default())?, parent.guest(Vgpu::default())?];
    let gpu = parent.gpu.describe();
    let mut scheduler = Scheduler::new(Config::new(gpu.default_timeslice), gpu.capabilities.into());
    for (guest, core) in guests.iter().zip(CORES) {
        let share = Share::of(Some(Core::try_from(core)?));
        let started = Event::VgpuStarted { id: guest.id, share, max_instances: 2 };
        let actions = scheduler.handle(started)?;
        apply(&mut parent, &actions)?;
    }
    // Some time before and after the measurement, since loads neither start nor end together.
    let load = Load { duration: time + Duration::from_millis(1500), ..Load::default() };
    let loads: Vec<_> = guests
        .iter()
        .map(|guest| {
            let device = guest.device.clone();
            thread::spawn(move || bench::run(&device, &load))
        })
        .collect();
    tick(&mut parent, &mut scheduler, Duration::from_millis(750))?;
    let before = parent.gpu.usage()?;
    tick(&mut parent, &mut scheduler, time)?;
    let after = parent.gpu.usage()?;
    let loads: Vec<Measured> = loads
        .into_iter()
        .map(|load| Ok(load.join().ok().context("A load panicked")??))
        .collect::<Result<_>>()?;
    let used: Vec<f64> =
        guests.iter().map(|guest| used(&after, guest.id) - used(&before, guest.id)).collect();
    let total: f64 = used.iter().sum();
    let wall = (after.now_ns - before.now_ns) as f64;
    let share = used[0] / total * 100.0;
    let trapped: u32 = loads.iter().map(|load| load.trapped).sum();
    let busy: u64 = loads.iter().map(|load| load.wakes_while_busy).sum();
    let units: Vec<u64> = loads.iter().map(|load| load.verified).collect();
    let off = (share - f64::from(CORES[0])).abs();
    Ok(Outcome {
        line: format!(
            "{share:.1}/{:.1} over {:.1} s (asked {}/{}, promised within {OFF} points), engine {:.0} % busy, \
             units verified {}/{}, {trapped} trapped",
            100.0 - share,
            wall / 1e9,
            CORES[0],
            CORES[1],
            total / wall * 100.0,
            units[0],
            units[1]
        ),
        facts: json!({
            "asked": CORES, "measured": [share, 100.0 - share], "busy": total / wall,
            "seconds": wall / 1e9, "verified": units, "trapped": trapped, "wakes_while_busy": busy,
        }),
        kept: off <= OFF && busy == 0,
    })
}

/// What the manager does: reads the counters every 100 ms and does what the scheduler says.
fn tick(parent: &mut Parent, scheduler: &mut Scheduler, time: Duration) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < time {
        thread::sleep(Duration::from_millis(100).min(time.saturating_sub(start.elapsed())));
        let usage = parent.gpu.usage()?;
        let actions = scheduler.handle(Event::UsageReport(&usage))?;
        apply(parent, &actions)?;
    }
    Ok(())
}

fn apply(parent: &mut Parent, actions: &[Action]) -> Result<()> {
    for action in actions {
        match *action {
            Action::SetTimeslice(id, slice) => parent.gpu.set_timeslice(id, slice)?,
            Action::SetBudget(id, budget) => parent.gpu.set_budget(id, budget)?,
            Action::Gate(id, open) => parent.gpu.set_gate(id, open)?,
        }
    }
    Ok(())
}

/// Engine time of one vGPU, in nanoseconds.
fn used(report: &UsageReport, id: VgpuId) -> f64 {
    let usage = report.vgpus.iter().find(|(vgpu, _)| *vgpu == id);
    usage.map_or(0.0, |(_, usage)| usage.engine_ns as f64)
}
