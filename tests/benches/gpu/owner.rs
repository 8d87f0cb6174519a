//! The plain owner of a GPU: this process is the backend's client itself, and drives its channels with no vGPU in between.

use std::any::Any;
use std::path::Path;

use anyhow::Result;
use mdev_core::device::FunctionSpec;
use mdev_core::gpu::Client;
use mdev_core::ids::VgpuId;
use mdev_core::units::GIB;
use system_tests::in_process::InProcess;
use system_tests::parent::Parent;
use system_tests::ram::Ram;
use vgpu_guest::device::Device;

use crate::GpuKind;

/// Video memory that it takes.
const VRAM: u64 = GIB;

/// What has to live as long as the client does.
#[derive(Debug)]
pub struct Owner(#[expect(dead_code, reason = "held")] Box<dyn Any>);

/// Opens the GPU.
pub fn open(kind: GpuKind, ram: Ram, cubin: &Path) -> Result<(Device, Owner)> {
    let vgpu = VgpuId::random();
    let (client, owner): (Box<dyn Client>, Owner) = match kind {
        GpuKind::Soft => {
            let mut parent = Parent::start(VRAM)?;
            (Box::new(parent.client(vgpu, VRAM)?), Owner(Box::new(parent)))
        }
        GpuKind::Nvidia => anyhow::bail!("This build has no backend for NVIDIA GPUs"),
    };
    let spec =
        FunctionSpec { vgpu, type_name: "OWNER".into(), display: None, doorbell_mapped: true };
    let platform = InProcess::new(&spec, client, ram)?;
    Ok((Device::open_with(Box::new(platform), cubin)?, owner))
}
