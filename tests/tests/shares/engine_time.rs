//! Guests that try to take engine time without being charged, beside a neighbour with endless work.
//!
//! All bounds are ratios of one run. Time that the host took from the engine counts for no vGPU.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mdev_core::abi::host::{self, GpEntry};
use mdev_core::abi::mailbox::Scatter;
use mdev_core::gpu::EngineKind;
use mdev_core::units::{MIB, PAGE_SIZE};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;
use serde_json::{Value, json};
use system_tests::Vgpud;
use system_tests::load::Endless;
use system_tests::ram::Ram;
use system_tests::vfio_user_guest::VfioUserGuest;
use vgpu_guest::GuestError;
use vgpu_guest::channel::Channel;
use vgpu_guest::copy;
use vgpu_guest::device::Device;
use vgpu_guest::memory::Buffer;
use vgpu_guest::pushbuffer::Methods;

/// Channels of a hostile guest: all that the software GPU allows.
const CHANNELS: usize = 32;
/// Points by which a share may be off on a loaded machine.
const TOLERANCE: f64 = 5.0;

fn vgpu(vgpud: &Vgpud, core: &str) -> Result<String> {
    let attrs = json!([{ "core": core }, { "hang_timeout": "off" }]);
    vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "attrs": attrs, "run": true }))
}

fn attach(vgpud: &Vgpud, uuid: &str) -> Result<Device> {
    let ram = Ram::new(32 * MIB, 32 * MIB)?;
    Ok(Device::open(Box::new(VfioUserGuest::attach(&vgpud.vfio_socket(uuid), ram)?))?)
}

/// Time of one vGPU so far, in seconds.
#[derive(Clone, Copy, Debug)]
struct Used {
    engine: f64,
    waited: f64,
    stolen: f64,
}

fn used(vgpud: &Vgpud, uuid: &str) -> Result<Used> {
    let stats = vgpud.get("/v1/stats")?;
    let vgpus = stats["vgpus"].as_array().context("No statistics")?;
    let one = vgpus.iter().find(|one| one["uuid"] == uuid).context("No such vGPU")?;
    let seconds = |value: &Value| value.as_f64().map(|ns| ns / 1e9).context("No time");
    Ok(Used {
        engine: seconds(&one["engine_ns"])?,
        waited: seconds(&one["wait_ns"])?,
        stolen: seconds(&one["stolen_ns"])?,
    })
}

/// Returns the part of the engine's time, in percent, that a vGPU gets whose work never ends. Time
/// that the host takes during the hostile vGPU's runs is not the engine's.
fn share(vgpud: &Vgpud, neighbour: &str, hostile: &str) -> Result<f64> {
    let before = [used(vgpud, neighbour)?, used(vgpud, hostile)?];
    thread::sleep(Duration::from_millis(1500));
    let after = [used(vgpud, neighbour)?, used(vgpud, hostile)?];
    let engine = after[0].engine - before[0].engine;
    let waited = after[0].waited - before[0].waited;
    let stolen = after[1].stolen - before[1].stolen;
    Ok(engine * 100.0 / (engine + waited - stolen))
}

/// Fills memory with methods that give the engine back at once, and has many channels run them.
fn yields(device: &Device) -> Result<(Buffer, Vec<Channel>)> {
    let pairs = 120_000;
    let mut pair = Methods::new();
    pair.push(0, host::YIELD, &[host::YIELD_TSG]);
    let words = pair.words().repeat(pairs);
    let pushbuffer = Buffer::guest(device, 4 * words.len() as u64)?;
    pushbuffer.store(0, &words);
    let entry = GpEntry::Segment { va: pushbuffer.va(), dwords: words.len() as u32 };
    let new = |_| Ok(Channel::new(device, EngineKind::Copy)?);
    let mut channels = (0..CHANNELS).map(new).collect::<Result<Vec<_>>>()?;
    for channel in &mut channels {
        for _ in 0..200 {
            channel.submit_raw(entry.encode());
        }
    }
    Ok((pushbuffer, channels))
}

#[test]
fn giving_the_engine_back_all_the_time_gains_none() -> Result<()> {
    let vgpud = Vgpud::start()?;
    for (core, hostile_core) in [("50", "50"), ("90", "10")] {
        let neighbour = vgpu(&vgpud, core)?;
        let hostile = vgpu(&vgpud, hostile_core)?;
        let _endless = Endless::start(&vgpud, &neighbour)?;
        let device = attach(&vgpud, &hostile)?;
        let _yields = yields(&device)?;
        thread::sleep(Duration::from_millis(500));
        let share = share(&vgpud, &neighbour, &hostile)?;
        println!("{core}: {share:.1}");
        let promised: f64 = core.parse()?;
        // The hostile vGPU may have less than its share: that is its own loss.
        ensure!(share > promised - TOLERANCE, "{core} promised, {share:.1} %");
        for uuid in [neighbour, hostile] {
            let path = format!("/v1/vgpus/{uuid}/stop");
            vgpud.call("POST", &path, Some(&json!({ "force": true })))?;
        }
    }
    Ok(())
}

/// Keeps punching holes into a file until it is dropped.
struct Punching {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Punching {
    /// Punches one hole of `len` bytes after the other, and allocates `filled` bytes before each.
    fn start(file: OwnedFd, len: u64, filled: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let holes = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            while !stopped.load(Ordering::Relaxed) {
                if filled > 0 {
                    let _ = fallocate(&file, FallocateFlags::empty(), 0, filled.cast_signed());
                }
                let _ = fallocate(&file, holes, 0, len.cast_signed());
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Punching {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Returns the part of the time, in percent, that the engine runs a vGPU whose work never ends. An
/// engine that is held counts neither its time nor its waiting.
fn running(vgpud: &Vgpud, uuid: &str) -> Result<f64> {
    const WINDOW: Duration = Duration::from_millis(1500);
    let before = used(vgpud, uuid)?;
    thread::sleep(WINDOW);
    let after = used(vgpud, uuid)?;
    let (engine, waited) = (after.engine - before.engine, after.waited - before.waited);
    Ok(engine * 100.0 / (engine + waited).max(WINDOW.as_secs_f64()))
}

/// Length of the memory with holes, and distance of the pages that the engine uses in it.
const HOLES: u64 = 1024 * MIB;
const PITCH: u64 = MIB + PAGE_SIZE;

/// A guest with endless copies in memory whose pages its VMM can take away.
struct Perforated {
    file: OwnedFd,
    _device: Device,
    channel: Channel,
    _pushbuffer: Buffer,
}

impl Perforated {
    fn start(vgpud: &Vgpud, uuid: &str) -> Result<Self> {
        const USED: u64 = 32 * MIB;
        let ram = Ram::new(USED, USED)?;
        let platform = VfioUserGuest::attach(&vgpud.vfio_socket(uuid), ram)?;
        let file = memfd_create(c"holes", MFdFlags::MFD_CLOEXEC)?;
        ftruncate(&file, HOLES.cast_signed())?;
        platform.map(1 << 32, HOLES, file.as_fd())?;
        let device = Device::open(Box::new(platform))?;
        let mut channel = Channel::new(&device, EngineKind::Copy)?;
        let range = Scatter { address: 1 << 32, length: HOLES };
        let va = device.map_guest(&[range], HOLES)?;
        let surface = copy::Surface { va, pitch: PITCH as u32 };
        let mut methods = Methods::new();
        copy::rectangle(&mut methods, surface, surface, 64, (HOLES / PITCH) as u32);
        let words = methods.words().repeat(4000);
        let pushbuffer = Buffer::guest(&device, 4 * words.len() as u64)?;
        pushbuffer.store(0, &words);
        let entry = GpEntry::Segment { va: pushbuffer.va(), dwords: words.len() as u32 };
        for _ in 0..200 {
            channel.submit_raw(entry.encode());
        }
        thread::sleep(Duration::from_millis(300));
        Ok(Self { file, _device: device, channel, _pushbuffer: pushbuffer })
    }
}

/// Takes the pages of a guest's memory away while the engine uses them, so that the engine sleeps
/// in page faults.
#[test]
fn time_in_page_faults_of_a_guests_memory_is_its_own() -> Result<()> {
    const LEN: u64 = HOLES;
    let vgpud = Vgpud::start()?;
    let (neighbour, hostile) = (vgpu(&vgpud, "50")?, vgpu(&vgpud, "50")?);
    let _endless = Endless::start(&vgpud, &neighbour)?;
    let guest = Perforated::start(&vgpud, &hostile)?;

    let unrelated = memfd_create(c"unrelated", MFdFlags::MFD_CLOEXEC)?;
    ftruncate(&unrelated, LEN.cast_signed())?;
    let punching = Punching::start(unrelated, LEN, 0);
    let control = running(&vgpud, &neighbour)?;
    drop(punching);
    let _punching = Punching::start(guest.file.try_clone()?, LEN, 0);
    let attacked = running(&vgpud, &neighbour)?;
    println!("{control:.1} % before, {attacked:.1} % while holes are punched");
    // The neighbour has more than its share while the hostile vGPU is paused, also before.
    let undisturbed = control.min(50.0);
    ensure!(attacked > undisturbed * 0.5, "{control:.1} % before, {attacked:.1} % afterwards");
    Ok(())
}

/// Makes the sleeps long: the kernel frees all pages of a hole while the guest's engine waits.
#[test]
fn guest_whose_memory_holds_its_engine_delays_no_other() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let (neighbour, hostile) = (vgpu(&vgpud, "50")?, vgpu(&vgpud, "50")?);
    let _endless = Endless::start(&vgpud, &neighbour)?;
    let guest = Perforated::start(&vgpud, &hostile)?;
    let _punching = Punching::start(guest.file.try_clone()?, HOLES, HOLES / 2);
    for _ in 0..5 {
        let running = running(&vgpud, &neighbour)?;
        println!("{running:.1} % beside {:?}", guest.channel.query().map(|state| state.error));
        ensure!(running > 47.5, "{running:.1} % for 50");
    }
    let path = format!("/v1/vgpus/{hostile}/stop");
    vgpud.call("POST", &path, Some(&json!({ "force": true })))?;
    ensure!(used(&vgpud, &neighbour)?.engine > 0.0, "the GPU was lost");
    Ok(())
}

/// Maps small pages beside multiples of 2 MiB until the GPU refuses.
#[test]
fn page_tables_of_a_guest_are_bounded_by_its_memory() -> Result<()> {
    const STEP: u64 = 128 * MIB;
    let vgpud = Vgpud::start()?;
    let uuid = vgpu(&vgpud, "50")?;
    let device = attach(&vgpud, &uuid)?;
    let gpu = u64::from(vgpud.context(&uuid)?);
    let before = anonymous_kib(gpu)?;
    // Gigabytes of page tables would take thousands of maps.
    let maps = (0..400).take_while(|_| device.map_vram(PAGE_SIZE, STEP).is_ok()).count();
    let grown = anonymous_kib(gpu)?.saturating_sub(before);
    println!("{maps} maps, {grown} KiB");
    ensure!(maps < 400, "The guest may map without end: {grown} KiB");
    ensure!(grown < 32 << 10, "{grown} KiB of page tables for a vGPU of 256 MiB");
    Ok(())
}

/// Has the copy engine fill memory that the VM has never used.
#[test]
fn the_gpu_does_not_fill_a_sparse_file_for_a_guest() -> Result<()> {
    const USED: u64 = 32 * MIB;
    const SPARSE: u64 = 1024 * MIB;
    let vgpud = Vgpud::start()?;
    let uuid = vgpu(&vgpud, "50")?;
    let ram = Ram::new(SPARSE, SPARSE)?;
    let platform = VfioUserGuest::attach(&vgpud.vfio_socket(&uuid), ram.clone())?;
    let device = Device::open(Box::new(platform))?;
    let mut channel = Channel::new(&device, EngineKind::Copy)?;
    let range = Scatter { address: Ram::BASE + USED, length: SPARSE - USED };
    let va = device.map_guest(&[range], range.length)?;
    let mut methods = Methods::new();
    copy::fill(&mut methods, va, 0x5a5a_5a5a, (range.length / 4) as u32);
    let outcome = channel.run(&methods);
    let allocated = fstat(ram.fd())?.st_blocks.cast_unsigned() * 512;
    println!("{} MiB: {outcome:?}", allocated / MIB);
    ensure!(matches!(outcome, Err(GuestError::Channel { .. })), "{outcome:?}");
    ensure!(allocated < SPARSE / 2, "{} MiB were allocated", allocated / MIB);

    // The guest's own memory still works.
    let mut channel = Channel::new(&device, EngineKind::Copy)?;
    let own = Buffer::guest(&device, MIB)?;
    let mut methods = Methods::new();
    copy::fill(&mut methods, own.va(), 7, (MIB / 4) as u32);
    Ok(channel.run(&methods)?)
}

/// Returns the anonymous memory of a process in KiB.
fn anonymous_kib(pid: u64) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|line| line.starts_with("RssAnon")).context("No RssAnon")?;
    Ok(line.split_whitespace().nth(1).context("No number")?.parse()?)
}
