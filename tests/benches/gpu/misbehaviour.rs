//! What is left to others while one vGPU misbehaves.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::load::Progress;
use crate::tenant::{self, Order};
use crate::trouble::{Told, Trouble};
use crate::{Bench, GpuKind, MIDDLE, SMALL_RAM, three};

impl Bench<'_> {
    /// One vGPU misbehaves while two others work.
    pub fn troubles(&mut self, quick: bool) {
        let all = [
            Trouble::Fault,
            Trouble::Hang,
            Trouble::FaultStorm,
            Trouble::DoorbellFlood,
            Trouble::GarbageRing,
        ];
        for trouble in all.into_iter().take(if quick { 1 } else { all.len() }) {
            // An endless kernel of the software GPU is preempted, and told of after a minute only.
            if self.kind == GpuKind::Soft && trouble == Trouble::Hang {
                continue;
            }
            let done = self.trouble_of(trouble);
            self.attempt(trouble.name(), done);
        }
        let done = self.killed();
        self.attempt("a worker killed -9", done);
    }

    fn trouble_of(&mut self, trouble: Trouble) -> Result<()> {
        let mut fleet = self.fleet(SMALL_RAM, &three())?;
        let load = [self.kernels(MIDDLE); 2];
        let mut bad = fleet.tenants.pop().context("There are three")?;
        self.start_loads(&mut fleet, &load)?;
        let before = tenant::measure(&mut fleet.tenants, self.window)?;
        bad.tell(&Order::Trouble(trouble, self.window))?;
        let during = tenant::measure(&mut fleet.tenants, self.window)?;
        let told = bad.hear::<Told>();
        let line = format_told(trouble, told.as_ref());
        if trouble == Trouble::Hang {
            let in_time = told.is_ok_and(|told| told.code != 0 && told.after_ms <= 250.0);
            let (least, stall, usual) = left(&before, &during);
            let vgpu = format!("others do {:.1} %, stall {stall:.0} ms", least * 100.0);
            let row = format!("beside {} ({line})", trouble.name());
            let owner = format!("stall {usual:.0} ms before");
            self.row(&row, owner, vgpu, "told within 250 ms".to_owned(), in_time);
            return Ok(());
        }
        self.trouble(trouble.name(), &before, &during, &line);
        Ok(())
    }

    fn killed(&mut self) -> Result<()> {
        let mut fleet = self.fleet(SMALL_RAM, &three())?;
        self.start_loads(&mut fleet, &[self.kernels(MIDDLE); 3])?;
        let mut killed = fleet.tenants.pop().context("There are three")?;
        let before = tenant::measure(&mut fleet.tenants, self.window)?;
        fleet.kill(2)?;
        let during = tenant::measure(&mut fleet.tenants, self.window)?;
        killed.tell(&Order::Measure(Duration::ZERO))?;
        let told = killed.hear::<Progress>().map_or("gone", |_| "still there?");
        self.trouble("a worker killed -9", &before, &during, told);
        Ok(())
    }

    /// What the others had before and while it happened.
    fn trouble(&mut self, what: &str, before: &[Progress], during: &[Progress], told: &str) {
        let (least, stall, usual) = left(before, during);
        let row = format!("beside {what} ({told})");
        let owner = format!("stall {usual:.0} ms before");
        let vgpu = format!("others do {:.1} %, stall {stall:.0} ms", least * 100.0);
        self.row(&row, owner, vgpu, "95 %, 150 ms".to_owned(), least >= 0.95 && stall < 150.0);
    }
}

/// What is left to the others, as a part of what they had; their longest stall, and how long one was before.
fn left(before: &[Progress], during: &[Progress]) -> (f64, f64, f64) {
    let ratio = |(before, during): (&Progress, &Progress)| during.kernels / before.kernels;
    let least = before.iter().zip(during).map(ratio).fold(f64::MAX, f64::min);
    let stall = |of: &[Progress]| of.iter().map(|one| one.stall_ms).fold(0.0, f64::max);
    (least, stall(during), stall(before))
}

fn format_told(trouble: Trouble, told: Result<&Told, &anyhow::Error>) -> String {
    match told {
        Ok(told) if matches!(trouble, Trouble::Fault | Trouble::Hang) => {
            format!("told {} after {:.0} ms", told.code, told.after_ms)
        }
        Ok(told) => format!("{} times", told.rounds),
        Err(error) => format!("{error:#}"),
    }
}
