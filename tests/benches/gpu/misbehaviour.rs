//! Throughput of other vGPUs while one misbehaves.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::diary::Pages;
use crate::load::Progress;
use crate::tenant::{self, Order};
use crate::trouble::{Reported, Trouble};
use crate::{Bench, GpuKind, MIDDLE, SMALL_RAM, three};

/// Throughput that others must keep, and their longest stall in milliseconds.
const KEPT: f64 = 0.95;
const STALL: f64 = 150.0;
/// Time limit of the error for an endless kernel, in milliseconds.
const TOLD: f64 = 250.0;

impl Bench<'_> {
    /// Lets one vGPU misbehave while two others work: in each way, or in the ways of `asked`,
    /// repeatedly.
    pub fn troubles(&mut self, quick: bool, asked: &[Trouble], times: u32) {
        let all = if quick { vec![Trouble::Fault, Trouble::Killed] } else { Trouble::ALL.to_vec() };
        for trouble in all {
            // The software GPU preempts an endless kernel and reports it only after a minute.
            let slow = self.kind == GpuKind::Soft && trouble == Trouble::Hang;
            if slow || !asked.is_empty() && !asked.contains(&trouble) {
                continue;
            }
            for _ in 0..times {
                self.attempt(trouble.name(), |bench| bench.trouble(trouble));
            }
        }
    }

    fn trouble(&mut self, trouble: Trouble) -> Result<()> {
        let mut fleet = self.fleet(SMALL_RAM, &three())?;
        let mut bad = fleet.tenants.pop().context("There are three")?;
        self.start_loads(&mut fleet, &[self.kernels(MIDDLE); 2])?;
        if trouble == Trouble::Killed {
            bad.load(self.kernels(MIDDLE))?;
            std::thread::sleep(self.settle);
        }
        let before = tenant::measure(&mut fleet.tenants, self.window)?;
        match trouble {
            Trouble::Killed => fleet.kill(2)?,
            _ => bad.tell(&Order::Trouble(trouble, self.window))?,
        }
        let (tenants, diary) = fleet.parts();
        let (during, pages) = diary.keep(|| tenant::measure(tenants, self.window));
        let during = during?;
        let told = match trouble {
            Trouble::Killed => {
                bad.tell(&Order::Measure(Duration::ZERO))?;
                bad.hear::<Progress>().map_or("gone", |_| "still there?").to_owned()
            }
            _ => String::new(),
        };
        let (line, in_time) = if told.is_empty() {
            let told = bad.hear::<Reported>();
            let in_time = told.as_ref().is_ok_and(|told| told.code != 0 && told.after_ms <= TOLD);
            (format_told(trouble, told.as_ref()), in_time)
        } else {
            (told, true)
        };
        let Left { least, stall, usual } = left(&before, &during);
        let (bound, kept) = if trouble == Trouble::Hang {
            ("told within 250 ms", in_time)
        } else {
            ("95 %, 150 ms", least >= KEPT && stall < STALL)
        };
        let row = format!("beside {} ({line})", trouble.name());
        let vgpu = format!("others do {:.1} %, stall {stall:.0} ms", least * 100.0);
        self.row(&row, format!("stall {usual:.0} ms before"), vgpu, bound.to_owned(), kept);
        if !kept {
            explain(&before, &during, &pages);
        }
        Ok(())
    }
}

/// Prints the record of a figure that breaks a promise.
fn explain(before: &[Progress], during: &[Progress], pages: &Pages) {
    for (place, (before, during)) in before.iter().zip(during).enumerate() {
        let part = during.kernels / before.kernels * 100.0;
        let (did, stall) = (during.kernels, during.stall_ms);
        eprintln!(
            "  {place} did {part:.1} % of before ({did:.2} s of kernels), stall {stall:.0} ms"
        );
    }
    eprint!("{}", pages.text());
}

/// Effect on the others.
#[derive(Clone, Copy, Debug)]
struct Left {
    /// Throughput as a part of the undisturbed one, of the vGPU with the least.
    least: f64,
    /// Longest stall now and before, in milliseconds.
    stall: f64,
    usual: f64,
}

fn left(before: &[Progress], during: &[Progress]) -> Left {
    let ratio = |(before, during): (&Progress, &Progress)| during.kernels / before.kernels;
    let least = before.iter().zip(during).map(ratio).fold(f64::MAX, f64::min);
    let stall = |of: &[Progress]| of.iter().map(|one| one.stall_ms).fold(0.0, f64::max);
    Left { least, stall: stall(during), usual: stall(before) }
}

fn format_told(trouble: Trouble, told: Result<&Reported, &anyhow::Error>) -> String {
    match told {
        Ok(told) if matches!(trouble, Trouble::Fault | Trouble::Hang) => {
            format!("told {} after {:.0} ms", told.code, told.after_ms)
        }
        Ok(told) => format!("{} times", told.rounds),
        Err(error) => format!("{error:#}"),
    }
}
