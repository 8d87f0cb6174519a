//! Commands about screens: `view`, `web`, `screenshot`, `focus`.

use std::path::PathBuf;

use clap::Args;
use mdev_core::definition::VgpuRef;

use super::Output;
use super::values::{monitor, rotation_interval};
use super::vgpu::{OptionalVgpuArg, VGPU_ARGS, VgpuArg};

#[derive(Debug, Args)]
#[command(after_help = "\
Prints how to connect, starts an installed viewer (TigerVNC's vncviewer, remote-viewer, gvncviewer)
and serves the screen until the command ends. Only you and root can open the UNIX socket. A TCP
port on loopback is open to every local user; each run has a new password. See docs/console.md.

Examples:
  vgpuctl view web1                                view only
  vgpuctl view web1 --monitor /run/vm/qmp.sock     with keyboard and pointer by the VM's QMP socket
  vgpuctl view web1 --tcp --print                  for any VNC viewer, with a password
  ssh -L 5901:localhost:5901 HOST vgpuctl view web1 --tcp=5901
                                                   from another machine")]
pub struct View {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// QMP socket of the vGPU's VM, which receives keyboard and pointer input. vgpud opens the
    /// socket; as a service, vgpud has a /tmp of its own.
    #[arg(long, value_name = "PATH")]
    pub monitor: Option<PathBuf>,
    /// Serve the screen on this port of 127.0.0.1, or on a free port, with a password.
    #[arg(long, value_name = "PORT", num_args = 0..=1, require_equals = true,
        default_missing_value = "0")]
    pub tcp: Option<u16>,
    /// Print how to connect without starting a viewer.
    #[arg(long)]
    pub print: bool,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
vgpud serves the web console on this host if it was started with --web. The address opens one
session and expires after five minutes. See docs/console.md.

Examples:
  vgpuctl web                                      all vGPUs: shares, memory, events, screens
  vgpuctl web --monitor web1=/run/vm/qmp.sock      a screen with keyboard and pointer
  ssh -L 8006:127.0.0.1:8006 HOST vgpuctl web      from another machine")]
pub struct Web {
    /// QMP socket of a vGPU's VM, which receives keyboard and pointer input; may be repeated.
    #[arg(long, value_name = "VGPU=PATH", value_parser = monitor)]
    pub monitor: Vec<(VgpuRef, PathBuf)>,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Screenshot {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// PNG file to write; - writes the picture to the standard output.
    #[arg(short = 'o', long = "file", value_name = "FILE")]
    pub file: PathBuf,
    /// Output format: nothing as text, or the file and its size as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Display adapters (vfio:ADDRESS) have a physical screen, which shows one vGPU at a time. When the
shown vGPU stops, the next one is shown. Focusing a vGPU ends rotation. Focus and rotation persist
over restarts of vgpud.

Examples:
  vgpuctl focus                                    list screens with the shown vGPUs
  vgpuctl focus web1                               show this vGPU
  vgpuctl focus --rotate 10                        show each vGPU for 10 seconds, for kiosks
  vgpuctl focus --rotate 10 -p 0000:3b:00.0        the same with several screens
  vgpuctl focus --rotate off                       keep showing the current vGPU")]
pub struct Focus {
    #[command(flatten)]
    pub vgpu: OptionalVgpuArg,
    /// Show each vGPU for this many seconds; off ends rotation. vGPUs without a picture are
    /// skipped.
    #[arg(long, value_name = "SECONDS|off", value_parser = rotation_interval,
        conflicts_with_all = VGPU_ARGS)]
    pub rotate: Option<RotationInterval>,
    /// Parent. Required for a change if several parents have a screen.
    #[arg(short, long, conflicts_with_all = VGPU_ARGS)]
    pub parent: Option<String>,
    /// Output format. JSON is also printed for changes.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

/// Seconds that each vGPU is shown; `None` ends rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotationInterval(pub Option<u64>);
