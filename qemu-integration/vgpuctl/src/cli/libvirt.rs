//! `vgpuctl libvirt ...`

use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand};
use mdev_core::ids::VgpuId;

use super::Output;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vgpuctl libvirt install-hook                     once on each host, then restart libvirt
  vgpuctl libvirt attach vm1 --type SOFT-1Q        a vGPU of its own, made anew for each start
  vgpuctl libvirt attach vm1 -u UUID               one that is defined
  vgpuctl libvirt detach vm1                       the domain as it was

With the hook, a domain's vGPU is started before it and stopped after it, whatever ends it.")]
pub struct Libvirt {
    #[command(subcommand)]
    pub command: LibvirtCommand,
}

#[derive(Debug, Subcommand)]
pub enum LibvirtCommand {
    /// Give a domain a vGPU, from its next start on.
    Attach(Attach),
    /// Take a domain's vGPU away, and leave its definition as it was before.
    Detach(Detach),
    /// Install the hook that starts a domain's vGPU before it and stops it after it.
    InstallHook(InstallHook),
    /// Print parents and started vGPUs as libvirt's node devices.
    Nodedev(Nodedev),
    /// What libvirt runs, with the domain's XML on the standard input: see install-hook.
    #[command(hide = true)]
    Hook(Hook),
}

/// Which libvirt, and which of its domains.
#[derive(Debug, Args)]
pub struct Domain {
    /// The domain: its name, number or uuid.
    #[arg(value_name = "DOMAIN")]
    pub name: String,
    /// libvirt's address, as virsh takes it.
    #[arg(short, long, value_name = "URI", default_value = "qemu:///system")]
    pub connect: String,
    /// Change the definition of a domain that is running: in force from its next start on.
    #[arg(long)]
    pub config: bool,
    /// Print the domain's new XML, and change nothing.
    #[arg(long, conflicts_with = "output")]
    pub print_xml: bool,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).args(["uuid", "mdev_type"]))]
#[command(after_help = "\
What changes in the domain: its memory becomes shared, the device is passed to QEMU by
<qemu:commandline>, and <metadata> says which vGPU it is. All else stays as it is.

Examples:
  vgpuctl libvirt attach vm1 --type SOFT-1Q --core 50
  vgpuctl libvirt attach vm1 -u UUID --config      while vm1 runs
  vgpuctl libvirt attach vm1 --type SOFT-1Q --print-xml")]
pub struct Attach {
    #[command(flatten)]
    pub domain: Domain,
    /// Its type: a vGPU of the domain's own, which is made anew for each start.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "TYPE")]
    pub mdev_type: Option<String>,
    /// A vGPU that is defined.
    #[arg(short, long)]
    pub uuid: Option<VgpuId>,
    /// Hundredths of the GPU that it gets at least. Changes the definition of one that is defined.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub core: Option<u8>,
    /// The parent. Without it, the first that has room when the domain starts.
    #[arg(short, long, conflicts_with = "uuid")]
    pub parent: Option<String>,
}

#[derive(Debug, Args)]
pub struct Detach {
    #[command(flatten)]
    pub domain: Domain,
    /// Which of several.
    #[arg(short, long)]
    pub uuid: Option<VgpuId>,
}

#[derive(Debug, Args)]
pub struct InstallHook {
    /// The file system to install it into.
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Nodedev {
    /// The device's name. Without it, all of them.
    pub name: Option<String>,
    /// Print names only.
    #[arg(long, conflicts_with = "name")]
    pub list: bool,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

/// As libvirt calls it: domain, operation, sub-operation, and one more word.
#[derive(Debug, Args)]
pub struct Hook {
    pub domain: String,
    pub operation: String,
    pub sub_operation: String,
    pub extra: Option<String>,
}
