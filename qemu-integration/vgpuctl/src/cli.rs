//! The command line: mdevctl's verbs and flags, and our own.

pub mod libvirt;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use mdev_core::definition::{ATTRIBUTES, Attribute, Owner};
use mdev_core::ids::VgpuId;
use vendor_backends::vfio::host::Address;

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

#[derive(Debug, Args)]
pub struct Types {
    /// Only this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Print mdevctl's JSON.
    #[arg(long, conflicts_with = "output")]
    pub dumpjson: bool,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  vgpuctl parents                        displays and accelerators of this host
  vgpuctl parents bind 0000:3b:00.0      take one from its driver, for vfio-pci
  vgpuctl parents unbind 0000:3b:00.0    and give it back"
)]
pub struct Parents {
    /// What to do with one of them.
    #[command(subcommand)]
    pub task: Option<ParentsTask>,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Subcommand)]
pub enum ParentsTask {
    /// Take a device from its driver and give it to vfio-pci, until the next boot. Needs root.
    Bind {
        /// Its PCI address, for example 0000:3b:00.0.
        address: Address,
        /// Format of the answer.
        #[arg(long, value_enum, default_value_t)]
        output: Output,
    },
    /// Take a device from vfio-pci and give it back to its driver. Needs root.
    Unbind {
        /// Its PCI address.
        address: Address,
        /// Format of the answer.
        #[arg(long, value_enum, default_value_t)]
        output: Output,
    },
}

#[derive(Debug, Args)]
pub struct List {
    /// List defined vGPUs, whether they run or not.
    #[arg(short, long)]
    pub defined: bool,
    /// Print attributes, state, socket and VM too.
    #[arg(short, long)]
    pub verbose: bool,
    /// Print mdevctl's JSON. With --uuid, that is the vGPU's definition file.
    #[arg(long, conflicts_with = "output")]
    pub dumpjson: bool,
    /// Only this vGPU.
    #[arg(short, long)]
    pub uuid: Option<VgpuId>,
    /// Only those on this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true)
    .args(["uuid", "mdev_type", "jsonfile"]))]
#[command(after_help = with_attributes("\
Examples:
  vgpuctl define -p soft0 -t SOFT-1Q               prints the new vGPU's uuid
  vgpuctl define -u UUID -t SOFT-2C --auto         on any parent; started with vgpud
  vgpuctl define -u UUID                           keeps a running transient vGPU as it is
  vgpuctl define -p soft0 --jsonfile vgpu.json     from a file in mdevctl's format"))]
pub struct Define {
    /// Its uuid. Without it, a random one is made and printed.
    #[arg(short, long)]
    pub uuid: Option<VgpuId>,
    /// Start it whenever vgpud starts.
    #[arg(short, long)]
    pub auto: bool,
    /// Its parent. Without it, the first that offers the type and has room.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Its type.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "TYPE")]
    pub mdev_type: Option<String>,
    /// An attribute, for example core=80; may be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = attribute)]
    pub attr: Vec<(String, String)>,
    /// Type, start policy and attributes, in mdevctl's JSON; - reads the standard input.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["mdev_type", "auto", "attr"])]
    pub jsonfile: Option<PathBuf>,
    /// Do it even though a callout script says no.
    #[arg(short, long)]
    pub force: bool,
    /// Format of the answer: nothing or a new uuid, or all about the vGPU.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Undefine {
    /// Its uuid.
    #[arg(short, long)]
    pub uuid: VgpuId,
    /// Only if it is defined for this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Do it even though a callout script says no.
    #[arg(short, long)]
    pub force: bool,
    /// Format of the answer: nothing, or what was done.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true)
    .args(["mdev_type", "addattr", "delattr", "attr", "auto", "manual", "jsonfile"]))]
#[command(after_help = with_attributes("\
Examples:
  vgpuctl modify -u UUID --attr core=60            sets an attribute, whether it was there or not
  vgpuctl modify -u UUID --attr core=60 --live     at once, until the vGPU is stopped
  vgpuctl modify -u UUID --addattr core --value 60 mdevctl's way: appends to the list
  vgpuctl modify -u UUID --delattr --index 0       removes the first attribute
  vgpuctl modify -u UUID --auto                    started with vgpud from now on"))]
pub struct Modify {
    /// Its uuid.
    #[arg(short, long)]
    pub uuid: VgpuId,
    /// Only if it is on this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Another type.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "TYPE")]
    pub mdev_type: Option<String>,
    /// Add an attribute, at the end or at --index.
    #[arg(long, requires = "value", value_name = "NAME", conflicts_with_all = ["delattr", "attr"])]
    pub addattr: Option<String>,
    /// Remove an attribute, the last or that at --index.
    #[arg(long, conflicts_with = "attr")]
    pub delattr: bool,
    /// Which attribute, counted from 0.
    #[arg(short, long)]
    pub index: Option<usize>,
    /// Value of the attribute that --addattr names.
    #[arg(long, requires = "addattr", conflicts_with = "delattr")]
    pub value: Option<String>,
    /// Set an attribute, in its place where it is there already; may be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = attribute)]
    pub attr: Vec<(String, String)>,
    /// Start it whenever vgpud starts.
    #[arg(short, long, conflicts_with = "manual")]
    pub auto: bool,
    /// Start it on request only.
    #[arg(short, long)]
    pub manual: bool,
    /// Change the running vGPU, at once and until it is stopped.
    #[arg(short, long)]
    pub live: bool,
    /// Change the definition: the default without --live.
    #[arg(short, long)]
    pub defined: bool,
    /// Start policy and all attributes, in mdevctl's JSON; - reads the standard input.
    #[arg(long, value_name = "FILE",
        conflicts_with_all = ["mdev_type", "addattr", "delattr", "attr", "auto", "manual"])]
    pub jsonfile: Option<PathBuf>,
    /// Do it even though a callout script says no.
    #[arg(short, long)]
    pub force: bool,
    /// Format of the answer: nothing, or all about the vGPU as it is now.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true)
    .args(["uuid", "mdev_type", "jsonfile"]))]
#[command(after_help = with_attributes("\
Examples:
  vgpuctl start -u UUID                            one that is defined
  vgpuctl start -u UUID --owner libvirt-qemu       for a VM that libvirt runs
  vgpuctl start -p soft0 -t SOFT-1Q --attr core=20 a transient one; prints its uuid"))]
pub struct Start {
    /// Its uuid. Without it, a random one is made and printed.
    #[arg(short, long)]
    pub uuid: Option<VgpuId>,
    /// Its parent. Without it, where it is defined, or the first that offers the type and has room.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Its type, for one that is not defined.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "TYPE")]
    pub mdev_type: Option<String>,
    /// An attribute, for one that is not defined; may be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = attribute)]
    pub attr: Vec<(String, String)>,
    /// Whom its socket belongs to, this time: the user that its VM runs as, by name or number.
    #[arg(long, value_name = "USER[:GROUP]")]
    pub owner: Option<Owner>,
    /// Type and attributes in mdevctl's JSON, whatever its definition says; - reads the standard input.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["mdev_type", "attr"])]
    pub jsonfile: Option<PathBuf>,
    /// Do it even though a callout script says no.
    #[arg(short, long)]
    pub force: bool,
    /// Format of the answer: nothing or a new uuid, or all about the vGPU.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vgpuctl import                                   what /etc/mdevctl.d holds, and what could be had
  vgpuctl import --parent 0000:3b:00.0=soft0 --type nvidia-63=SOFT-1Q
  vgpuctl import /backup/mdevctl.d --type i915-GVTg_V5_4=SOFT-1Q --drop-attrs --apply

A vGPU that is there already is never changed. Attributes that Tessera does not have keep a
definition from being taken over, unless --drop-attrs leaves them out.")]
pub struct Import {
    /// The tree: DIR/PARENT/UUID.
    #[arg(default_value = "/etc/mdevctl.d")]
    pub dir: PathBuf,
    /// A parent of the tree, and the one here that takes its place; may be repeated.
    #[arg(short, long, value_name = "OLD=NEW", value_parser = mapping)]
    pub parent: Vec<(String, String)>,
    /// A type of the tree, and the one here that takes its place; may be repeated.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "OLD=NEW",
        value_parser = mapping)]
    pub mdev_type: Vec<(String, String)>,
    /// Leave out attributes that Tessera does not have.
    #[arg(long)]
    pub drop_attrs: bool,
    /// Define them, instead of only saying what would be done.
    #[arg(long)]
    pub apply: bool,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Stop {
    /// Its uuid.
    #[arg(short, long)]
    pub uuid: VgpuId,
    /// Stop it even though a VM uses it (the VM sees a device that fell off its bus), or a callout
    /// script says no.
    #[arg(short, long)]
    pub force: bool,
    /// Format of the answer: nothing, or what was done.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Columns:
  ASKED      core: hundredths of the GPU that it gets at least, while others contend
  DUE        what it gets while all others are busy
  SHARE      what it got of the last second or so, in parts of the GPU
  OF BUSY    the same in parts of what all together used
  ENGINE     time that it had the engine, since it was started
  WAITED     time that it had work and not the engine
  HELD       of that, time held back by its cap (mode=hard, equal-share, fixed-share)
  HANGS      channels that were reset because they hung: see hang_timeout, acquire_timeout

Examples:
  vgpuctl stats                                    who uses how much
  vgpuctl stats -v                                 every counter and limit, in words
  vgpuctl stats -u UUID                            the same of one vGPU
  vgpuctl stats --output json | jq .vgpus          for programs; Prometheus reads /metrics")]
pub struct Stats {
    /// Only this vGPU, and all about it.
    #[arg(short, long)]
    pub uuid: Option<VgpuId>,
    /// Only those on this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Print every counter and limit.
    #[arg(short, long)]
    pub verbose: bool,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Policies:
  best-effort   equal slices among those that have work
  equal-share   each started vGPU gets 1/n, whether or not the others are busy
  fixed-share   each gets 1/(most instances of its type), always
  weighted      each asks for core hundredths: mode=soft at least that, mode=hard never more

Examples:
  vgpuctl scheduler                                how each parent's time is divided
  vgpuctl scheduler -p soft0 --policy equal-share  from now on
  vgpuctl scheduler --timeslice 1                  slices of 1 ms on average
  vgpuctl scheduler --frequency 480 --averaging-factor 33
                                                   NVIDIA's knobs: slices a second, and over how
                                                   many of them a deviation is made good
  vgpuctl scheduler --log                          the last decisions, and why")]
pub struct Scheduler {
    /// The parent. Needed for a change where there are several.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// How time is divided.
    #[arg(long, value_parser = ["best-effort", "equal-share", "fixed-share", "weighted"])]
    pub policy: Option<String>,
    /// Mean time slice in milliseconds: 0.1 to 30. Switches averaging off.
    #[arg(long, value_name = "MS", value_parser = milliseconds,
        conflicts_with_all = ["averaging_factor", "frequency"])]
    pub timeslice: Option<u64>,
    /// Over how long caps (mode=hard, equal-share, fixed-share) are kept, in milliseconds: 1 to 30.
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub period: Option<u64>,
    /// Slices over which a deviation is made good: 1 to 60. Switches averaging on.
    #[arg(long, value_name = "SLICES")]
    pub averaging_factor: Option<u8>,
    /// Slices in a second, on average: 63 to 960. Switches averaging on.
    #[arg(long, value_name = "HERTZ")]
    pub frequency: Option<u16>,
    /// Whether more than the whole GPU may be asked for: each then gets its part of what is asked for.
    #[arg(long, value_enum)]
    pub overcommit: Option<Switch>,
    /// Print the last decisions.
    #[arg(long, conflicts_with_all = ["policy", "timeslice", "period", "averaging_factor",
        "frequency", "overcommit"])]
    pub log: bool,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Findings are ok, warnings (works, or will not for some) and problems (does not work). Nothing is
changed. Root sees most. Exit status 1 where there is a problem, 0 where there is none.

Examples:
  vgpuctl doctor                                   before the first VM, and when one fails
  vgpuctl doctor --output json                     for programs: check, level, what, fix")]
pub struct Doctor {
    /// The folder that the host's /etc, /proc, /dev, /sys, /run and /usr are in.
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    pub root: PathBuf,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Completions {
    /// The shell.
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub struct Man {
    /// Where they are written.
    pub folder: PathBuf,
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Yes.
    On,
    /// No.
    Off,
}

#[derive(Debug, Args)]
#[command(after_help = "\
A bar shows what a vGPU got of the last second; its mark, what it asked for. Yellow is less than
that: it had no work, or the GPU is held by others. Below is all about the vGPU that is chosen.

Keys:
  up, down     choose a vGPU               left, right  choose a parent
  q            leave")]
pub struct Top {
    /// Only this parent, at first.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Milliseconds from one look to the next.
    #[arg(long, value_name = "MS", default_value_t = 1000,
        value_parser = clap::value_parser!(u64).range(100..=60_000))]
    pub interval: u64,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Prints how to connect, starts a viewer if one is installed (TigerVNC's vncviewer, remote-viewer,
gvncviewer), and serves the screen until it is ended. Only you and root can open the socket; on
loopback, where every user can connect, each run has a password of its own. docs/console.md has more.

Examples:
  vgpuctl view UUID                                watch it
  vgpuctl view UUID --monitor /run/vm/qmp.sock     with keyboard and pointer: a QMP socket of the VM
  vgpuctl view UUID --tcp --print                  for a viewer of your own, with a password
  ssh -L 5901:localhost:5901 HOST vgpuctl view UUID --tcp=5901
                                                   from another machine")]
pub struct View {
    /// Its uuid.
    #[arg(value_name = "UUID")]
    pub positional: Option<VgpuId>,
    /// Its uuid.
    #[arg(
        id = "flagged",
        short = 'u',
        long = "uuid",
        value_name = "UUID",
        conflicts_with = "positional"
    )]
    pub flagged: Option<VgpuId>,
    /// A QMP socket of the VM that the vGPU is attached to: keyboard and pointer go there.
    #[arg(long, value_name = "PATH")]
    pub monitor: Option<PathBuf>,
    /// Serve it on this port of 127.0.0.1, or on one that is free, with a password.
    #[arg(long, value_name = "PORT", num_args = 0..=1, require_equals = true,
        default_missing_value = "0")]
    pub tcp: Option<u16>,
    /// Only print how to connect; start no viewer.
    #[arg(long)]
    pub print: bool,
    /// Format of what is printed.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
vgpud serves the console if it is started with --web, on this host alone. The address opens one
session, once, within five minutes. docs/console.md says what the page shows, and to whom.

Examples:
  vgpuctl web                                      all vGPUs: shares, memory, events, screens
  vgpuctl web --monitor UUID=/run/vm/qmp.sock      that VM's screen with keyboard and pointer
  ssh -L 8006:127.0.0.1:8006 HOST vgpuctl web      from another machine")]
pub struct Web {
    /// A QMP socket of the VM that a vGPU is attached to: its keyboard and pointer; may be repeated.
    #[arg(long, value_name = "UUID=PATH", value_parser = monitor)]
    pub monitor: Vec<(VgpuId, PathBuf)>,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Screenshot {
    /// Its uuid.
    #[arg(short, long)]
    pub uuid: VgpuId,
    /// The PNG file to write; - writes the standard output, and nothing else there.
    #[arg(short = 'o', long = "file", value_name = "FILE")]
    pub file: PathBuf,
    /// Format of the answer: nothing, or what was written and where.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
For parents with a physical screen: display adapters (vfio:ADDRESS). One vGPU at a time is on it;
if that one stops, the next takes its place. A vGPU that is put there stays, and turns end; both
last until they are changed, also over restarts of vgpud.

Examples:
  vgpuctl focus                                    who is on which screen
  vgpuctl focus UUID                               this one, from now on
  vgpuctl focus --rotate 10                        each in turn, for 10 seconds: for kiosks
  vgpuctl focus --rotate 10 -p 0000:3b:00.0        the same where there are several screens
  vgpuctl focus --rotate off                       whoever is there stays")]
pub struct Focus {
    /// The vGPU that is to be seen.
    #[arg(value_name = "UUID", conflicts_with_all = ["rotate", "parent"])]
    pub positional: Option<VgpuId>,
    /// The vGPU that is to be seen.
    #[arg(
        id = "flagged",
        short = 'u',
        long = "uuid",
        value_name = "UUID",
        conflicts_with_all = ["positional", "rotate", "parent"]
    )]
    pub flagged: Option<VgpuId>,
    /// Show the vGPUs in turn, each for so many seconds; off ends that. Those without a picture are
    /// passed over.
    #[arg(long, value_name = "SECONDS|off", value_parser = turns)]
    pub rotate: Option<Turns>,
    /// The parent. Needed for a change where several have a screen.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Format of the answer: with --output json, what was changed is printed too.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

/// How long each is shown, or that there are no turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turns(pub Option<u64>);

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vgpuctl qemu-args -u UUID                        machine, shared memory and device
  vgpuctl qemu-args -u UUID --device               the value of -device alone
  vgpuctl qemu-args -u UUID -- qemu-system-x86_64 -m 2G -M q35 disk.img
                                                   a command line that exists, with the vGPU")]
pub struct QemuArgs {
    /// Its uuid.
    #[arg(short, long)]
    pub uuid: VgpuId,
    /// The VM's memory.
    #[arg(long, default_value = "2G", conflicts_with_all = ["device", "command"])]
    pub memory: String,
    /// The VM's machine.
    #[arg(long, default_value = "q35,accel=kvm:tcg", conflicts_with_all = ["device", "command"])]
    pub machine: String,
    /// A name for the device, by which it can be unplugged.
    #[arg(long)]
    pub id: Option<String>,
    /// Print the value of -device alone.
    #[arg(long, conflicts_with = "command")]
    pub device: bool,
    /// Format of the answer: lines for a shell, or a list of arguments.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
    /// QEMU's command line as it is now; printed with the vGPU attached and its memory shared.
    #[arg(last = true)]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
pub struct LibvirtXml {
    /// Its uuid.
    #[arg(short, long)]
    pub uuid: VgpuId,
    /// The bus of the VM that it is on.
    #[arg(long, default_value = integrate::device::DEFAULT_ADDRESS.0)]
    pub bus: String,
    /// The slot on that bus.
    #[arg(long, default_value = integrate::device::DEFAULT_ADDRESS.1)]
    pub addr: String,
    /// Format of the answer: the XML, or what it is made of.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

/// Help that ends with the attributes that there are.
fn with_attributes(help: &str) -> String {
    let mut text = format!("{help}\n\nAttributes (those with * can change while the vGPU runs):\n");
    for Attribute { name, values, default, about, live, .. } in ATTRIBUTES {
        let star = if *live { "*" } else { " " };
        // A String takes whatever is written to it.
        let _ = writeln!(text, "  {name:<15} {star} {values}; default: {default}\n      {about}");
    }
    text.truncate(text.trim_end().len());
    text
}

/// Milliseconds, in microseconds.
fn milliseconds(text: &str) -> Result<u64, String> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    match text.parse::<f64>() {
        // What is out of bounds is for vgpud to say; here it only has to be a number.
        #[allow(clippy::cast_sign_loss)]
        Ok(ms) if plain && ms.is_finite() => Ok((ms * 1e3).round() as u64),
        _ => Err("give milliseconds, for example 0.5 or 2".to_owned()),
    }
}

fn turns(text: &str) -> Result<Turns, String> {
    match text {
        "off" => Ok(Turns(None)),
        // What is out of bounds is for vgpud to say.
        _ => text
            .parse()
            .map(|seconds| Turns(Some(seconds)))
            .map_err(|_| "give whole seconds, for example 10, or off".to_owned()),
    }
}

fn monitor(text: &str) -> Result<(VgpuId, PathBuf), String> {
    let pair = text.split_once('=').and_then(|(uuid, path)| Some((uuid.parse().ok()?, path)));
    match pair {
        Some((uuid, path)) if !path.is_empty() => Ok((uuid, path.into())),
        _ => Err("a monitor is UUID=PATH: a vGPU, and a QMP socket of its VM".to_owned()),
    }
}

fn attribute(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("an attribute is NAME=VALUE, for example core=80".to_owned()),
    }
}

fn mapping(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((old, new)) if !old.is_empty() && !new.is_empty() => Ok((old.into(), new.into())),
        _ => Err("give what it is there and what it is here, as OLD=NEW".to_owned()),
    }
}
