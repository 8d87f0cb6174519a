//! Commands that save, restore and upgrade vGPUs and VMs.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand};

use super::Output;
use super::values::{MoveAddress, move_address};
use super::vgpu::{OptionalVgpuArg, VGPU_ARGS, VgpuArg};

#[derive(Debug, Args)]
#[command(after_help = "\
The state of a vGPU belongs to its VM: save both with `vgpuctl vm save`. This command is for VMMs
that save the VM themselves. The VM must be paused, and stay so until its memory is saved.

Examples:
  vgpuctl checkpoint web1                          while the VM runs, if it has CUDA programs
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
#[command(after_help = "\
The state of CUDA programs is saved with the VM's memory: they wait, and have copied their video memory
there. `vgpu-guest agent` in the VM carries that out, while the VM runs. `vgpuctl vm save` asks for it
itself; this command is for VMMs that save their VMs themselves, and for moves. The programs continue
with `vgpuctl resume`, and when the saved vGPU is restored. If one of them cannot be checkpointed, all
continue, and the command says which one. See docs/saving.md.")]
pub struct Checkpoint {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// Output format: nothing as text, or the vGPU as JSON.
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

#[derive(Debug, Args)]
#[command(after_help = "\
A worker keeps the release of the vgpud that started it. After an upgrade of vgpud, this command
replaces the workers of running vGPUs by workers of the new release, on every kind of GPU. The
package runs it when it is upgraded. VMs and CUDA programs continue: an access or a request waits
until the next worker has started.

If a worker of the new release cannot continue, a worker of the release before does, and the command
says so. Stopping and starting the vGPU then gives it the new release. Anchors and GPU processes
keep their release until the vGPUs are stopped. See docs/operating.md.

Examples:
  vgpuctl upgrade                                  all running vGPUs
  vgpuctl upgrade web1")]
pub struct Upgrade {
    #[command(flatten)]
    pub vgpu: OptionalVgpuArg,
    /// Output format: a line for each vGPU, or a list as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

/// Save, restore, upgrade and move VMs with their vGPUs.
#[derive(Debug, Args)]
pub struct Vm {
    #[command(subcommand)]
    pub task: VmTask,
}

#[derive(Debug, Subcommand)]
pub enum VmTask {
    /// Save a VM with its vGPUs into a file, and end the VM.
    Save(VmSave),
    /// Restore a VM with its vGPUs from a file.
    Restore(VmRestore),
    /// Replace the QEMU of a running VM by a new one, without a restart of the guest.
    Upgrade(VmUpgrade),
    /// Move a running VM to another host.
    Migrate(VmMigrate),
    /// Wait for a VM that `vm migrate` moves to this host.
    Receive(VmReceive),
}

/// Options that select a VM.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("vm").required(true).args(VGPU_ARGS).arg("domain"))]
pub struct VmArg {
    /// A vGPU of the VM.
    #[command(flatten)]
    pub vgpu: OptionalVgpuArg,
    /// QMP socket of the VM.
    #[arg(
        long,
        value_name = "PATH",
        required_unless_present = "domain",
        conflicts_with = "domain"
    )]
    pub monitor: Option<PathBuf>,
    /// Domain of libvirt, by name, ID or uuid, in place of a vGPU and a monitor.
    #[arg(long, value_name = "DOMAIN")]
    pub domain: Option<String>,
    /// Connection URI of libvirt on this host, as for virsh.
    #[arg(short, long, value_name = "URI", default_value = "qemu:///system", requires = "domain")]
    pub connect: String,
}

#[derive(Debug, Args)]
#[command(after_help = "\
The VM is paused while it is saved, and QEMU ends afterwards. The file has all vGPUs of the VM; one
of them selects it. What cannot be saved is refused before anything is paused. The file has
checksums. See docs/saving.md.

Examples:
  vgpuctl vm save web1 --monitor /run/vm/qmp.sock -o web1.vm
  vgpuctl vm save --domain vm1 -o vm1.vm           a domain of libvirt")]
pub struct VmSave {
    #[command(flatten)]
    pub vm: VmArg,
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
Start the vGPUs and QEMU first, QEMU with the command line of the VM that was saved and
`-incoming defer`, on this host or another one. A domain of libvirt must be shut off: this command
starts it, with the XML in the file. The whole file is checked before anything is restored. The VM
continues afterwards.

Examples:
  vgpuctl start web1
  eval qemu-system-x86_64 ... -incoming defer -qmp unix:/run/vm/qmp.sock,server=on,wait=off \\
    \"$(vgpuctl qemu-args web1)\" &
  vgpuctl vm restore web1 --monitor /run/vm/qmp.sock -i web1.vm
  vgpuctl vm restore --domain vm1 -i vm1.vm        a domain of libvirt")]
pub struct VmRestore {
    #[command(flatten)]
    pub vm: VmArg,
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

#[derive(Debug, Args)]
#[command(after_help = "\
Starts the new QEMU, which gets the guest's memory and the vGPUs from the old one (QEMU's
cpr-transfer), and ends the old one. The guest is paused for a moment. If the new QEMU fails, the
guest continues in the old one.

The old QEMU needs `-machine aux-ram-share=on` and shared memory. The command of the new one has the
same devices. Sockets that QEMU makes itself, such as its monitor, need other paths: the old QEMU
removes its own when it ends. Its messages go to a file beside the new monitor, with `.log` added.
See docs/saving.md.

Example:
  vgpuctl vm upgrade web1 --monitor /run/vm/qmp1.sock --new-monitor /run/vm/qmp2.sock -- \\
    /opt/qemu/bin/qemu-system-x86_64 ... -qmp unix:/run/vm/qmp2.sock,server=on,wait=off")]
pub struct VmUpgrade {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// QMP socket of the running QEMU.
    #[arg(long, value_name = "PATH")]
    pub monitor: PathBuf,
    /// QMP socket that the new QEMU makes.
    #[arg(long, value_name = "PATH")]
    pub new_monitor: PathBuf,
    /// Output format: the length of the pause, or the vGPU and the pause as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
    /// New QEMU and its arguments, after --. `-incoming` is added.
    #[arg(last = true, required = true)]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Start the vGPUs, QEMU with `-incoming defer` and `vgpuctl vm receive` on the other host first. The VM
runs while its memory is sent, and is paused for a moment at the end. The VM's disks must be reachable
from both hosts. If anything fails, the VM continues here. See docs/saving.md.

The connection is neither encrypted nor authenticated: use a private network, or a tunnel of ssh.

Examples:
  vgpuctl vm migrate web1 --monitor /run/vm/qmp.sock --to host2:7070
  ssh -fNL /run/vm/move:/run/vm/move host2        an encrypted connection
  vgpuctl vm migrate web1 --monitor /run/vm/qmp.sock --to unix:/run/vm/move")]
pub struct VmMigrate {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// QMP socket of the VM.
    #[arg(long, value_name = "PATH")]
    pub monitor: PathBuf,
    /// Where `vm receive` waits: HOST:PORT, or unix:PATH.
    #[arg(long, value_name = "ADDRESS", value_parser = move_address)]
    pub to: MoveAddress,
    /// Limit of the time for which the VM's memory is sent while the VM runs, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub timeout: u64,
    /// Output format: the length of the pause, or the vGPU and the pause as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Start the vGPUs and QEMU first, QEMU with the command line of the VM that moves and `-incoming defer`.
This command ends when the VM runs here, or was refused. See docs/saving.md.

Examples:
  vgpuctl start web1
  eval qemu-system-x86_64 ... -incoming defer -qmp unix:/run/vm/qmp.sock,server=on,wait=off \\
    \"$(vgpuctl qemu-args web1)\" &
  vgpuctl vm receive web1 --monitor /run/vm/qmp.sock --listen host2:7070")]
pub struct VmReceive {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// QMP socket of the QEMU that waits for the VM.
    #[arg(long, value_name = "PATH")]
    pub monitor: PathBuf,
    /// Where to wait for the VM: HOST:PORT, or unix:PATH.
    #[arg(long, value_name = "ADDRESS", value_parser = move_address)]
    pub listen: MoveAddress,
    /// Output format: nothing as text, or the vGPU as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}
