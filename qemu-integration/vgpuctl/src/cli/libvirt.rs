//! Arguments of `vgpuctl libvirt`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand};
use mdev_core::definition::VgpuName;

use super::Output;
use super::vgpu::{OptionalVgpuArg, VGPU_ARGS};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vgpuctl libvirt install-hook                     once on each host, then restart libvirt
  vgpuctl libvirt attach vm1 --type SOFT-1Q        a transient vGPU for each start of vm1
  vgpuctl libvirt attach vm1 web1                  a defined vGPU
  vgpuctl libvirt detach vm1                       restores the domain's definition

The hook starts a domain's vGPU before the domain and stops it after the domain has ended.")]
pub struct Libvirt {
    #[command(subcommand)]
    pub command: LibvirtCommand,
}

#[derive(Debug, Subcommand)]
pub enum LibvirtCommand {
    /// Attach a vGPU to a domain. Takes effect at the domain's next start.
    Attach(Attach),
    /// Detach a vGPU from a domain and restore the domain's definition.
    Detach(Detach),
    /// Install the libvirt hook that starts and stops vGPUs with their domains.
    InstallHook(HookRoot),
    /// Remove what install-hook installed: the hook and AppArmor's rules.
    UninstallHook(HookRoot),
    /// Print parents and started vGPUs as libvirt's node devices.
    Nodedev(Nodedev),
    /// Run by libvirt, with the domain's XML on the standard input; see install-hook.
    #[command(hide = true)]
    Hook(Hook),
}

/// Options that select a domain, common to `attach` and `detach`.
#[derive(Debug, Args)]
pub struct Domain {
    /// Domain by name, ID or uuid.
    #[arg(value_name = "DOMAIN")]
    pub name: String,
    /// Connection URI of libvirt, as for virsh.
    #[arg(short, long, value_name = "URI", default_value = "qemu:///system")]
    pub connect: String,
    /// Change the definition of a running domain. Takes effect at the domain's next start.
    #[arg(long)]
    pub config: bool,
    /// Print the domain's new XML without changing the domain.
    #[arg(long, conflicts_with = "output")]
    pub print_xml: bool,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).args(VGPU_ARGS).arg("mdev_type"))]
#[command(after_help = "\
Makes the domain's memory shared, passes the device to QEMU by <qemu:commandline> and records the
vGPU in <metadata>. The rest of the domain does not change.

Examples:
  vgpuctl libvirt attach vm1 --type SOFT-1Q --core 50
  vgpuctl libvirt attach vm1 web1 --config         while vm1 is running
  vgpuctl libvirt attach vm1 --type SOFT-1Q --print-xml")]
pub struct Attach {
    #[command(flatten)]
    pub domain: Domain,
    /// Type of a transient vGPU, which is created for each start of the domain.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "TYPE")]
    pub mdev_type: Option<String>,
    #[command(flatten)]
    pub vgpu: OptionalVgpuArg,
    /// Name of the transient vGPU, unique on this host.
    #[arg(id = "vgpu_name", long = "name", value_name = "NAME", conflicts_with_all = VGPU_ARGS)]
    pub vgpu_name: Option<VgpuName>,
    /// Minimum share in hundredths of the GPU. Changes the definition of a defined vGPU.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub core: Option<u8>,
    /// Parent. Default: the first parent with room when the domain starts.
    #[arg(short, long, conflicts_with_all = VGPU_ARGS)]
    pub parent: Option<String>,
}

#[derive(Debug, Args)]
pub struct Detach {
    #[command(flatten)]
    pub domain: Domain,
    /// The vGPU, if the domain has several.
    #[command(flatten)]
    pub vgpu: OptionalVgpuArg,
}

/// Options of `install-hook` and `uninstall-hook`.
#[derive(Debug, Args)]
pub struct HookRoot {
    /// Root directory of the installation.
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Nodedev {
    /// Name of a node device. Default: all devices.
    pub name: Option<String>,
    /// Print names only.
    #[arg(long, conflicts_with = "name")]
    pub list: bool,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

/// Arguments that libvirt passes to a hook.
#[derive(Debug, Args)]
pub struct Hook {
    pub domain: String,
    pub operation: String,
    pub sub_operation: String,
    pub extra: Option<String>,
}
