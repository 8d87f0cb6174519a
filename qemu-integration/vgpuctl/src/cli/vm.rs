//! What a VM is started with: `qemu-args`, `libvirt-xml`.

use clap::Args;
use mdev_core::ids::VgpuId;

use super::Output;

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
