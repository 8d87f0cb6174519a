//! `cargo lab test`: formatting, lints and every test of the workspace.
//!
//! * [`programs`]: test programs as cargo builds them, and their split into jobs
//! * [`jobs`]: jobs that run side by side, each with its output in one piece
//! * [`tally`]: counts of tests, from libtest's output
//!
//! Cargo builds programs and tests once, in one resolution of features. Tests that boot VMs then run
//! side by side. Other programs follow one after another, since each runs its tests in parallel.
//! Tests that measure ([`MEASURED`]) run last, one at a time.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::Lab;
use crate::build::{self, Profile, cargo};
use crate::kvm;
use crate::progress::Progress;

mod jobs;
mod programs;
mod tally;

use self::jobs::{Finished, Job};
use self::programs::Built;
pub use self::tally::Tally;

/// Tests that measure shares or times, as `package/program` or `package/program/module`.
///
/// They run without other load, one test at a time.
const MEASURED: [&str; 9] = [
    "vendor-backends/limits",
    "vendor-backends/nvidia",
    "vendor-backends/soft",
    "system-tests/guest",
    "system-tests/shares",
    "system-tests/qemu/bundle",
    "system-tests/qemu/vms",
    "system-tests/vfio/display",
    "system-tests/vfio/shares",
];
/// Arguments for cargo that select the programs of a bundle.
const STATIC_PROGRAMS: [&str; 8] =
    ["--bin", "vgpu-guest", "--bin", "vgpud", "--bin", "vgpuctl", "--bin", "lab"];

/// Runs everything and returns the total.
pub fn run() -> Tally {
    let mut report = Report::new();
    report.section("Formatting", || check(&["fmt", "--all", "--check"]));
    report.section("Lints", || {
        check(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"])
    });
    let mut built = Built::default();
    report.section("Building programs and tests", || {
        built = programs::build()?;
        Ok(Tally::default())
    });
    report.section("Building static programs", || {
        let what = "Building static programs";
        build::portable(what, &STATIC_PROGRAMS, Profile::Dev, &Progress::new())?;
        Ok(Tally::default())
    });
    report.section("The lab: QEMU and a guest's kernel", prepare);

    let plan = built.plan(&MEASURED);
    let mut with_vms = plan.with_vms;
    with_vms.push(documentation());
    let slots = std::thread::available_parallelism().map_or(1, usize::from);
    heading(&format!("{} jobs with VMs, {slots} at a time", with_vms.len()));
    jobs::run_side_by_side(with_vms, slots, |finished| report.add(finished));
    // These programs run their tests in parallel themselves.
    heading(&format!("{} jobs without VMs", plan.without_vms.len()));
    jobs::run_side_by_side(plan.without_vms, 1, |finished| report.add(finished));
    for job in plan.measured {
        let title = job.title.clone();
        report.section(&title, || job.run(&mut std::io::stdout()));
    }
    report.summary()
}

/// Returns the job that runs the examples in the documentation.
fn documentation() -> Job {
    let mut command = cargo();
    command.args(["test", "--quiet", "--doc", "--workspace"]);
    Job { title: "Examples in the documentation".to_owned(), command, ignored: 0 }
}

/// Runs a cargo command that counts as one test.
fn check(args: &[&str]) -> Result<Tally> {
    let status = cargo().args(args).stdin(Stdio::null()).status().context("Cannot run cargo")?;
    Ok(Tally::check(status.success()))
}

/// Prepares the lab and reports what this machine lacks.
fn prepare() -> Result<Tally> {
    let progress = Progress::new();
    let lab = Lab::open(&progress)?;
    println!("QEMU {}", lab.root.qemu.version);
    let mut tally = Tally::default();
    let mut skip = |what: &str, reason: &str| {
        println!("skipped: {what}: {reason}");
        tally.skipped += 1;
    };
    if let Err(reason) = kvm::probe(&lab, &progress)? {
        skip("VMs under KVM", &reason);
    }
    if !Path::new("/dev/nvidiactl").exists() {
        skip("vGPUs of an NVIDIA GPU", "/dev/nvidiactl is not there");
    }
    Ok(tally)
}

fn heading(title: &str) {
    println!("\n== {title} ==");
    let _ = std::io::stdout().flush();
}

/// Results so far.
struct Report {
    started: Instant,
    sections: Vec<(String, Tally, Duration)>,
}

impl Report {
    fn new() -> Self {
        Self { started: Instant::now(), sections: Vec::new() }
    }

    /// Runs a section by itself. An error counts as a failed test.
    fn section(&mut self, title: &str, body: impl FnOnce() -> Result<Tally>) {
        heading(title);
        let start = Instant::now();
        let tally = body().unwrap_or_else(|error| {
            println!("error: {error:#}");
            Tally::check(false)
        });
        self.sections.push((title.to_owned(), tally, start.elapsed()));
    }

    /// Prints the output of a finished job and adds its result.
    fn add(&mut self, finished: Finished) {
        heading(&finished.title);
        let mut stdout = std::io::stdout();
        let _ = stdout.write_all(&finished.output).and_then(|()| stdout.flush());
        self.sections.push((finished.title, finished.tally, finished.took));
    }

    /// Prints the table of all sections and returns the total.
    fn summary(self) -> Tally {
        heading("Summary");
        let mut total = Tally::default();
        for (title, tally, took) in &self.sections {
            total.add(*tally);
            let mark = if tally.failed > 0 { "FAILED" } else { "ok" };
            println!("{mark:6}  {:6.1} s  {title}: {tally}", took.as_secs_f64());
        }
        let seconds = self.started.elapsed().as_secs();
        println!("\n{total} in {} min {} s", seconds / 60, seconds % 60);
        total
    }
}
