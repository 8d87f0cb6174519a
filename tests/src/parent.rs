//! Software GPU in a thread of this process.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use ipc::seqpacket::SeqPacketListener;
use mdev_core::device::FunctionSpec;
use mdev_core::gpu::{ClientSpec, Gpu};
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;
use tempfile::TempDir;
use vendor_backends::mediator::{MediatedClient, MediatedGpu, server};
use vendor_backends::soft::SoftGpu;
use vgpu_guest::device::Device;

use crate::in_process::InProcess;
use crate::ram::Ram;

/// The GPU. It ends when its last connection closes.
#[derive(Debug)]
pub struct Parent {
    /// The manager's connection.
    pub gpu: MediatedGpu,
    _folder: TempDir,
}

/// Properties of a vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vgpu {
    /// Video memory in bytes.
    pub vram: u64,
    /// Guest RAM in bytes.
    pub ram: u64,
    /// Length of the pieces that guest RAM is scattered in, in bytes.
    pub piece: u64,
    /// Whether the doorbell page is mapped.
    pub doorbell_mapped: bool,
}

impl Default for Vgpu {
    fn default() -> Self {
        Self { vram: 64 * MIB, ram: 64 * MIB, piece: 16 * 1024, doorbell_mapped: true }
    }
}

impl Parent {
    /// Starts a software GPU.
    pub fn start(vram_bytes: u64) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("admin.sock");
        let listener = SeqPacketListener::bind(&path)?;
        let grace = Duration::from_secs(1);
        let gpu = Arc::new(SoftGpu::new("soft0", vram_bytes));
        thread::spawn(move || server::run(gpu, grace, &listener));
        Ok(Self { gpu: MediatedGpu::connect(&path)?, _folder: folder })
    }

    /// Admits a vGPU and opens its client.
    pub fn client(&mut self, vgpu: VgpuId, vram_bytes: u64) -> Result<MediatedClient> {
        let admission = self.gpu.admit(&ClientSpec {
            vgpu,
            vram_bytes,
            framebuffer_bytes: 0,
            max_channels: 16,
            max_import_bytes: 1 << 34,
        })?;
        match admission.fd {
            Some(fd) => Ok(MediatedClient::open(fd.into_trusted())?),
            None => bail!("The admission has no connection"),
        }
    }

    /// Starts a vGPU with this process as its guest.
    pub fn guest(&mut self, vgpu: Vgpu) -> Result<Guest> {
        let id = VgpuId::random();
        let client = self.client(id, vgpu.vram)?;
        let spec = FunctionSpec {
            vgpu: id,
            type_name: "SOFT-TEST".into(),
            display: None,
            doorbell_mapped: vgpu.doorbell_mapped,
        };
        let ram = Ram::new(vgpu.ram, vgpu.piece)?;
        let platform = InProcess::new(&spec, Box::new(client), ram)?;
        let device = Device::open(Box::new(platform.clone()))?;
        Ok(Guest { id, device, platform })
    }
}

/// A vGPU that is opened by the guest runtime.
#[derive(Debug)]
pub struct Guest {
    /// Id of the vGPU.
    pub id: VgpuId,
    /// The guest runtime's device.
    pub device: Device,
    /// The platform, for access from the host's side.
    pub platform: InProcess,
}
