//! `cargo lab`: the demo, every test, every benchmark.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use lab::Lab;
use lab::cleanup::Scratch;
use lab::progress::Progress;
use lab::qemu::{Vm, VmSpec};

/// Real VMs on this machine: fetches QEMU and a kernel if need be, and cleans up after itself.
#[derive(Debug, Parser)]
#[command(name = "cargo lab", version)]
struct Args {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Prepare QEMU, the guest's kernel and its root, and boot one VM
    Prepare,
}

fn main() -> ExitCode {
    match run(&Args::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: &Task) -> Result<()> {
    let progress = Progress::new();
    match task {
        Task::Prepare => {
            let lab = Lab::open(&progress)?;
            let scratch = Scratch::new()?;
            let step = progress.step(format!("Booting a VM under QEMU {}", lab.root.qemu.version));
            let mut vm = Vm::boot(&lab, &VmSpec::new("probe"), &scratch.path().join("probe"))?;
            step.done();
            let kernel = vm.guest.run("uname -sr", std::time::Duration::from_secs(5))?.success()?;
            println!("{} boots under QEMU {}", kernel.stdout.trim(), lab.root.qemu.version);
            vm.quit()
        }
    }
}
