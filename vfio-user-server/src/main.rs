//! `vgpud`: the manager, and the roles that it starts.

use std::os::fd::{OwnedFd, RawFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use mdev_core::definition::Owner;
use vendor_backends::seqpacket::SeqPacketListener;
use vendor_backends::soft;
use vendor_backends::vfio;
use vendor_backends::vfio::host::Address as PciAddress;
use vfio_user_server::console::web::access::Address;
use vfio_user_server::manager::{self, ParentConfig};
use vfio_user_server::users::{Account, Users};
use vfio_user_server::{owner, spawn, usage, worker};

mod who;

use who::Who;

/// How long a software GPU without a manager and without a vGPU waits for the next manager.
const ORPHAN_GRACE: Duration = Duration::from_secs(30);

/// Shares physical GPUs between virtual machines.
#[derive(Debug, Parser)]
#[command(name = "vgpud", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Run the manager: vGPUs, their shares, and the control API
    ///
    /// SIGTERM and SIGINT end everything in an orderly way. SIGUSR1 ends the manager alone: VMs go on, and the next
    /// manager with the same --run-dir adopts them.
    Run(Box<RunArgs>),
    /// Print the manual page
    #[command(hide = true)]
    Man,
    /// Serve one vGPU (started by the manager)
    #[command(hide = true)]
    Worker(WorkerArgs),
    /// Be a software GPU (started by the manager)
    #[command(hide = true)]
    SoftGpu(SoftGpuArgs),
    /// Own a physical device (started by the manager)
    #[command(hide = true)]
    Owner(OwnerArgs),
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// Where sockets are made; empty after a reboot
    #[arg(long, value_name = "DIR", default_value = "/run/vgpud")]
    run_dir: PathBuf,
    /// Where definitions are kept
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vgpud")]
    config_dir: PathBuf,
    /// Where packages put callout scripts, in callouts/ and notifiers/; looked into before <config-dir>/scripts.d
    #[arg(long, value_name = "DIR", default_value = "/usr/lib/vgpud/scripts.d")]
    scripts_dir: PathBuf,
    /// A GPU to share: soft:NAME[,vram=SIZE], nvidia:ADDRESS, nvidia for all of NVIDIA's, or
    /// vfio:ADDRESS[,window=SIZE][,iommufd=yes|no] for a device that vfio-pci has; may be given again
    #[arg(long = "parent", value_name = "PARENT", default_value = "soft:soft0")]
    parents: Vec<ParentConfig>,
    /// Who may look at vGPUs, besides root: members of this group [default: vgpu, where there is one]
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// Who may change them, besides root: members of this group, who are in the first as well [default: vgpu-admin,
    /// where there is one]
    #[arg(long, value_name = "GROUP")]
    admin_group: Option<String>,
    /// Whom a vGPU's socket belongs to, unless its attribute `owner` says otherwise: the user that VMs run as
    /// [default: libvirt-qemu or qemu, where there is one, or else whom this runs as]
    #[arg(long, value_name = "USER[:GROUP]")]
    owner: Option<Owner>,
    /// Whom workers and software GPUs run as, if this is started as root: never root [default: vgpud, where there is
    /// one, or else 65534]
    #[arg(long, value_name = "USER[:GROUP]")]
    worker_user: Option<Owner>,
    /// Serve the web console here: an address of this host alone, such as 127.0.0.1:8006; vgpuctl web opens it
    #[arg(long, value_name = "ADDRESS:PORT")]
    web: Option<Address>,
}

#[derive(Debug, clap::Args)]
struct WorkerArgs {
    #[arg(long = "spec-fd")]
    spec: RawFd,
    #[arg(long = "listen-fd")]
    listen: RawFd,
    #[arg(long = "control-fd")]
    control: RawFd,
    #[arg(long = "gpu-fd")]
    gpu: Option<RawFd>,
}

#[derive(Debug, clap::Args)]
struct SoftGpuArgs {
    #[arg(long)]
    name: String,
    #[arg(long)]
    vram: u64,
    #[arg(long)]
    admin_fd: RawFd,
}

#[derive(Debug, clap::Args)]
struct OwnerArgs {
    #[arg(long)]
    name: String,
    #[arg(long)]
    address: PciAddress,
    #[arg(long)]
    uid: u32,
    #[arg(long)]
    gid: u32,
    #[arg(long)]
    admin_fd: RawFd,
    #[arg(long)]
    words_fd: RawFd,
    #[arg(long)]
    window: Option<u64>,
    #[arg(long)]
    iommufd: Option<bool>,
}

fn main() -> ExitCode {
    let cli = match usage::parse::<Cli>(std::env::args_os()) {
        Ok(cli) => cli,
        Err(what) => return usage::refuse("vgpud", &what),
    };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    let done = match cli.role {
        Role::Run(args) => run(*args),
        Role::Man => man(),
        Role::Worker(args) => worker(&args),
        Role::SoftGpu(args) => soft_gpu(args),
        Role::Owner(args) => own(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vgpud: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: RunArgs) -> anyhow::Result<()> {
    let who = Who::of(&args, &Users::read())?;
    let RunArgs { run_dir, config_dir, scripts_dir, parents, web, .. } = args;
    let parents = parents.into_iter().map(ParentConfig::expand).collect::<Result<Vec<_>, _>>()?;
    let parents = parents.concat();
    for (index, parent) in parents.iter().enumerate() {
        if parents[..index].iter().any(|other| other.name == parent.name) {
            anyhow::bail!("Parent {} is given twice; give each its own name", parent.name);
        }
    }
    let Who { worker_user, owner, access } = who;
    manager::run(&manager::Config {
        run_dir,
        config_dir,
        scripts_dir,
        parents,
        worker_user,
        owner,
        access,
        web,
    })
}

/// The manual page, in troff.
fn man() -> anyhow::Result<()> {
    let all = Cli::command();
    let run = all.find_subcommand("run").unwrap_or(&all).clone();
    let page = clap_mangen::Man::new(run.name("vgpud").bin_name("vgpud run")).section("8");
    page.render(&mut std::io::stdout().lock()).context("Cannot write the manual page")
}

fn worker(args: &WorkerArgs) -> anyhow::Result<()> {
    spawn::name_process("vgpu-worker");
    worker::run(&worker::WorkerArgs {
        spec_fd: args.spec,
        listen_fd: args.listen,
        control_fd: args.control,
        gpu_fd: args.gpu,
    })
}

fn soft_gpu(args: SoftGpuArgs) -> anyhow::Result<()> {
    let SoftGpuArgs { name, vram, admin_fd } = args;
    spawn::name_process(&format!("gpu-{name}"));
    worker::sandbox::enter();
    let admin = listener(admin_fd)?;
    let config = soft::Config { name, vram_bytes: vram, grace: ORPHAN_GRACE };
    soft::run(&config, &SeqPacketListener::from(admin)).context("Software GPU")
}

/// Where the manager connects to a role.
fn listener(admin: RawFd) -> anyhow::Result<OwnedFd> {
    spawn::inherited(admin).and_then(spawn::listening).context("Bad --admin-fd")
}

fn own(args: OwnerArgs) -> anyhow::Result<()> {
    let OwnerArgs { name, address, uid, gid, admin_fd, words_fd, window, iommufd } = args;
    spawn::name_process(&format!("gpu-{name}"));
    owner::run(owner::OwnerArgs {
        name,
        address,
        options: vfio::Options { window_bytes: window, iommufd },
        user: Account { uid, gid },
        admin: listener(admin_fd)?,
        words: spawn::inherited(words_fd).context("Bad --words-fd")?,
        grace: ORPHAN_GRACE,
    })
}
