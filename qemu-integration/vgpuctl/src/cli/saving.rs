//! Commands that save and restore vGPUs and VMs.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::Output;
use super::vgpu::VgpuArg;

#[derive(Debug, Args)]
#[command(after_help = "\
The state of a vGPU belongs to its VM: save both with `vgpuctl vm save`. This command is for VMMs
that save the VM themselves. The VM must be paused, and stay so until its memory is saved.

Examples:
  vgpuctl save web1 -o web1.vgpu --keep-paused     before the VM's memory is saved
  vgpuctl resume web1                              the VM continues here")]
pub struct Save {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// File to write.
    #[arg(short = 'o', long = "file", value_name = "FILE")]
    pub file: PathBuf,
    /// Leave the vGPU paused.
    #[arg(long)]
    pub keep_paused: bool,
    /// Output format: nothing as text, or the file and its size as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
The vGPU must run, with the type that was saved, and its VM must be attached, paused, and have the
guest's memory. The vGPU is paused afterwards. The JSON output has the writes to its configuration
space that the VMM has to make before `vgpuctl resume`. See docs/saving.md.")]
pub struct Restore {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// File that `save` wrote.
    #[arg(short = 'i', long = "file", value_name = "FILE")]
    pub file: PathBuf,
    /// Output format: nothing as text, or the writes to configuration space as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Resume {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// Output format: nothing as text, or the vGPU as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

/// Save and restore VMs with their vGPUs.
#[derive(Debug, Args)]
pub struct Vm {
    #[command(subcommand)]
    pub task: VmTask,
}

#[derive(Debug, Subcommand)]
pub enum VmTask {
    /// Save a VM with its vGPU into a file, and end the VM.
    Save(VmSave),
    /// Restore a VM with its vGPU from a file.
    Restore(VmRestore),
}

#[derive(Debug, Args)]
#[command(after_help = "\
The VM is paused while it is saved, and QEMU ends afterwards. What cannot be saved is refused before
anything is paused. The file has checksums. See docs/saving.md.

Example:
  vgpuctl vm save web1 --monitor /run/vm/qmp.sock -o web1.vm")]
pub struct VmSave {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// QMP socket of the VM.
    #[arg(long, value_name = "PATH")]
    pub monitor: PathBuf,
    /// File to write.
    #[arg(short = 'o', long = "file", value_name = "FILE")]
    pub file: PathBuf,
    /// Let the VM continue after it is saved.
    #[arg(long)]
    pub keep_running: bool,
    /// Output format: nothing as text, or the file and its size as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Start the vGPU and QEMU first, QEMU with the command line of the VM that was saved and
`-incoming defer`, on this host or another one. The whole file is checked before anything is
restored. The VM continues afterwards.

Example:
  vgpuctl start web1
  eval qemu-system-x86_64 ... -incoming defer -qmp unix:/run/vm/qmp.sock,server=on,wait=off \\
    \"$(vgpuctl qemu-args web1)\" &
  vgpuctl vm restore web1 --monitor /run/vm/qmp.sock -i web1.vm")]
pub struct VmRestore {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// QMP socket of the VM.
    #[arg(long, value_name = "PATH")]
    pub monitor: PathBuf,
    /// File that `vm save` wrote.
    #[arg(short = 'i', long = "file", value_name = "FILE")]
    pub file: PathBuf,
    /// Leave the VM paused.
    #[arg(long)]
    pub paused: bool,
    /// Output format: nothing as text, or the vGPU as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}
