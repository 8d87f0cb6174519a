//! This host: `parents`, `doctor`, and what packages are made of.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use vendor_backends::vfio::host::Address;

use super::Output;

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
    /// Take a device from its driver and give it to vfio-pci. Needs root.
    ///
    /// Where systemd runs vgpud, this is done again after each boot, and vgpud's service may use the device.
    Bind {
        /// Its PCI address, for example 0000:3b:00.0.
        address: Address,
        /// Not after the next boot. Elsewhere than under systemd it is always so.
        #[arg(long)]
        until_reboot: bool,
        /// Format of the answer.
        #[arg(long, value_enum, default_value_t)]
        output: Output,
    },
    /// Take a device from vfio-pci, for good, and give it back to its driver. Needs root.
    Unbind {
        /// Its PCI address.
        address: Address,
        /// Format of the answer.
        #[arg(long, value_enum, default_value_t)]
        output: Output,
    },
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
