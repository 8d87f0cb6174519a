//! `cargo lab`: the demo, every test, every benchmark.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use lab::build::Profile;
use lab::cleanup::Scratch;
use lab::demo::cuda::Choice;
use lab::demo::{self, Options};
use lab::heartbeat::{Heartbeat, INTERVAL};
use lab::place::Bundle;
use lab::progress::{self, Progress};
use lab::qemu::{Vm, VmSpec};
use lab::test::Kube;
use lab::{Lab, attack, bench, bundle, deb, simulate, test};
use mdev_core::sched::{Enforcement, Policy};

/// Real VMs on this machine. Fetches QEMU and a kernel if needed, and cleans up afterwards.
#[derive(Debug, Parser)]
#[command(name = "cargo lab", bin_name = "cargo lab", version)]
struct Args {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Share one GPU between two VMs, 80 to 20; fails unless every claim holds
    Demo(Options),
    /// Run all tests (formatting, lints, unit, property, protocol, QEMU), or only those of this
    /// machine's GPU, or those that take long
    Test {
        /// `nvidia`: the tests that need an NVIDIA GPU; `endurance`: 1,000 programs, 100 reloads,
        /// 50 hot-unplugs and 100 restores in VMs, 1,000 dead workers, and races of the guest's
        /// module in kernels that look for faults, which the first run compiles
        kind: Option<String>,
    },
    /// Run the tests with a Kubernetes cluster of one node, made of Debian's packages. The first
    /// run compiles Kubernetes, which takes some ten minutes; later ones, also of `test`, find it
    /// cached
    Kube(Kube),
    /// Attack the promises of docs/security.md as a tenant, a taken-over process or another user
    /// would, and print what each attack reached. `test` runs the same tests
    Attack(attack::Options),
    /// Run all benchmarks, or the benchmark of this name
    Bench {
        /// Name of a benchmark in the tests crate
        name: Option<String>,
        /// Arguments for the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Write one archive that runs the demo and the GPU's benchmark on a machine without installed
    /// dependencies
    Bundle {
        /// Path of the archive
        #[arg(long, value_name = "FILE", default_value = "lab-out/tessera.tar.gz")]
        out: PathBuf,
        /// Build as for tests: faster to build, slower to run
        #[arg(long)]
        dev: bool,
        /// Omit the benchmark
        #[arg(long)]
        no_benchmark: bool,
    },
    /// Build the Debian packages: for hosts, vgpud, vgpuctl, their units, manual pages and
    /// completions; for nodes of Kubernetes, vgpu-kube; for VMs, vgpu-guest and the Linux module's
    /// source
    Deb {
        /// Folder for the packages
        #[arg(long, value_name = "DIR", default_value = "lab-out")]
        out: PathBuf,
        /// Build as for tests: faster to build, slower to run
        #[arg(long)]
        dev: bool,
    },
    /// Simulate the scheduling policies with up to 10,000 vGPUs; fails unless shares hold
    Simulate {
        /// Number of vGPUs, 1 to 10000; several numbers for several runs
        #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [10, 100, 1000, 10_000],
              value_parser = clap::value_parser!(u32).range(1..=10_000))]
        vgpus: Vec<u32>,
        /// Scheduling policy
        #[arg(long, default_value_t = Policy::Weighted)]
        policy: Policy,
        /// Enforce caps with gates, as on a GPU without budgets
        #[arg(long)]
        gates: bool,
        /// Write plots (SVG) into DIR
        #[arg(long, value_name = "DIR", default_value = "lab-out/simulate")]
        out: PathBuf,
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
        Task::Demo(options) => {
            let Options { cuda, live, .. } = options;
            if options.kills.is_some() && cuda != Choice::Only {
                bail!("--kills is for CUDA programs: add --cuda only");
            }
            if let Some(bundle) = Bundle::find() {
                bundle.drop_privileges(&options.out)?;
            }
            if let (Some(cycles), Choice::Auto | Choice::No) = (live, cuda) {
                return demo::live::run(&options, cycles).map(|()| true);
            }
            let failures = match cuda {
                Choice::Only => demo::cuda::only(&options)?,
                Choice::Auto | Choice::No => demo::run(&options)?.failures,
            };
            for failure in &failures {
                eprintln!("error: {failure}");
            }
            Ok(failures.is_empty())
        }
        Task::Test { kind: Some(name) } if name == "endurance" => Ok(test::endurance().failed == 0),
        Task::Test { kind: Some(name) } => bench::hardware_tests(&name).map(|()| true),
        Task::Test { kind: None } => Ok(test::run().failed == 0),
        Task::Kube(args) if args.prepare => {
            lab::kube::Kubernetes::open(&Progress::new()).map(|_| true)
        }
        Task::Kube(args) => Ok(test::kube(&args)?.failed == 0),
        Task::Attack(options) => attack::run(&options),
        Task::Bench { name, args } => bench::run(name.as_deref(), &args).map(|()| true),
        Task::Bundle { out, dev, no_benchmark } => {
            let profile = if dev { Profile::Dev } else { Profile::Release };
            let options = bundle::Options { to: out.clone(), profile, benchmark: !no_benchmark };
            let bytes = bundle::write(&options, &Progress::new())?;
            println!("{}: {:.1} MiB", out.display(), bytes as f64 / 1_048_576.0);
            Ok(true)
        }
        Task::Deb { out, dev } => {
            let profile = if dev { Profile::Dev } else { Profile::Release };
            let (options, progress) = (deb::Options { out, profile }, Progress::new());
            let package = deb::write(&options, &progress)?;
            let kube = deb::kube::write(&options, &progress)?;
            let packages = [package, kube];
            for package in packages.iter().chain(&deb::guest::write(&options, &progress)?) {
                let mebibytes = deb::size(package)? as f64 / 1_048_576.0;
                println!("{}: {mebibytes:.1} MiB", package.display());
            }
            Ok(true)
        }
        Task::Simulate { vgpus, policy, gates, out } => {
            let enforcement = if gates { Enforcement::Gates } else { Enforcement::Budgets };
            let _heartbeat = Heartbeat::start(INTERVAL, |since| {
                eprintln!("{}", progress::running("Simulation", since, ""));
            });
            simulate::run(&vgpus, policy, enforcement, &out)
        }
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
