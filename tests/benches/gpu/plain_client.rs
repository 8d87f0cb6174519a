//! Plain client of a GPU: this process is the backend's client and drives channels without a vGPU.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use mdev_core::device::FunctionSpec;
use mdev_core::gpu::{Client, ClientSpec, Gpu};
use mdev_core::ids::VgpuId;
use mdev_core::units::GIB;
use nvidia_rm::KernelDriver;
use nvidia_rm::rm::Rm;
use system_tests::in_process::InProcess;
use system_tests::parent::Parent;
use system_tests::ram::Ram;
use vendor_backends::nvidia::{NvidiaClient, NvidiaGpu, Options};
use vgpu_guest::device::Device;

use crate::GpuKind;

/// Video memory of the client.
const VRAM: u64 = GIB;

/// Values that must live as long as the client.
#[derive(Debug)]
pub struct PlainClient(#[expect(dead_code, reason = "held")] Box<dyn Any>);

/// Opens the GPU.
pub fn open(kind: GpuKind, ram: Ram, cubin: &Path) -> Result<(Device, PlainClient)> {
    let vgpu = VgpuId::random();
    let (client, plain): (Box<dyn Client>, PlainClient) = match kind {
        GpuKind::Soft => {
            let mut parent = Parent::start(VRAM)?;
            (Box::new(parent.client(vgpu, VRAM)?), PlainClient(Box::new(parent)))
        }
        GpuKind::Nvidia => {
            let rm: Arc<dyn Rm> = Arc::new(KernelDriver);
            let address = NvidiaGpu::list(&*rm)?.into_iter().next();
            let address = address.context("NVIDIA's driver has no GPU")?;
            let mut gpu = NvidiaGpu::open(
                rm.clone(),
                &address,
                Options { direct_doorbell: true, ..Options::default() },
            )?;
            let admission = gpu.admit(&ClientSpec {
                vgpu,
                vram_bytes: VRAM,
                framebuffer_bytes: 0,
                max_channels: 16,
                max_import_bytes: 1 << 34,
            })?;
            let connection =
                admission.fd.context("The admission has no connection")?.into_trusted();
            (Box::new(NvidiaClient::open(rm, connection)?), PlainClient(Box::new(gpu)))
        }
    };
    let spec =
        FunctionSpec { vgpu, type_name: "OWNER".into(), display: None, doorbell_mapped: true };
    let platform = InProcess::new(&spec, client, ram)?;
    Ok((Device::open_with(Box::new(platform), cubin)?, plain))
}
