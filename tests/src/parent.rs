//! A software GPU of one's own, served from a thread.

use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use mdev_core::device::FunctionSpec;
use mdev_core::gpu::{ClientSpec, Gpu};
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;
use tempfile::TempDir;
use vendor_backends::mediator::{MediatedClient, MediatedGpu};
use vendor_backends::seqpacket::SeqPacketListener;
use vendor_backends::soft::{self, Config};
use vgpu_guest::device::Device;

use crate::in_process::InProcess;
use crate::ram::Ram;

/// The GPU. It ends by itself once nobody uses it.
#[derive(Debug)]
pub struct Parent {
    /// The manager's side.
    pub gpu: MediatedGpu,
    _folder: TempDir,
}

/// What a vGPU is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vgpu {
    /// Video memory in bytes.
    pub vram: u64,
    /// Guest RAM in bytes.
    pub ram: u64,
    /// Length of the pieces that guest RAM is scattered in.
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
    /// Starts one.
    pub fn start(vram_bytes: u64) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("admin.sock");
        let listener = SeqPacketListener::bind(&path)?;
        let grace = Duration::from_secs(1);
        let config = Config { name: "soft0".into(), vram_bytes, grace };
        thread::spawn(move || soft::run(&config, &listener));
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
            Some(fd) => Ok(MediatedClient::open(fd)?),
            None => bail!("The admission has no connection"),
        }
    }

    /// A vGPU that this process is the guest of.
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

/// A vGPU, opened by the guest runtime.
#[derive(Debug)]
pub struct Guest {
    /// Which.
    pub id: VgpuId,
    /// The runtime's view.
    pub device: Device,
    /// The host's view.
    pub platform: InProcess,
}
