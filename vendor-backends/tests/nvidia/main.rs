//! NVIDIA backend on the fake driver: everything that needs no GPU.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod adoption;
mod doorbell;
mod driver_calls;
mod exceptions;
mod faults;
mod hostile_guest;
mod hostile_worker;
mod manager;
mod mappings;
mod programs;
mod saving;
mod scheduling;
mod teardown;
#[path = "../support/warnings.rs"]
mod warnings;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::mem::{Mapping, SharedMemory};
use mdev_core::abi::userd;
use mdev_core::gpu::{ChannelHandle, Client, ClientSpec, EngineKind, Gpu, GpuError};
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;
use nvidia_rm::fake_rm::{self, FakeRm};
use vendor_backends::conformance::lifecycle;
use vendor_backends::nvidia::{NvidiaClient, NvidiaGpu, Options};

const DRIVER: &str = "580.142";

const OPTIONS: Options = Options::FOR_TESTS;

fn spec(vram_bytes: u64) -> ClientSpec {
    ClientSpec {
        vgpu: VgpuId::random(),
        vram_bytes,
        framebuffer_bytes: 0,
        max_channels: 4,
        max_import_bytes: 64 * MIB,
    }
}

fn gpu(rm: &Arc<FakeRm>) -> NvidiaGpu {
    NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, OPTIONS).unwrap()
}

/// Opens a GPU with a short hang limit. Returns it with the time since then, as the fake driver's
/// clock is to be set.
fn gpu_with_hang_limit(rm: &Arc<FakeRm>) -> (NvidiaGpu, impl Fn() -> u64 + use<>) {
    let hang_limit = Some(Duration::from_millis(150));
    let options = Options { hang_limit, ..OPTIONS };
    let gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, options).unwrap();
    let started = Instant::now();
    let clock = move || started.elapsed().as_nanos() as u64 + 1_000_000_000;
    rm.set_clock(clock());
    (gpu, clock)
}

fn try_client(
    rm: &Arc<FakeRm>,
    gpu: &mut NvidiaGpu,
    spec: &ClientSpec,
) -> Result<NvidiaClient, GpuError> {
    let admission = gpu.admit(spec)?;
    let mut client = NvidiaClient::open(rm.clone(), admission.fd.unwrap().into_trusted())?;
    client.start()?;
    Ok(client)
}

fn client(rm: &Arc<FakeRm>, gpu: &mut NvidiaGpu) -> (VgpuId, NvidiaClient) {
    let spec = spec(64 * MIB);
    (spec.vgpu, try_client(rm, gpu, &spec).unwrap())
}

fn ram(len: u64) -> SharedMemory {
    SharedMemory::new(c"ram", len).unwrap()
}

/// Waits until another thread has made a condition true.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Creates a vGPU with a copy channel and two compute channels.
fn with_channels(
    rm: &Arc<FakeRm>,
    gpu: &mut NvidiaGpu,
) -> (VgpuId, NvidiaClient, SharedMemory, Vec<ChannelHandle>) {
    let (vgpu, mut client) = client(rm, gpu);
    let memory = ram(MIB);
    let id = lifecycle::import(&mut client, &memory).unwrap();
    let engines = [EngineKind::Copy, EngineKind::Compute, EngineKind::Compute];
    let create = |(index, engine): (usize, EngineKind)| {
        client.create_channel(&lifecycle::channel_spec(engine, id, index as u64 * 512)).unwrap()
    };
    let channels = engines.into_iter().enumerate().map(create).collect();
    (vgpu, client, memory, channels)
}

/// Returns the number of resets of channel groups since the log was last taken.
fn resets(rm: &FakeRm) -> usize {
    const RESET: &str = "0x906f0102";
    rm.take_log().iter().filter(|line| line.contains(RESET)).count()
}

/// Sets `GP_GET` and `GP_PUT` of a channel, in place of the GPU and the guest.
fn set_ring(memory: &Mapping, channel: u64, get: u32, put: u32) {
    memory.store_u32(channel * 512 + userd::GP_GET, get).unwrap();
    memory.store_u32(channel * 512 + userd::GP_PUT, put).unwrap();
}

/// Creates compute channels until one is refused, at most `most`. `end` ends each of them.
fn create_until_refused(
    client: &mut NvidiaClient,
    memory: &SharedMemory,
    most: u32,
    mut end: impl FnMut(&mut NvidiaClient, &ChannelHandle),
) -> u32 {
    let mut created = 0;
    while created < most {
        let id = lifecycle::import(client, memory).unwrap();
        let spec = lifecycle::channel_spec(EngineKind::Compute, id, 0);
        let channel = match client.create_channel(&spec) {
            Ok(channel) => channel,
            Err(GpuError::Later(_)) => break,
            Err(error) => panic!("{error}"),
        };
        created += 1;
        end(client, &channel);
        client.release(id).unwrap();
    }
    created
}
