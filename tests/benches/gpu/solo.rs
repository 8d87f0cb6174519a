//! Performance of one process without other load: copies, a matrix product, latency.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use mdev_core::abi::control::Features;
use mdev_core::gpu::EngineKind;
use serde::{Deserialize, Serialize};
use vgpu_guest::GuestError;
use vgpu_guest::channel::Channel;
use vgpu_guest::copy;
use vgpu_guest::device::Device;
use vgpu_guest::fence::WaitPolicy;
use vgpu_guest::memory::Buffer;
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::Work;
use vgpu_guest::work::sgemm::Sgemm;
use vgpu_guest::work::spin::Spin;

/// Blocks and threads of a spin that fills an H100.
pub const FILLING: (u32, u32) = (132, 128);
/// Copies in flight.
const DEPTH: usize = 8;

/// Sizes of the measurements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SoloSpec {
    /// Bytes of a copy.
    pub bytes: u64,
    /// Duration of each measurement.
    pub time: Duration,
    /// Rows of the matrices.
    pub rows: u32,
    /// Round trips.
    pub trips: usize,
}

/// Results.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Solo {
    /// GB/s from video memory to video memory.
    pub video: f64,
    /// GB/s from RAM to video memory.
    pub to_video: f64,
    /// GB/s from video memory to RAM.
    pub from_video: f64,
    /// GFLOP/s of a matrix product.
    pub product: f64,
    /// Doorbell to semaphore, median, us.
    pub p50: f64,
    /// Doorbell to semaphore, 99th percentile, us.
    pub p99: f64,
}

impl Solo {
    /// Returns the median of several measurements, for each figure separately.
    pub fn median(of: &[Self]) -> Self {
        let median = |figure: fn(&Self) -> f64| median(of.iter().map(figure));
        Self {
            video: median(|one| one.video),
            to_video: median(|one| one.to_video),
            from_video: median(|one| one.from_video),
            product: median(|one| one.product),
            p50: median(|one| one.p50),
            p99: median(|one| one.p99),
        }
    }
}

/// Returns the middle value, or the mean of the two middle values.
pub fn median(of: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = of.collect();
    all.sort_by(f64::total_cmp);
    let middle = all.len() / 2;
    match (all.get(middle.wrapping_sub(1)), all.get(middle)) {
        (Some(a), Some(b)) if all.len().is_multiple_of(2) => f64::midpoint(*a, *b),
        (_, Some(b)) => *b,
        _ => 0.0,
    }
}

/// Returns a spin that fills the GPU.
pub fn spin(device: &Device, iterations: u32) -> Result<Spin, GuestError> {
    if device.features().contains(Features::SOFT_PROGRAMS) {
        return Spin::new(device, iterations);
    }
    Spin::with_shape(device, iterations, FILLING.0, FILLING.1)
}

/// Returns the nanoseconds of 1000 iterations of a spin's thread, from many successive kernels to
/// hide the launch.
pub fn calibrate(device: &Device) -> Result<f64> {
    const KERNELS: u32 = 32;
    let mut channel = Channel::new(device, EngineKind::Compute)?;
    let mut spin = spin(device, 1)?;
    spin.calibrate(&mut channel, Duration::from_millis(2))?;
    let mut methods = Methods::new();
    spin.push(&mut methods);
    let mut best = f64::MAX;
    // Hardware needs a while to raise its clocks.
    let hardware = !device.features().contains(Features::SOFT_PROGRAMS);
    let warm = Duration::from_millis(if hardware { 1500 } else { 0 });
    let begun = Instant::now();
    while begun.elapsed() < warm {
        channel.submit(&methods)?;
    }
    channel.wait_idle()?;
    for _ in 0..5 {
        let start = Instant::now();
        for _ in 0..KERNELS {
            channel.submit(&methods)?;
        }
        channel.wait_idle()?;
        best = best.min(start.elapsed().as_nanos() as f64);
    }
    Ok(best / f64::from(KERNELS) / f64::from(spin.iterations()) * 1000.0)
}

/// Runs all measurements.
pub fn measure(device: &Device, spec: &SoloSpec) -> Result<Solo> {
    let mut channel = Channel::new(device, EngineKind::Copy)?;
    let len = spec.bytes;
    let (ram, back) = (Buffer::guest(device, len)?, Buffer::guest(device, len)?);
    let (one, two) = (Buffer::video(device, len)?, Buffer::video(device, len)?);
    let words: Vec<u32> = (0..len as u32 / 4).map(|n| n.wrapping_mul(0x9e37_79b1)).collect();
    ram.store(0, &words);
    let mut rate = |to: &Buffer, from: &Buffer| copies(&mut channel, to, from, spec.time);
    let to_video = rate(&one, &ram)?;
    let video = rate(&two, &one)?;
    let from_video = rate(&back, &two)?;
    ensure!(back.load::<u32>(0, words.len()) == words, "A copy is wrong");
    let product = product(device, &mut channel, spec)?;
    let (p50, p99) = trips(device, spec.trips)?;
    Ok(Solo { video, to_video, from_video, product, p50, p99 })
}

/// Returns GB/s of successive copies.
fn copies(channel: &mut Channel, to: &Buffer, from: &Buffer, time: Duration) -> Result<f64> {
    let mut methods = Methods::new();
    copy::linear(&mut methods, to.va(), from.va(), from.len());
    // The first copy touches the memory for the first time.
    channel.run(&methods)?;
    let count = on_end(channel, &methods, time)?;
    Ok(count * from.len() as f64 / 1e9)
}

/// Returns submissions per second, with several always queued.
fn on_end(channel: &mut Channel, methods: &Methods, time: Duration) -> Result<f64> {
    let mut queued = std::collections::VecDeque::new();
    let (start, mut count) = (Instant::now(), 0u32);
    while start.elapsed() < time {
        if queued.len() == DEPTH
            && let Some(fence) = queued.pop_front()
        {
            channel.wait(fence)?;
        }
        queued.push_back(channel.submit(methods)?);
        count += 1;
    }
    channel.wait_idle()?;
    Ok(f64::from(count) / start.elapsed().as_secs_f64())
}

/// Returns GFLOP/s of a matrix product in video memory.
fn product(device: &Device, copies: &mut Channel, spec: &SoloSpec) -> Result<f64> {
    let mut channel = Channel::new(device, EngineKind::Compute)?;
    let product = Sgemm::resident(device, spec.rows)?;
    product.prepare();
    product.load(copies)?;
    let mut methods = Methods::new();
    product.push(&mut methods);
    channel.run(&methods)?;
    let rate = on_end(&mut channel, &methods, spec.time)?;
    product.unload(copies)?;
    product.verify()?;
    Ok(rate * product.amount().0 / 1e9)
}

/// Returns median and 99th percentile from doorbell to semaphore in us, each after a pause: the
/// poller of relayed doorbells may sleep by then.
pub fn trips_after(device: &Device, pause: Duration, count: usize) -> Result<(f64, f64)> {
    let mut channel = Channel::new(device, EngineKind::Compute)?;
    channel.set_wait_policy(WaitPolicy::spinning());
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        std::thread::sleep(pause);
        let start = Instant::now();
        channel.run(&Methods::new())?;
        times.push(start.elapsed());
    }
    Ok(median_and_worst(times))
}

fn trips(device: &Device, count: usize) -> Result<(f64, f64)> {
    let mut channel = Channel::new(device, EngineKind::Compute)?;
    channel.set_wait_policy(WaitPolicy::spinning());
    let methods = Methods::new();
    for _ in 0..count / 10 {
        channel.run(&methods)?;
    }
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        channel.run(&methods)?;
        times.push(start.elapsed());
    }
    Ok(median_and_worst(times))
}

/// Returns median and 99th percentile in us.
pub fn median_and_worst(mut times: Vec<Duration>) -> (f64, f64) {
    times.sort();
    let at = |hundredths: usize| times[(times.len() * hundredths / 100).min(times.len() - 1)];
    (at(50).as_secs_f64() * 1e6, at(99).as_secs_f64() * 1e6)
}
