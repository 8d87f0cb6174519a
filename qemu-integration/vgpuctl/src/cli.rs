//! Definition of the command line.
//!
//! * [`definitions`]: mdevctl's commands and flags
//! * [`shares`], [`screens`], [`host`]: commands that mdevctl does not have
//! * [`vm`], [`libvirt`]: commands that attach vGPUs to VMs
//! * [`saving`]: commands that save and restore vGPUs and VMs
//! * [`programs`]: commands that run programs on vGPUs
//! * [`vgpu`]: arguments that several of them have; [`values`]: parsers of option values

pub mod definitions;
pub mod host;
pub mod libvirt;
pub mod programs;
pub mod saving;
pub mod screens;
pub mod shares;
#[cfg(test)]
mod tests;
mod values;
pub mod vgpu;
pub mod vm;

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use serde::Serialize;

use crate::failure::Failure;
use crate::mdevctl::pretty;

pub use self::definitions::{Define, Import, List, Modify, Start, Stop, Types, Undefine};
pub use self::host::{Completions, Doctor, Man, Parents, ParentsTask};
pub use self::programs::Run;
pub use self::saving::{
    Checkpoint, Restore, Resume, Save, Upgrade, Vm, VmArg, VmMigrate, VmReceive, VmRestore, VmSave,
    VmTask, VmUpgrade,
};
pub use self::screens::{Focus, RotationInterval, Screenshot, View, Web};
pub use self::shares::{Scheduler, Stats, Switch, Top};
pub use self::values::MoveAddress;
pub use self::vm::{LibvirtXml, QemuArgs, RunVm};

const EXAMPLES: &str = "\
Examples:
  vgpuctl types                                       list available vGPU types
  vgpuctl define -t SOFT-1Q --name web1 --core 80     define a vGPU; prints its uuid
  vgpuctl start web1                                  start the vGPU, by its name or uuid
  vgpuctl start -p soft0 -t SOFT-1Q                   start a transient vGPU
  vgpuctl run-vm --name vm1 --core 50 disk.qcow2      run a VM with a vGPU of its own
  vgpuctl qemu-args web1                              print QEMU arguments for the vGPU
  vgpuctl run web1 -- PROGRAM                         run a CUDA program on the vGPU
  vgpuctl stats                                       show GPU usage by vGPU
  vgpuctl top                                         show live GPU usage
  vgpuctl scheduler --policy equal-share              change the scheduling policy
  vgpuctl doctor                                      check this host for problems
  vgpuctl vm save web1 --monitor qmp.sock -o web1.vm  save a VM with its vGPU
  vgpuctl view web1                                   show the vGPU's screen live
  vgpuctl web                                         open the web console
  vgpuctl screenshot web1 -o screen.png               save the vGPU's screen
  vgpuctl focus web1                                  show the vGPU on the physical screen

Exit status:
  0  success
  1  failure
  2  invalid command line or value
  3  vgpud cannot be reached
  4  no such vGPU, parent or type
  5  not possible now: the vGPU exists, is running, is not running or is in use, there is no room,
     or a callout script refused
  6  permission denied";

/// Share a physical GPU between virtual machines: define, start, stop and monitor vGPUs.
#[derive(Debug, Parser)]
#[command(name = "vgpuctl", version, after_help = EXAMPLES, max_term_width = 100)]
pub struct Cli {
    /// vgpud's control socket.
    #[arg(long, global = true, value_name = "PATH", default_value = "/run/vgpud/control.sock")]
    pub socket: PathBuf,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the vGPU types of each parent, with the number of vGPUs that can still be started.
    Types(Types),
    /// List running vGPUs, or with --defined all defined vGPUs.
    List(List),
    /// Define a vGPU. The definition survives a reboot. A running vGPU is not affected.
    Define(Define),
    /// Remove a definition. A running vGPU keeps running until it is stopped.
    Undefine(Undefine),
    /// Change a definition, a running vGPU (--live), or both (--live --defined).
    Modify(Modify),
    /// Start a defined or a transient vGPU. The socket is ready when the command returns.
    Start(Start),
    /// Stop a vGPU.
    Stop(Stop),
    /// List this host's possible parents with their drivers, and how to use them.
    Parents(Parents),
    /// Show shares and usage of running vGPUs; -v shows all counters.
    Stats(Stats),
    /// Show or change a parent's scheduler. Changes apply at once and are permanent.
    Scheduler(Scheduler),
    /// Check this host: QEMU, running VMs, GPU, groups and vgpud. Print a fix for each finding.
    Doctor(Doctor),
    /// Print a shell's completion script.
    #[command(hide = true)]
    Completions(Completions),
    /// Write the manual pages into a folder.
    #[command(hide = true)]
    Man(Man),
    /// Show live shares on the terminal: q quits, arrows select.
    Top(Top),
    /// Show a vGPU's screen live, in a VNC viewer.
    View(View),
    /// Print a one-time address that opens the web console in a browser on this host.
    Web(Web),
    /// Save a vGPU's screen as a PNG file.
    Screenshot(Screenshot),
    /// Show a vGPU on the physical screen, rotate the screen between vGPUs, or print the focus.
    Focus(Focus),
    /// Import mdevctl's definitions. Prints the planned changes; --apply makes them.
    Import(Import),
    /// mdevctl's command for udev. Not supported: vgpud starts vGPUs itself.
    #[command(hide = true)]
    StartParentMdevs {
        /// A parent.
        parent: String,
    },
    /// Print the QEMU arguments that attach a VM to a vGPU.
    QemuArgs(QemuArgs),
    /// Print the parts of a libvirt domain that attach the domain to a vGPU.
    LibvirtXml(LibvirtXml),
    /// Run a CUDA program on a vGPU.
    Run(Run),
    /// Run a VM with a vGPU of its own: start the vGPU, boot a disk, stop the vGPU at the end.
    RunVm(RunVm),
    /// Save, restore and upgrade VMs with their vGPUs.
    Vm(Vm),
    /// Have a VM checkpoint its CUDA programs, so that its vGPU can be saved.
    Checkpoint(Checkpoint),
    /// Save a running vGPU's state into a file, for VMMs that save their VMs themselves.
    Save(Save),
    /// Restore a saved vGPU's state into a running vGPU.
    Restore(Restore),
    /// Continue the work of a vGPU that `save`, `restore` or `checkpoint` has stopped.
    Resume(Resume),
    /// Replace workers by those of vgpud's release, under running VMs.
    Upgrade(Upgrade),
    /// Attach vGPUs to libvirt domains. The vGPUs start and stop with their domains.
    Libvirt(libvirt::Libvirt),
}

/// Output format of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Text for people.
    #[default]
    Text,
    /// JSON for programs. The structure does not depend on the number of results.
    Json,
}

impl Output {
    /// Returns the output of a command that prints its result as JSON only.
    pub fn result(self, result: &impl Serialize) -> Result<Vec<u8>, Failure> {
        match self {
            Self::Text => Ok(Vec::new()),
            Self::Json => pretty(result),
        }
    }
}
