//! Saved and restored vGPUs of a real NVIDIA GPU; skipped on machines without one.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use foreign_fds::ForeignFd;
use ipc::seqpacket::{MAX_PACKET, SeqPacket};
use mdev_core::gpu::EngineKind;
use mdev_core::units::{GIB, KIB, MIB};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::calibration::calibrate_under_load;
use system_tests::moved_guest::MovedGuest;
use system_tests::ram::Ram;
use system_tests::vgpuctl::{refused, vgpuctl};
use system_tests::worker_deaths::worker;
use system_tests::{Vgpud, kill_process};
use vgpu_guest::channel::Channel;
use vgpu_guest::copy;
use vgpu_guest::device::Device;
use vgpu_guest::memory::Buffer;
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::{self, Work, copy::Copy, spin::Spin};

use super::nvidia::there_is_a_gpu;

/// Saves, kills and restores.
const CYCLES: u32 = 50;
/// Kernels that are queued in each, and the length of each.
const KERNELS: u32 = 300;
const KERNEL: Duration = Duration::from_millis(5);
/// Part of video memory that has the same word.
const BLOCK: u64 = 2 * MIB;
/// Length of a kernel that cannot be saved.
const LONG_KERNEL: Duration = Duration::from_secs(3);
/// Filled part of 16 GiB.
const FILLED: u64 = 16 * GIB - 256 * MIB;
/// Promised rate of copies in GB/s.
const COPY_RATE: f64 = 45.0;
/// Limit of the median of stops: 10 ms and two kernels.
const STOP_LIMIT: Duration = Duration::from_millis(20);
/// Restores of 16 GiB, and the limit of the median.
const RESTORES: usize = 5;
const RESTORE_LIMIT: Duration = Duration::from_millis(800);
/// Limit of a refusal.
const REFUSAL: Duration = Duration::from_secs(2);

/// A manager with one vGPU.
struct Host {
    vgpud: Vgpud,
    uuid: String,
}

impl Host {
    fn start(size: &str) -> Result<Self> {
        let vgpud = Vgpud::start_with(&["--parent", "nvidia"])?;
        let parents = vgpud.get("/v1/parents")?;
        let parent = parents[0]["name"].as_str().context("No parent")?;
        let model = parents[0]["model"].as_str().context("No model")?;
        let mdev_type = format!("{model}-{size}");
        let uuid =
            vgpud.create(&json!({ "parent": parent, "mdev_type": mdev_type, "run": true }))?;
        Ok(Self { vgpud, uuid })
    }

    fn socket(&self) -> PathBuf {
        self.vgpud.vfio_socket(&self.uuid)
    }

    /// Kills all processes.
    fn kill(mut self) -> Result<()> {
        let (anchor, worker) = (self.vgpud.anchor(&self.uuid)?, worker(&self.vgpud, &self.uuid)?);
        for process in [anchor, worker] {
            kill_process(process, Signal::SIGKILL)?;
        }
        self.vgpud.end(Signal::SIGKILL)?;
        Ok(())
    }

    /// Sends the worker a request, in the manager's place.
    fn ask(&self, request: &Value, fds: &[BorrowedFd<'_>]) -> Result<(Value, Vec<OwnedFd>)> {
        let control = self.vgpud.vgpu_dir(&self.uuid).join("control.sock");
        let socket = SeqPacket::connect_with_timeout(&control, Duration::from_secs(20))?;
        socket.send(request.to_string().as_bytes(), fds)?;
        let mut buffer = vec![0; MAX_PACKET];
        let packet = socket.recv_with_fds(&mut buffer)?.context("No reply")?;
        let reply: Value = serde_json::from_slice(&buffer[..packet.len])?;
        if reply["reply"] == "error" {
            bail!("{reply}");
        }
        let fds = packet.fds.into_iter().map(ForeignFd::into_trusted).collect();
        Ok((reply, fds))
    }

    fn copy_piece(&self, offset: u64, len: u64, fills: bool) -> Result<()> {
        let request = json!({
            "request": "copy_staged", "offset": offset, "len": len, "at": 0, "fills": fills,
        });
        self.ask(&request, &[]).map(drop)
    }

    /// Copies all of video memory to staging memory, or from it. Returns the bytes per second.
    fn copy(&self, bytes: u64, staging: u64, fills: bool) -> Result<f64> {
        let since = Instant::now();
        for offset in (0..bytes).step_by(staging as usize) {
            let len = staging.min(bytes - offset);
            self.copy_piece(offset, len, fills)?;
        }
        Ok(bytes as f64 / since.elapsed().as_secs_f64())
    }
}

/// A guest, and its kernels.
struct Guest {
    platform: MovedGuest,
    device: Device,
    channel: Channel,
    copies: Channel,
    spin: Spin,
}

impl Guest {
    fn new(host: &Host) -> Result<Self> {
        let platform = MovedGuest::attach(&host.socket(), Ram::new(128 * MIB, 64 * KIB)?)?;
        let device = Device::open(Box::new(platform.clone()))?;
        let mut channel = Channel::with_entries(&device, EngineKind::Compute, 512)?;
        let mut spin = Spin::new(&device, 1000)?;
        let each = calibrate_under_load(&mut spin, &mut channel, KERNEL)?;
        println!("kernels take {each:?}");
        let copies = Channel::new(&device, EngineKind::Copy)?;
        Ok(Self { platform, device, channel, copies, spin })
    }

    fn launch(&mut self, kernels: u32) -> Result<()> {
        self.spin.prepare();
        let mut methods = Methods::new();
        self.spin.push(&mut methods);
        for _ in 0..kernels {
            self.channel.submit(&methods)?;
        }
        Ok(())
    }

    fn finish(&mut self, kernels: u32) -> Result<()> {
        self.channel.wait_idle()?;
        let launches = self.spin.launches()?;
        ensure!(launches == kernels, "{launches} of {kernels} kernels");
        Ok(())
    }

    /// Fills video memory: each block with a word of its own.
    fn fill(&mut self, buffer: &Buffer) -> Result<()> {
        for number in 0..buffer.len() / BLOCK {
            let mut methods = Methods::new();
            let at = buffer.va() + number * BLOCK;
            copy::fill(&mut methods, at, word(number), (BLOCK / 4) as u32);
            self.copies.submit(&methods)?;
        }
        Ok(self.copies.wait_idle()?)
    }

    /// Checks all of what [`Self::fill`] has written.
    fn verify(&mut self, buffer: &Buffer) -> Result<()> {
        let read = Buffer::guest(&self.device, 8 * BLOCK)?;
        let mut bytes = vec![0; BLOCK as usize];
        let mut number = 0;
        for at in (0..buffer.len()).step_by(8 * BLOCK as usize) {
            let len = (8 * BLOCK).min(buffer.len() - at);
            let mut methods = Methods::new();
            copy::linear(&mut methods, read.va(), buffer.va() + at, len);
            self.copies.run(&methods)?;
            for block in 0..len / BLOCK {
                read.window().read(block * BLOCK, &mut bytes);
                let first = bytes[..4] == word(number).to_le_bytes();
                ensure!(first && bytes[4..] == bytes[..bytes.len() - 4], "block {number} differs");
                number += 1;
            }
        }
        Ok(())
    }
}

/// Returns the word of a block.
fn word(number: u64) -> u32 {
    (number as u32).wrapping_mul(0x9e37_79b9) | 1
}

fn save(host: &Host, to: &Path) -> Result<()> {
    vgpuctl(&host.vgpud, &format!("save {} -o {} --keep-paused", host.uuid, to.display()))?;
    Ok(())
}

/// Kills everything, and restores the vGPU under another manager in other folders.
fn restore(host: Host, guest: &Guest, size: &str, from: &Path) -> Result<Host> {
    host.kill()?;
    let host = Host::start(size)?;
    guest.platform.move_to(&host.socket())?;
    vgpuctl(&host.vgpud, &format!("restore {} -i {}", host.uuid, from.display()))?;
    vgpuctl(&host.vgpud, &format!("resume {}", host.uuid))?;
    Ok(host)
}

#[test]
fn saved_vgpus_continue_under_another_manager() -> Result<()> {
    if !there_is_a_gpu() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("saved.vgpu");
    let mut host = Host::start("1C")?;
    let mut guest = Guest::new(&host)?;
    let buffer = Buffer::video(&guest.device, 64 * MIB)?;
    guest.fill(&buffer)?;
    let copy = Copy::new(&guest.device, MIB)?;
    let (mut saves, mut restores, mut executed) = (Vec::new(), Vec::new(), Vec::new());
    for cycle in 0..CYCLES {
        guest.launch(KERNELS)?;
        std::thread::sleep(Duration::from_millis(u64::from(cycle * 37 % 200)));
        let since = Instant::now();
        save(&host, &file)?;
        saves.push(since.elapsed());
        let before = guest.spin.launches()?;
        ensure!(before < KERNELS, "the kernels end too early");
        std::thread::sleep(Duration::from_millis(20));
        ensure!(guest.spin.launches()? == before, "a kernel ends in the pause");
        executed.push(before);
        let since = Instant::now();
        host = restore(host, &guest, "1C", &file)?;
        restores.push(since.elapsed());
        guest.finish(KERNELS)?;
        work::run(&copy, &mut guest.copies)?;
        if cycle % 10 == 9 {
            guest.verify(&buffer)?;
        }
    }
    saves.sort_unstable();
    restores.sort_unstable();
    let middle = CYCLES as usize / 2;
    println!("{CYCLES} cycles; kernels before the save: {executed:?} of {KERNELS}");
    println!("save {:?} to {:?}, p50 {:?}", saves[0], saves[saves.len() - 1], saves[middle]);
    let [first, last] = [restores[0], restores[restores.len() - 1]];
    println!("kill, start and restore {first:?} to {last:?}, p50 {:?}", restores[middle]);
    println!("the last file has {} bytes", file.metadata()?.len());
    println!("{:#}", host.vgpud.get("/v1/stats")?);
    Ok(())
}

#[test]
fn a_long_kernel_is_refused_and_its_guest_goes_on() -> Result<()> {
    if !there_is_a_gpu() {
        return Ok(());
    }
    let host = Host::start("1C")?;
    let mut guest = Guest::new(&host)?;
    // Longer than both refusals, and shorter than the driver lets a kernel run.
    let iterations = u128::from(guest.spin.iterations()) * LONG_KERNEL.as_nanos();
    guest.spin.set_iterations(u32::try_from(iterations / KERNEL.as_nanos())?);
    guest.launch(1)?;
    std::thread::sleep(Duration::from_millis(100));
    for _ in 0..2 {
        ensure!(guest.spin.launches()? == 0, "the kernel ends too early");
        let since = Instant::now();
        let line = format!("save {} -o /tmp/never.vgpu", host.uuid);
        refused(&host.vgpud, &line, 5, "a kernel has been running")?;
        println!("refused after {:?}", since.elapsed());
        ensure!(since.elapsed() < REFUSAL, "refused after {:?}", since.elapsed());
        work::run(&Copy::new(&guest.device, MIB)?, &mut guest.copies)?;
    }
    guest.finish(1)?;
    guest.channel.check()?;
    // After that it is saved as ever.
    vgpuctl(&host.vgpud, &format!("save {} -o /tmp/long.vgpu", host.uuid))?;
    guest.launch(1)?;
    println!("the kernel went on, and the next one runs");
    guest.finish(1)
}

/// A vGPU of 16 GiB: stopping, copying, saving and restoring.
#[test]
fn large_vgpus_are_stopped_copied_and_restored_quickly() -> Result<()> {
    if !there_is_a_gpu() {
        return Ok(());
    }
    let host = Host::start("16C")?;
    let mut guest = Guest::new(&host)?;
    let buffer = Buffer::video(&guest.device, FILLED)?;
    guest.fill(&buffer)?;
    let mut stops = Vec::new();
    for number in 0..CYCLES {
        guest.launch(KERNELS)?;
        std::thread::sleep(Duration::from_millis(u64::from(number * 37 % 300)));
        let since = Instant::now();
        host.ask(&json!({ "request": "pause" }), &[])?;
        stops.push(since.elapsed());
        let before = guest.spin.launches()?;
        host.ask(&json!({ "request": "resume" }), &[])?;
        guest.finish(KERNELS)?;
        ensure!(before < KERNELS, "the kernels end too early");
    }
    stops.sort_unstable();
    let (middle, longest) = (stops[stops.len() / 2], stops[stops.len() - 1]);
    println!("stopped after p50 {middle:?}, longest {longest:?}; kernels of {KERNEL:?}");
    ensure!(middle <= STOP_LIMIT, "stopped after {middle:?}");
    guest.launch(KERNELS)?;
    host.ask(&json!({ "request": "pause" }), &[])?;
    let since = Instant::now();
    let (saved, files) = host.ask(&json!({ "request": "save" }), &[])?;
    println!("state and staging memory after {:?}", since.elapsed());
    let bytes = saved["len"].as_u64().context("A length")?;
    for round in 0..3 {
        let rate = host.copy(16 * GIB, bytes, false)? / 1e9;
        println!("copied out at {rate:.1} GB/s ({round})");
        ensure!(round == 0 || rate >= COPY_RATE, "copied at {rate:.1} GB/s");
    }
    drop(files);
    host.ask(&json!({ "request": "resume" }), &[])?;
    guest.finish(KERNELS)?;
    save_and_restore_large(host, &mut guest, &buffer)
}

/// Saves and restores by `vgpuctl`, from a file in memory.
fn save_and_restore_large(mut host: Host, guest: &mut Guest, buffer: &Buffer) -> Result<()> {
    let folder = tempfile::tempdir_in("/dev/shm")?;
    let file = folder.path().join("saved.vgpu");
    guest.launch(KERNELS)?;
    let since = Instant::now();
    save(&host, &file)?;
    let bytes = file.metadata()?.len() as f64;
    let rate = bytes / since.elapsed().as_secs_f64() / 1e9;
    println!("saved {:.2} GB in {:?}: {rate:.2} GB/s", bytes / 1e9, since.elapsed());
    let mut restores = Vec::new();
    for _ in 0..RESTORES {
        host.kill()?;
        host = Host::start("16C")?;
        guest.platform.move_to(&host.socket())?;
        let since = Instant::now();
        vgpuctl(&host.vgpud, &format!("restore {} -i {}", host.uuid, file.display()))?;
        restores.push(since.elapsed());
    }
    println!("restored after {restores:?}");
    vgpuctl(&host.vgpud, &format!("resume {}", host.uuid))?;
    guest.finish(KERNELS)?;
    guest.verify(buffer)?;
    println!("kernels and {} MiB are right", buffer.len() / MIB);
    restores.sort_unstable();
    let middle = restores[restores.len() / 2];
    ensure!(middle <= RESTORE_LIMIT, "restored after {middle:?}");
    Ok(())
}
