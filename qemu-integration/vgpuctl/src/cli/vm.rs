//! Commands about VMs: `run-vm`, and `qemu-args` and `libvirt-xml`, which print configuration.

use std::path::PathBuf;

use clap::Args;

use super::Output;
use super::values::memory_size;
use super::vgpu::{AttributeArgs, VgpuArg};

#[derive(Debug, Args)]
#[command(after_help = "\
QEMU runs in the foreground, with KVM if this user may use it. The vGPU is transient: it starts
before QEMU and stops after it. The exit status is QEMU's. Ctrl-C ends the VM. Without a display
option after --, QEMU opens no window: the VM's screen is the vGPU's. For a VM on a defined vGPU,
see qemu-args.

Examples:
  vgpuctl run-vm --name web1 --core 50 disk.qcow2
  vgpuctl run-vm disk.qcow2 --memory 8G --cpus 4 -- -bios /usr/share/ovmf/OVMF.fd
  vgpuctl run-vm -t SOFT-2Q disk.raw -- -snapshot -serial mon:stdio")]
pub struct RunVm {
    /// Disk image to boot: qcow2, or else raw.
    pub disk: PathBuf,
    #[command(flatten)]
    pub attrs: AttributeArgs,
    /// Type of the vGPU. Default, with one parent: the largest with a display of at most 1 GiB.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "TYPE")]
    pub mdev_type: Option<String>,
    /// Parent of the vGPU. Default: the first that offers the type and has room.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Memory size of the VM.
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = memory_size)]
    pub memory: String,
    /// Number of CPUs of the VM.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub cpus: u32,
    /// QEMU's program.
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    pub qemu: String,
    /// Further arguments for QEMU, after --.
    #[arg(last = true, value_name = "ARGUMENT")]
    pub more: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vgpuctl qemu-args web1                           machine, shared memory and device
  vgpuctl qemu-args web1 --device                  the value of -device alone
  vgpuctl qemu-args web1 -- qemu-system-x86_64 -m 2G -M q35 disk.img
                                                   an existing command line with the vGPU

A vGPU with a display head (types that end in Q) becomes the VM's display adapter: `-vga none` removes
the one that QEMU adds by default. `vgpuctl view` shows the screen.")]
pub struct QemuArgs {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// Memory size of the VM.
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = memory_size,
        conflicts_with_all = ["device", "command"])]
    pub memory: String,
    /// Machine type of the VM.
    #[arg(long, default_value = "q35,accel=kvm:tcg", conflicts_with_all = ["device", "command"])]
    pub machine: String,
    /// QEMU device ID, for `device_del`.
    #[arg(long)]
    pub id: Option<String>,
    /// Print the value of -device alone.
    #[arg(long, conflicts_with = "command")]
    pub device: bool,
    /// Output format: a shell command as text, or a list of arguments as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
    /// Existing QEMU command line. Printed with the vGPU and shared memory added.
    #[arg(last = true)]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
pub struct LibvirtXml {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// PCI bus of the VM for the device.
    #[arg(long, default_value = integrate::device::DEFAULT_ADDRESS.0)]
    pub bus: String,
    /// Slot on the bus.
    #[arg(long, default_value = integrate::device::DEFAULT_ADDRESS.1)]
    pub addr: String,
    /// Output format: the XML as text, or the XML and its parts as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}
