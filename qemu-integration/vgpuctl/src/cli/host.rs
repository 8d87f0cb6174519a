//! Commands about this host: `parents`, `doctor`, `completions`, `man`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use host_inventory::PciAddress;

use super::Output;

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  vgpuctl parents                        list display adapters and accelerators
  vgpuctl parents bind 0000:3b:00.0      bind a device to vfio-pci
  vgpuctl parents unbind 0000:3b:00.0    return the device to its driver"
)]
pub struct Parents {
    /// Operation on a device.
    #[command(subcommand)]
    pub task: Option<ParentsTask>,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Subcommand)]
pub enum ParentsTask {
    /// Unbind a device from its driver and bind it to vfio-pci. Requires root.
    ///
    /// If systemd runs vgpud, the binding is repeated after each boot, and vgpud's service gets
    /// access to the device.
    Bind {
        /// PCI address, for example 0000:3b:00.0.
        address: PciAddress,
        /// Do not repeat the binding after a boot. Always the case without systemd.
        #[arg(long)]
        until_reboot: bool,
        /// Output format.
        #[arg(long, value_enum, default_value_t)]
        output: Output,
    },
    /// Permanently unbind a device from vfio-pci and return it to its driver. Requires root.
    Unbind {
        /// PCI address.
        address: PciAddress,
        /// Output format.
        #[arg(long, value_enum, default_value_t)]
        output: Output,
    },
}

#[derive(Debug, Args)]
#[command(after_help = "\
Findings are ok, warnings (works with restrictions) and problems (does not work). The command
changes nothing. Some checks require root. Exit status 1 if there is a problem, otherwise 0.

Examples:
  vgpuctl doctor                                   before the first VM, or when a VM fails
  vgpuctl doctor --output json                     for programs: check, level, what, fix")]
pub struct Doctor {
    /// Root directory of the host's /etc, /proc, /dev, /sys, /run and /usr.
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    pub root: PathBuf,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Completions {
    /// Shell.
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub struct Man {
    /// Output folder.
    pub folder: PathBuf,
}
