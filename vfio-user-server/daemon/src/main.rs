//! `vgpud`: command line of the manager and of the roles that it starts.

use std::io::Write;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use host_inventory::SUPPORT;
use mdev_core::definition::Owner;
use mdev_core::untrusted::message;
use vgpud::backend::ParentConfig;
use vgpud::web_console::request_guard::Address;
use vgpud::{anchor, context_process, gpu_process, manager, run, spawn, worker};
use vgpud_host::command_line;
use vgpud_host::text::with_causes;
use vgpud_host::users::{Account, Users};

mod access_config;

use access_config::{AccessConfig, WorkerUids};

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
    /// SIGTERM and SIGINT stop all vGPUs and end the manager. SIGUSR1 ends the manager alone: VMs
    /// continue, and the next manager with the same --run-dir adopts their vGPUs.
    Run(Box<RunArgs>),
    /// Print the manual page
    #[command(hide = true)]
    Man,
    /// Print the DeviceAllow= lines of the systemd unit
    #[command(hide = true)]
    DeviceAllow,
    /// Serve one vGPU (started by the manager)
    #[command(hide = true)]
    Worker(WorkerArgs),
    #[command(hide = true)]
    Anchor(WorkerArgs),
    /// Own the hardware of one parent (started by the manager)
    #[command(hide = true)]
    GpuProcess(GpuProcessArgs),
    /// Hold the memory and the engine of one vGPU (started by the manager)
    #[command(hide = true)]
    GpuContext(ContextArgs),
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// Directory of sockets; empty after a reboot
    #[arg(long, value_name = "DIR", default_value = "/run/vgpud")]
    run_dir: PathBuf,
    /// Directory of definitions
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vgpud")]
    config_dir: PathBuf,
    /// Directory of callout scripts from packages, in callouts/ and notifiers/; searched before
    /// <config-dir>/scripts.d
    #[arg(long, value_name = "DIR", default_value = "/usr/lib/vgpud/scripts.d")]
    scripts_dir: PathBuf,
    /// A GPU to share: soft:NAME[,vram=SIZE][,contexts=yes|no], nvidia:ADDRESS, nvidia for all of
    /// NVIDIA's, or vfio:ADDRESS[,window=SIZE][,iommufd=yes|no] for a device bound to vfio-pci; may
    /// be given more than once
    #[arg(long = "parent", value_name = "PARENT", default_value = "soft:soft0")]
    parents: Vec<ParentConfig>,
    /// Group whose members may read, besides root [default: vgpu, if it exists]
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// Group whose members may read and change everything, besides root [default: vgpu-admin, if it
    /// exists]
    #[arg(long, value_name = "GROUP")]
    admin_group: Option<String>,
    /// Owner of vGPUs that root starts without naming an owner: the user that VMs run as [default:
    /// libvirt-qemu or qemu, if it exists, or else the user of this process]
    #[arg(long, value_name = "USER[:GROUP]")]
    owner: Option<Owner>,
    /// User of GPU processes, and group of workers, if this is started as root; must not be root
    /// [default: vgpud, if it exists, or else 65534]
    #[arg(long, value_name = "USER[:GROUP]")]
    worker_user: Option<Owner>,
    /// User IDs of workers, one for each running worker, if this is started as root; no user and
    /// no container may have them. `shared` runs all workers as --worker-user, which lets a worker
    /// that a guest has compromised disturb the others [default: 2100000000-2100004095]
    #[arg(long, value_name = "FIRST-LAST|shared")]
    worker_uids: Option<WorkerUids>,
    /// Loopback address of the web console, such as 127.0.0.1:8006; vgpuctl web opens it
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
    #[arg(long = "programs-fd")]
    programs: Option<RawFd>,
    #[arg(long = "gpu-fd")]
    gpu: Option<RawFd>,
    #[arg(long = "journal-fd")]
    journal: Option<RawFd>,
    #[arg(long = "anchor-fd")]
    anchor: Option<RawFd>,
    #[arg(long = "upgrade-fd")]
    upgrade: Option<RawFd>,
}

#[derive(Debug, clap::Args)]
struct GpuProcessArgs {
    #[arg(long)]
    parent: ParentConfig,
    #[arg(long)]
    uid: u32,
    #[arg(long)]
    gid: u32,
    #[arg(long)]
    admin_fd: RawFd,
    #[arg(long)]
    startup_error_fd: RawFd,
}

#[derive(Debug, clap::Args)]
struct ContextArgs {
    #[arg(long)]
    parent: ParentConfig,
    #[arg(long)]
    spec_fd: RawFd,
    #[arg(long)]
    worker_fd: RawFd,
    #[arg(long)]
    arbiters_fd: RawFd,
}

fn main() -> ExitCode {
    let cli = match command_line::parse::<Cli>(std::env::args_os()) {
        Ok(cli) => cli,
        Err(what) => return command_line::refuse("vgpud", &what),
    };
    // Clients of a worker and of a GPU process can cause their messages.
    vgpud::logger::init(matches!(
        cli.role,
        Role::Worker(_) | Role::Anchor(_) | Role::GpuProcess(_) | Role::GpuContext(_)
    ));
    let done = match cli.role {
        Role::Run(args) => run_manager(*args),
        Role::Man => man(),
        Role::DeviceAllow => device_allow(),
        Role::Worker(args) => {
            spawn::name_process("vgpu-worker");
            match worker::run(&args.into()) {
                Ok(end) => return ExitCode::from(end.status()),
                Err(error) => Err(error),
            }
        }
        Role::Anchor(args) => {
            spawn::name_process("vgpu-anchor");
            anchor::run(&args.into())
        }
        Role::GpuProcess(args) => gpu_process(args),
        Role::GpuContext(args) => gpu_context(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vgpud: {}", message(&with_causes(error.as_ref())));
            ExitCode::FAILURE
        }
    }
}

fn run_manager(args: RunArgs) -> anyhow::Result<()> {
    let config = AccessConfig::of(&args, &Users::read())?;
    let RunArgs { run_dir, config_dir, scripts_dir, parents, web, .. } = args;
    let parents = parents.into_iter().map(ParentConfig::expand).collect::<Result<Vec<_>, _>>()?;
    let parents = parents.concat();
    for (index, parent) in parents.iter().enumerate() {
        if parents[..index].iter().any(|other| other.name == parent.name) {
            anyhow::bail!("Parent {} is given twice; give each its own name", parent.name);
        }
    }
    let AccessConfig { worker_user, worker_uids, owner, access } = config;
    let manager = manager::Config { config_dir, parents, worker_user, worker_uids, owner };
    run::run(&run::Config { run_dir, scripts_dir, manager, access, web })
}

/// Writes the manual page in troff.
fn man() -> anyhow::Result<()> {
    let all = Cli::command();
    let run = all.find_subcommand("run").unwrap_or(&all).clone();
    let page = clap_mangen::Man::new(run.name("vgpud").bin_name("vgpud run")).section("8");
    page.render(&mut std::io::stdout().lock()).context("Cannot write the manual page")
}

/// Prints a line for each device node of the backends.
fn device_allow() -> anyhow::Result<()> {
    let lines = SUPPORT.device_nodes().map(|node| format!("DeviceAllow={}\n", node.device_allow));
    let text: String = lines.collect();
    std::io::stdout().write_all(text.as_bytes()).context("Cannot write the device nodes")
}

impl From<WorkerArgs> for worker::WorkerArgs {
    fn from(args: WorkerArgs) -> Self {
        let WorkerArgs { spec, listen, control, programs, gpu, journal, anchor, upgrade } = args;
        Self {
            spec_fd: spec,
            listen_fd: listen,
            control_fd: control,
            programs_fd: programs,
            gpu_fd: gpu,
            journal_fd: journal,
            anchor_fd: anchor,
            upgrade_fd: upgrade,
        }
    }
}

fn gpu_process(args: GpuProcessArgs) -> anyhow::Result<()> {
    let GpuProcessArgs { parent, uid, gid, admin_fd, startup_error_fd } = args;
    spawn::name_process(&format!("gpu-{}", parent.name));
    let admin = spawn::inherited(admin_fd).and_then(spawn::listening).context("Bad --admin-fd")?;
    let startup_error = spawn::inherited(startup_error_fd).context("Bad --startup-error-fd")?;
    let user = Account { uid, gid };
    gpu_process::run(gpu_process::GpuProcessArgs { parent, user, admin, startup_error })
}

fn gpu_context(args: ContextArgs) -> anyhow::Result<()> {
    let ContextArgs { parent, spec_fd, worker_fd, arbiters_fd } = args;
    spawn::name_process("gpu-context");
    let spec = spawn::inherited(spec_fd).context("Bad --spec-fd")?;
    let worker = spawn::inherited(worker_fd).context("Bad --worker-fd")?;
    let arbiters =
        spawn::inherited(arbiters_fd).and_then(spawn::listening).context("Bad --arbiters-fd")?;
    context_process::run(context_process::ContextArgs { parent, spec, worker, arbiters })
}
