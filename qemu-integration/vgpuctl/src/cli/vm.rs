//! Commands that print configuration of VMs: `qemu-args`, `libvirt-xml`.

use clap::Args;
use mdev_core::ids::VgpuId;

use super::Output;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vgpuctl qemu-args -u UUID                        machine, shared memory and device
  vgpuctl qemu-args -u UUID --device               the value of -device alone
  vgpuctl qemu-args -u UUID -- qemu-system-x86_64 -m 2G -M q35 disk.img
                                                   an existing command line with the vGPU")]
pub struct QemuArgs {
    /// Uuid of the vGPU.
    #[arg(short, long)]
    pub uuid: VgpuId,
    /// Memory size of the VM.
    #[arg(long, default_value = "2G", conflicts_with_all = ["device", "command"])]
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
    /// Uuid of the vGPU.
    #[arg(short, long)]
    pub uuid: VgpuId,
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
