//! `cargo lab test`: formatting, lints, documentation and every test of the workspace.
//!
//! * [`programs`]: test programs as cargo builds them, and their split into jobs
//! * [`jobs`]: jobs that run side by side, each with its output in one piece
//! * [`tally`]: counts of tests, from libtest's output
//!
//! Cargo builds programs and tests once, in one resolution of features. Tests that boot VMs then
//! run side by side. Static programs and the other tests run beside them, one at a time, since
//! tests with VMs do not keep all CPUs busy. Tests that measure ([`MEASURED`]) run last, one at a
//! time. Lints and documentation take the time that these leave.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::Lab;
use crate::attack;
use crate::build::{self, cargo, cargo_in_background, cargo_when_idle};
use crate::heartbeat::{Heartbeat, INTERVAL};
use crate::kube::{self, Kubernetes};
use crate::kvm;
use crate::progress::{self, Progress};

mod jobs;
mod programs;
mod tally;

pub(crate) use self::jobs::Tested;
use self::jobs::{Finished, Job, Queue};
pub(crate) use self::programs::Built;
pub(crate) use self::tally::Failure;
pub use self::tally::Tally;

/// Tests that measure shares or times, as `package/program` or `package/program/module`.
///
/// They run one test at a time, with no other load than [`when_idle`]. `vfio/shares` measures as
/// well, in a VM with a clock of its own.
const MEASURED: [&str; 17] = [
    "vendor-backends/limits",
    "vendor-backends/nvidia/doorbell",
    "vendor-backends/nvidia/exceptions",
    "vendor-backends/nvidia/faults",
    "vendor-backends/nvidia/hostile_guest",
    "vendor-backends/nvidia/hostile_worker",
    "vendor-backends/nvidia/manager",
    "vendor-backends/nvidia/programs",
    "vendor-backends/nvidia/scheduling",
    "vendor-backends/nvidia/teardown",
    "vendor-backends/soft",
    "system-tests/guest",
    "system-tests/kube/claims",
    "system-tests/kube/shares",
    "system-tests/kube/users_cluster",
    "system-tests/shares",
    "system-tests/qemu/bundle",
];
/// Test of [`MEASURED`] that builds with cargo, for which jobs that run [`when_idle`] would lock
/// the target folder. It runs before them.
const BUILDS: &str = "system-tests/qemu/bundle";
/// Tests that take long, as `package/program/module`. Only [`endurance`] runs them.
const LONG: [&str; 4] = [
    "system-tests/cuda/endurance",
    "system-tests/daemon/replacement_endurance",
    "system-tests/guest_driver/endurance",
    "system-tests/qemu/saving_endurance",
];
/// Tests with VMs that take over a minute, the longest first. They start first, so that none of
/// them is left alone at the end.
const FIRST: [&str; 11] = [
    "system-tests/libvirt/domains",
    "system-tests/cuda/in_vm",
    "system-tests/guest_driver/unbinding",
    "system-tests/vfio/service",
    "system-tests/vfio/dma",
    "system-tests/qemu/vms",
    "system-tests/cuda/checkpoints",
    "system-tests/cuda/vgpu_guest_in_vm",
    "system-tests/cuda/deaths",
    "system-tests/vfio/guest",
    "system-tests/vfio/shares",
];
/// Arguments for cargo that select the programs of a bundle.
const STATIC_PROGRAMS: [&str; 8] =
    ["--bin", "vgpu-guest", "--bin", "vgpud", "--bin", "vgpuctl", "--bin", "lab"];

/// Runs everything and returns the total.
pub fn run() -> Tally {
    let mut report = Report::new();
    report.section("Formatting", || check(&["fmt", "--all", "--check"]).map(Tested::from));
    let built = report.build();
    report.section("The lab: QEMU and a guest's kernel", || prepare().map(Tested::from));

    let plan = built.plan(&MEASURED, &LONG, &FIRST);
    let slots = thread::available_parallelism().map_or(1, usize::from);
    let (vms, others) = (plan.with_vms.len(), plan.without_vms.len());
    heading(&format!("{vms} jobs with VMs, {slots} at a time, and {others} others beside them"));
    let others = [static_programs()].into_iter().chain(plan.without_vms).collect();
    let queues = vec![Queue { jobs: plan.with_vms, slots }, Queue { jobs: others, slots: 1 }];
    jobs::run_side_by_side(queues, |finished| report.add(finished));
    let builds = programs::title_of(BUILDS);
    let (building, measured): (Vec<_>, Vec<_>) =
        plan.measured.into_iter().partition(|job| job.title == builds);
    report.jobs(building);
    let idle = when_idle();
    report.jobs(measured);
    let heartbeat = Heartbeat::start(INTERVAL, |since| {
        println!("{}", progress::running("Lints and documentation", since, ""));
    });
    for finished in idle {
        report.add(finished);
    }
    drop(heartbeat);
    report.summary()
}

/// Starts the jobs that take only time in which a CPU is idle, one at a time: cargo locks the
/// target folder. Returns their results as they come.
fn when_idle() -> mpsc::Receiver<Finished> {
    let (sender, finished) = mpsc::channel();
    thread::spawn(move || {
        for job in [lints(), software_gpu_alone(), documentation(), code_documentation()] {
            // The receiver lives until the last result.
            let _ = sender.send(job.run_buffered());
        }
    });
    finished
}

/// Runs the tests that take long, one at a time. Returns the total.
pub fn endurance() -> Tally {
    let mut report = Report::new();
    let built = report.build();
    report.jobs(built.plan(&MEASURED, &LONG, &FIRST).long);
    report.summary()
}

/// Runs the tests with a Kubernetes cluster, the lab's or the user's. Returns the total.
pub fn kube(args: &Kube) -> Result<Tally> {
    let mut command = cargo();
    command.args(["test", "--quiet", "--package", "system-tests", "--test", "kube", "--"]);
    command.args(["--ignored", "--nocapture", "--test-threads=1"]);
    match (&args.kubeconfig, &args.image, &args.write_image) {
        (Some(config), Some(image), _) => {
            let config = std::path::absolute(config)?;
            command.arg("users_cluster::pods").env(kube::CONFIG_VARIABLE, config);
            command.env(kube::IMAGE_VARIABLE, image);
        }
        (_, _, Some(file)) => {
            command.arg("users_cluster::image");
            command.env(kube::IMAGE_FILE_VARIABLE, std::path::absolute(file)?);
        }
        _ => {
            Kubernetes::open(&Progress::new())?;
            let others = ["users_cluster::pods", "users_cluster::image", "inside::"];
            command.args(others.iter().flat_map(|name| ["--skip", name]));
            command.env(kube::KILLS_VARIABLE, args.kills.to_string());
        }
    }
    let Tested { tally, .. } = Job::new("Kubernetes", command).run(&mut std::io::stdout())?;
    println!("\n{tally}");
    Ok(tally)
}

/// Which cluster the tests with Kubernetes use: by default, the lab's.
#[derive(Clone, Debug, clap::Args)]
pub struct Kube {
    /// Kill each process of the node N times
    #[arg(long, value_name = "N", default_value_t = 20, conflicts_with = "kubeconfig")]
    pub kills: u32,
    /// Run pods on the cluster of this configuration instead. Its nodes run vgpud and
    /// vgpu-kube, and offer tessera.io/soft-2c and soft-4c, or claims of a GPU of 8 GiB
    #[arg(long, value_name = "FILE", requires = "image")]
    pub kubeconfig: Option<PathBuf>,
    /// Image of these pods; --write-image makes it
    #[arg(long, value_name = "NAME", requires = "kubeconfig")]
    pub image: Option<String>,
    /// Write the image of the tests' pods to FILE, for `docker load` or `ctr images import`,
    /// and run nothing
    #[arg(long, value_name = "FILE", conflicts_with = "kubeconfig")]
    pub write_image: Option<PathBuf>,
    /// Compile Kubernetes if needed, and run nothing
    #[arg(long, conflicts_with_all = ["kubeconfig", "write_image"])]
    pub prepare: bool,
}

/// Returns the job that looks for faults that clippy knows.
fn lints() -> Job {
    let mut command = cargo_when_idle();
    command.args(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    Job { is_test: true, ..Job::new("Lints", command) }
}

/// Returns the job that checks the daemon without the backends that need more than a CPU.
fn software_gpu_alone() -> Job {
    let mut command = cargo_when_idle();
    command.args(["clippy", "--quiet", "-p", "vgpud", "--no-default-features"]);
    command.args(["--", "-D", "warnings"]);
    Job { is_test: true, ..Job::new("The daemon with the software GPU alone", command) }
}

/// Returns the job that builds the programs of a bundle.
fn static_programs() -> Job {
    let mut command = cargo_in_background();
    build::build_statically(&mut command, &STATIC_PROGRAMS);
    Job::new("Building static programs", command)
}

/// Returns the job that runs the examples in the documentation.
fn documentation() -> Job {
    let mut command = cargo_when_idle();
    command.args(["test", "--quiet", "--doc", "--workspace"]);
    Job::new("Examples in the documentation", command)
}

/// Returns the job that documents the code: rustdoc warns, for example, of links that lead nowhere.
fn code_documentation() -> Job {
    let mut command = cargo_when_idle();
    command.args(["doc", "--quiet", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings");
    Job { is_test: true, ..Job::new("Documentation of the code", command) }
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
    sections: Vec<(String, Tested, Duration)>,
}

impl Report {
    fn new() -> Self {
        Self { started: Instant::now(), sections: Vec::new() }
    }

    /// Runs a section by itself. An error counts as a failed test.
    fn section(&mut self, title: &str, body: impl FnOnce() -> Result<Tested>) {
        heading(title);
        let start = Instant::now();
        let name = title.to_owned();
        let _heartbeat = Heartbeat::start(INTERVAL, move |since| {
            println!("{}", progress::running(&name, since, ""));
        });
        let result = body().unwrap_or_else(|error| {
            println!("error: {error:#}");
            Tally::check(false).into()
        });
        self.sections.push((title.to_owned(), result, start.elapsed()));
    }

    /// Builds all programs and tests.
    fn build(&mut self) -> Built {
        let mut built = Built::default();
        self.section("Building programs and tests", || {
            built = Built::build()?;
            attack::check(&built)?;
            Ok(Tested::default())
        });
        built
    }

    /// Runs jobs one at a time.
    fn jobs(&mut self, jobs: Vec<Job>) {
        for job in jobs {
            let title = job.title.clone();
            self.section(&title, || job.run(&mut std::io::stdout()));
        }
    }

    /// Prints the output of a finished job and adds its result.
    fn add(&mut self, finished: Finished) {
        heading(&finished.title);
        let mut stdout = std::io::stdout();
        let _ = stdout.write_all(&finished.output).and_then(|()| stdout.flush());
        self.sections.push((finished.title, finished.result, finished.took));
    }

    /// Prints the table of all sections and what failed. Returns the total.
    fn summary(self) -> Tally {
        heading("Summary");
        let mut total = Tally::default();
        for (title, Tested { tally, .. }, took) in &self.sections {
            total.add(*tally);
            let mark = if tally.failed > 0 { "FAILED" } else { "ok" };
            println!("{mark:6}  {:6.1} s  {title}: {tally}", took.as_secs_f64());
        }
        for (title, Tested { failures, .. }, _) in &self.sections {
            for Failure { name, output } in failures {
                println!("\nFAILED  {title}: {name}");
                for line in output {
                    println!("    {line}");
                }
            }
        }
        let seconds = self.started.elapsed().as_secs();
        println!("\n{total} in {} min {} s", seconds / 60, seconds % 60);
        total
    }
}
