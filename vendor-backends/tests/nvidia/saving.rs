//! Saved vGPUs, and vGPUs that are restored from them, on a driver with engines.

mod any_state;
mod guest;
mod refusals;
mod replaced;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mdev_core::gpu::{Client, EngineKind, Gpu, SavedClient, Saving, StagedCopy};
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;
use nvidia_rm::fake_rm::{self, Engines, FakeRm};
use vendor_backends::nvidia::{NvidiaClient, NvidiaGpu, Options};

use self::guest::{DESTINATION, Guest, SOURCE, VRAM_OFFSET};
use super::{DRIVER, OPTIONS, eventually, spec, try_client};

/// Options of vGPUs that can be saved.
const SAVED: Options = Options { direct_vram: false, ..OPTIONS };
const KERNEL: Duration = Duration::from_micros(400);
/// Video memory of a vGPU.
const VRAM: u64 = 80 * MIB;

/// A host with a vGPU.
struct Host {
    rm: Arc<FakeRm>,
    gpu: NvidiaGpu,
    vgpu: VgpuId,
    client: NvidiaClient,
    // Stopped first: it uses the guest's memory.
    engines: Option<Engines>,
}

impl Drop for Host {
    fn drop(&mut self) {
        self.engines = None;
    }
}

impl Host {
    fn new() -> Self {
        Self::with_driver(DRIVER)
    }

    fn with_driver(driver: &str) -> Self {
        let rm = FakeRm::new(driver);
        rm.set_clock(1_000_000_000);
        let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, SAVED).unwrap();
        let spec = spec(VRAM);
        let mut client = try_client(&rm, &mut gpu, &spec).unwrap();
        let staged = gpu.describe().capabilities.stages_memory();
        assert!(staged && client.saving().unwrap().stages_memory(), "the manager knows it as well");
        let engines = Some(Engines::start(&rm, KERNEL));
        Self { rm, gpu, vgpu: spec.vgpu, client, engines }
    }

    fn check(&self) {
        assert!(self.rm.violations().is_empty(), "{:?}", self.rm.violations());
    }
}

/// Copies the video memory of a paused client to the host, or back.
fn copy_vram(client: &mut NvidiaClient, contents: &mut [u8], fills: bool) {
    let staging = client.staging().unwrap();
    let file = File::from(staging.fd);
    for (number, piece) in contents.chunks_mut(staging.len as usize).enumerate() {
        let (offset, len) = (number as u64 * staging.len, piece.len() as u64);
        let copy = StagedCopy { offset, len, at: 0, fills };
        if fills {
            file.write_all_at(piece, 0).unwrap();
        }
        client.copy_staged(copy).unwrap();
        if !fills {
            file.read_exact_at(piece, 0).unwrap();
        }
    }
}

fn kernels(vram: &[u8]) -> u32 {
    let at = VRAM_OFFSET as usize;
    u32::from_le_bytes(vram[at..at + 4].try_into().unwrap())
}

/// Returns a vGPU with kernels and copies in progress: some kernels of each channel have run.
fn busy() -> (Host, Guest) {
    let mut host = Host::new();
    let engines = [EngineKind::Compute, EngineKind::Copy, EngineKind::Compute];
    let mut guest = Guest::new(&mut host.client, &engines);
    guest.launch(0, 40);
    for number in 0..32 {
        guest.copy(1, number * 1024, number * 1024, 1024);
    }
    guest.launch(2, 10);
    super::eventually("kernels of both channels", || {
        guest.progress(0) > 1 && guest.progress(2) > 1
    });
    (host, guest)
}

fn save(host: &mut Host) -> (SavedClient, Vec<u8>) {
    host.client.check_save().unwrap();
    host.client.pause().unwrap();
    let mut vram = vec![0; VRAM as usize];
    copy_vram(&mut host.client, &mut vram, false);
    (host.client.save().unwrap(), vram)
}

#[test]
fn a_vgpu_continues_elsewhere_where_it_was() {
    let (mut host, mut guest) = busy();
    let (saved, mut vram) = save(&mut host);
    let counted = kernels(&vram);
    assert!(counted < 50, "{counted}: all kernels have run already");
    let executed = guest.progress(0) + guest.progress(2) - 2;
    assert_eq!(counted, executed, "kernels are not between two entries");
    host.check();
    drop(host);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(guest.progress(0) + guest.progress(2) - 2, executed, "nothing runs any more");

    let mut other = Host::new();
    // The tokens of the GPU are others.
    let before = Guest::new(&mut other.client, &[EngineKind::Copy]);
    before.wait();
    other.client.reset().unwrap();
    guest.restore(&mut other.client, &saved).unwrap();
    copy_vram(&mut other.client, &mut vram, true);
    other.client.resume().unwrap();
    guest.wait();
    // The guest knows the channels by their ids and tokens.
    guest.launch(0, 7);
    other.client.wake(guest.channels[0].token).unwrap();
    guest.copy(1, 40 * 1024, 40 * 1024, 1024);
    guest.wait();
    for channel in &guest.channels {
        assert_eq!(other.client.query_channel(channel.id).unwrap().error, 0);
    }
    let (_, vram) = save(&mut other);
    assert_eq!(kernels(&vram), 57);
    let mut source = vec![0; 41 * 1024];
    guest.ram.mapping.read(SOURCE, &mut source).unwrap();
    let at = (VRAM_OFFSET + DESTINATION) as usize;
    assert!(vram[at..at + 32 * 1024] == source[..32 * 1024]);
    assert!(vram[at + 40 * 1024..at + 41 * 1024] == source[40 * 1024..]);
    other.check();
    drop(before);
}

/// The same with the ring at each place, also where it has just come round.
#[test]
fn a_ring_continues_at_each_place() {
    for entries in [1, 2, 62, 63, 64, 65, 127, 128] {
        let mut host = Host::new();
        let mut guest = Guest::new(&mut host.client, &[EngineKind::Compute]);
        guest.launch(0, entries - 1);
        guest.wait();
        let (saved, mut vram) = save(&mut host);
        drop(host);
        let mut other = Host::new();
        guest.restore(&mut other.client, &saved).unwrap();
        copy_vram(&mut other.client, &mut vram, true);
        // Submitted before it continues.
        guest.launch(0, 3);
        other.client.resume().unwrap();
        let status = other.client.query_channel(guest.channels[0].id).unwrap();
        assert_eq!(status.error, 0, "{entries}");
        guest.launch(0, 80);
        guest.wait();
        let (_, vram) = save(&mut other);
        assert_eq!(kernels(&vram), entries - 1 + 83, "{entries}");
        other.check();
    }
}

#[test]
fn work_goes_on_after_each_of_many_pauses() {
    let (mut host, mut guest) = busy();
    let mut launched = 50;
    for number in 0..50_u64 {
        std::thread::sleep(Duration::from_micros(number * 97 % 2000));
        host.client.pause().unwrap();
        let at_rest = guest.progress(0);
        if number % 5 == 0 {
            std::thread::sleep(Duration::from_millis(2));
            assert_eq!(guest.progress(0), at_rest);
        }
        host.client.resume().unwrap();
        guest.launch((number % 2 * 2) as usize, 3);
        launched += 3;
    }
    guest.wait();
    let (_, vram) = save(&mut host);
    assert_eq!(kernels(&vram), launched);
    host.check();
}

#[test]
fn a_closed_gate_stays_closed_after_a_pause() {
    let (mut host, guest) = busy();
    host.gpu.set_gate(host.vgpu, false).unwrap();
    let token = guest.channels[0].token.0;
    eventually("closed", || !host.rm.may_run(token));
    host.client.pause().unwrap();
    host.client.resume().unwrap();
    assert!(!host.rm.may_run(token));
    host.client.pause().unwrap();
    host.gpu.set_gate(host.vgpu, true).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(!host.rm.may_run(token), "it is paused");
    host.client.resume().unwrap();
    guest.wait();
    let (_, vram) = save(&mut host);
    assert_eq!(kernels(&vram), 50);
    host.check();
}

#[test]
fn a_pause_is_short() {
    let (mut host, _guest) = busy();
    let since = Instant::now();
    host.client.pause().unwrap();
    println!("paused after {:?}", since.elapsed());
    host.client.reset().unwrap();
    host.check();
}
