//! Screens: `view`, `web`, `screenshot`, `focus`.

use std::path::PathBuf;

use clap::Args;
use mdev_core::ids::VgpuId;

use super::Output;
use super::values::{monitor, turns};

/// A vGPU, by its place or, as mdevctl's commands take it, by a flag.
#[derive(Debug, Args)]
pub struct Which {
    /// The vGPU.
    #[arg(value_name = "UUID")]
    positional: Option<VgpuId>,
    /// The vGPU.
    #[arg(
        id = "flagged",
        short = 'u',
        long = "uuid",
        value_name = "UUID",
        conflicts_with = "positional"
    )]
    flagged: Option<VgpuId>,
}

/// Both ways.
const WHICH: [&str; 2] = ["positional", "flagged"];

impl Which {
    /// The one that is named, if one is.
    pub fn id(&self) -> Option<VgpuId> {
        self.positional.or(self.flagged)
    }
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
    #[command(flatten)]
    pub which: Which,
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
    #[command(flatten)]
    pub which: Which,
    /// Show the vGPUs in turn, each for so many seconds; off ends that. Those without a picture are
    /// passed over.
    #[arg(long, value_name = "SECONDS|off", value_parser = turns,
        conflicts_with_all = WHICH)]
    pub rotate: Option<Turns>,
    /// The parent. Needed for a change where several have a screen.
    #[arg(short, long, conflicts_with_all = WHICH)]
    pub parent: Option<String>,
    /// Format of the answer: with --output json, what was changed is printed too.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

/// How long each is shown, or that there are no turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turns(pub Option<u64>);
