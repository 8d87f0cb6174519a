//! `cargo lab`: the demo, every test, every benchmark.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use lab::cleanup::Scratch;
use lab::demo::{self, Options};
use lab::progress::Progress;
use lab::qemu::{Vm, VmSpec};
use lab::{Lab, bench, test};

/// Real VMs on this machine: fetches QEMU and a kernel if need be, and cleans up after itself.
#[derive(Debug, Parser)]
#[command(name = "cargo lab", bin_name = "cargo lab", version)]
struct Args {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Two VMs share one GPU, 80 to 20; fails unless every claim holds
    Demo {
        /// Write the facts to FILE
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Save the pictures in DIR
        #[arg(long, value_name = "DIR", default_value = "lab-out")]
        out: PathBuf,
        /// Measure the shares over N seconds
        #[arg(long, value_name = "N", default_value_t = 5,
              value_parser = clap::value_parser!(u32).range(1..=600))]
        seconds: u32,
    },
    /// Every test: formatting, lints, unit, property, protocol, QEMU
    Test,
    /// The benchmarks, or the one of this name
    Bench {
        /// A benchmark of the tests crate
        name: Option<String>,
    },
    /// Prepare QEMU and the guest, and boot one VM
    Prepare,
}

fn main() -> ExitCode {
    match run(Args::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<bool> {
    match task {
        Task::Demo { json, out, seconds } => {
            let facts = demo::run(&Options { json, out, seconds })?;
            for failure in &facts.failures {
                eprintln!("error: {failure}");
            }
            Ok(facts.failures.is_empty())
        }
        Task::Test => Ok(test::run().failed == 0),
        Task::Bench { name } => bench::run(name.as_deref()).map(|()| true),
        Task::Prepare => prepare().map(|()| true),
    }
}

fn prepare() -> Result<()> {
    let progress = Progress::new();
    let lab = Lab::open(&progress)?;
    let scratch = Scratch::new()?;
    let step = progress.step(format!("Booting a VM under QEMU {}", lab.root.qemu.version));
    let mut vm = Vm::boot(&lab, &VmSpec::new("probe"), &scratch.path().join("probe"))?;
    step.done();
    let kernel = vm.guest.run("uname -sr", std::time::Duration::from_secs(5))?.success()?;
    println!("{} boots under QEMU {}", kernel.stdout.trim(), lab.root.qemu.version);
    vm.quit()
}
