//! The command line: mdevctl's verbs and flags, and our own.
//!
//! * [`definitions`]: what mdevctl has
//! * [`shares`], [`screens`], [`host`]: what it has not
//! * [`vm`], [`libvirt`]: what stands between a vGPU and a VM
//! * [`values`]: what is parsed

pub mod definitions;
pub mod host;
pub mod libvirt;
pub mod screens;
pub mod shares;
#[cfg(test)]
mod tests;
mod values;
pub mod vm;

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

pub use self::definitions::{Define, Import, List, Modify, Start, Stop, Types, Undefine};
pub use self::host::{Completions, Doctor, Man, Parents, ParentsTask};
pub use self::screens::{Focus, Screenshot, Turns, View, Web};
pub use self::shares::{Scheduler, Stats, Switch, Top};
pub use self::vm::{LibvirtXml, QemuArgs};

const EXAMPLES: &str = "\
Examples:
  vgpuctl types                                       what there is
  vgpuctl define -p soft0 -t SOFT-1Q --attr core=80   define one; prints its uuid
  vgpuctl start -u UUID                               start it
  vgpuctl start -p soft0 -t SOFT-1Q                   one that is gone when stopped
  vgpuctl qemu-args -u UUID                           how a VM attaches to it
  vgpuctl stats                                       who uses how much
  vgpuctl top                                         the same, as it happens
  vgpuctl scheduler --policy equal-share              how a GPU's time is divided
  vgpuctl doctor                                      what on this host is in the way
  vgpuctl view UUID                                   its screen, live
  vgpuctl web                                         all of it in a browser
  vgpuctl screenshot -u UUID -o screen.png            a picture of its screen
  vgpuctl focus UUID                                  its screen on the GPU's own

Exit status:
  0  done
  1  failed
  2  the command line, or a value in it, is wrong
  3  vgpud cannot be reached
  4  there is no such vGPU, parent or type
  5  not possible now: it exists, runs, does not run, is in use, there is no room, or a callout
     script says no
  6  not for this user";

/// Share a physical GPU between virtual machines: define, start, stop and watch vGPUs.
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
    /// List the vGPU types that each parent offers, and how many more of each can be started.
    Types(Types),
    /// List vGPUs: those that run, or with --defined those that are defined.
    List(List),
    /// Define a vGPU: it survives a reboot. A running one is not affected.
    Define(Define),
    /// Remove a definition. A running vGPU goes on until it is stopped.
    Undefine(Undefine),
    /// Change a definition, a running vGPU (--live), or both (--live --defined).
    Modify(Modify),
    /// Start a vGPU that is defined, or a transient one. Its socket is ready when this returns.
    Start(Start),
    /// Stop a vGPU.
    Stop(Stop),
    /// List this host's devices that could be a parent, who drives them, and what to do about it.
    Parents(Parents),
    /// Show what every running vGPU was given and used: -v shows every counter.
    Stats(Stats),
    /// Show or change how a parent's time is divided: at once, while VMs run, and for good.
    Scheduler(Scheduler),
    /// Check this host: QEMU, the VMs that run, GPU, groups and vgpud, with a fix for each finding.
    Doctor(Doctor),
    /// Print what completes command lines in a shell.
    #[command(hide = true)]
    Completions(Completions),
    /// Write the manual pages into a folder.
    #[command(hide = true)]
    Man(Man),
    /// Watch shares as they are used, on the terminal: q leaves, arrows choose.
    Top(Top),
    /// Show a vGPU's screen live, in a VNC viewer.
    View(View),
    /// Let a browser on this host into the web console: prints an address, good for once.
    Web(Web),
    /// Save what is on a vGPU's screen as a PNG file.
    Screenshot(Screenshot),
    /// Put a vGPU's screen on the physical one, let vGPUs take turns there, or say who is there.
    Focus(Focus),
    /// Take over definitions from a tree of mdevctl's: says what would be done, and does it with --apply.
    Import(Import),
    /// mdevctl's, for udev. vgpud starts vGPUs by itself.
    #[command(hide = true)]
    StartParentMdevs {
        /// A parent.
        parent: String,
    },
    /// Print the QEMU arguments that attach a VM to a vGPU.
    QemuArgs(QemuArgs),
    /// Print the parts of a libvirt domain that attach it to a vGPU.
    LibvirtXml(LibvirtXml),
    /// Give libvirt domains vGPUs, which start and stop with them.
    Libvirt(libvirt::Libvirt),
}

/// How a reading command answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    #[default]
    Text,
    /// For programs: a shape that does not change with the number of results.
    Json,
}
