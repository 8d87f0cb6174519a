//! A vGPU of a software GPU in this process.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ipc::seqpacket::SeqPacketListener;
use mdev_core::gpu::{ClientSpec, Gpu};
use mdev_core::units::MIB;
use tempfile::TempDir;
use vendor_backends::mediator::{MediatedClient, MediatedGpu, server};
use vendor_backends::soft::SoftGpu;

/// What must live as long as the vGPU's client.
#[derive(Debug)]
pub struct Held {
    _gpu: MediatedGpu,
    _folder: TempDir,
}

/// Starts a software GPU and returns the client of a vGPU on it.
#[allow(dead_code, reason = "not all tests have a client that never ends")]
pub fn start(spec: &ClientSpec) -> (MediatedClient, Held) {
    let (connection, held) = admit(spec);
    (MediatedClient::open(connection).unwrap(), held)
}

/// Starts a software GPU and returns the connection for the client of a vGPU on it.
pub fn admit(spec: &ClientSpec) -> (OwnedFd, Held) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let listener = SeqPacketListener::bind(&path).unwrap();
    let gpu = Arc::new(SoftGpu::new("soft0", spec.vram_bytes.max(256 * MIB)));
    thread::spawn(move || server::run(gpu, Duration::from_secs(1), &listener));
    let mut gpu = MediatedGpu::connect(&path).unwrap();
    let connection = gpu.admit(spec).unwrap().fd.unwrap().into_trusted();
    (connection, Held { _gpu: gpu, _folder: folder })
}
