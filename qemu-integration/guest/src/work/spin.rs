//! Kernels with an adjustable run time.

use std::time::{Duration, Instant};

use mdev_core::abi::program::{Kernel, Spin as Parameters};

use super::Work;
use crate::GuestError;
use crate::channel::Channel;
use crate::compute::{Launch, Shape};
use crate::device::Device;
use crate::memory::Buffer;
use crate::pushbuffer::Methods;

/// Default number of blocks of a launch. Each block adds one to the counter.
pub const BLOCKS: u32 = 4;
const THREADS: u32 = 32;

/// Launch that iterates and counts.
#[derive(Debug)]
pub struct Spin {
    counter: Buffer,
    launch: Launch,
    iterations: u32,
    blocks: u32,
    threads: u32,
}

fn launch(
    device: &Device,
    counter: &Buffer,
    iterations: u32,
    blocks: u32,
    threads: u32,
) -> Result<(Launch, Shape), GuestError> {
    let parameters = Parameters { out: counter.va(), iterations, reserved: 0 };
    let shape = Shape { grid: [blocks, 1, 1], block: [threads, 1, 1] };
    Ok((Launch::new(device, Kernel::Spin, shape, &parameters)?, shape))
}

impl Spin {
    /// Sets the iterations of each thread; `u32::MAX` never ends.
    pub fn new(device: &Device, iterations: u32) -> Result<Self, GuestError> {
        Self::with_shape(device, iterations, BLOCKS, THREADS)
    }

    /// Creates a launch with a given number of blocks and threads; enough of them fill a GPU.
    pub fn with_shape(
        device: &Device,
        iterations: u32,
        blocks: u32,
        threads: u32,
    ) -> Result<Self, GuestError> {
        let counter = Buffer::guest(device, 4096)?;
        let (launch, _) = launch(device, &counter, iterations, blocks, threads)?;
        Ok(Self { counter, launch, iterations, blocks, threads })
    }

    /// Creates a launch entirely in video memory, which the CPU need not access. Counting in guest
    /// RAM would cost each block about a microsecond. The iterations cannot change afterwards.
    pub fn resident(
        device: &Device,
        iterations: u32,
        blocks: u32,
        threads: u32,
    ) -> Result<Self, GuestError> {
        let counter = Buffer::video(device, 4096)?;
        let (launch, shape) = launch(device, &counter, iterations, blocks, threads)?;
        let launch = launch.reside(device, shape)?;
        Ok(Self { counter, launch, iterations, blocks, threads })
    }

    /// Changes the iterations. No launch may be in flight.
    pub fn set_iterations(&mut self, iterations: u32) {
        self.iterations = iterations;
        let parameters = Parameters { out: self.counter.va(), iterations, reserved: 0 };
        self.launch.set_parameters(&parameters);
    }

    /// Returns the iterations of each thread.
    pub fn iterations(&self) -> u32 {
        self.iterations
    }

    /// Returns the number of finished blocks since [`Work::prepare`], modulo 2^32.
    pub fn blocks(&self) -> u32 {
        self.counter.window().read32(0)
    }

    /// Returns the number of finished launches since [`Work::prepare`], or an error if the counter
    /// is inconsistent.
    pub fn launches(&self) -> Result<u32, GuestError> {
        match self.counter.window().read32(0) {
            count if count.is_multiple_of(self.blocks) => Ok(count / self.blocks),
            count => {
                Err(GuestError::Wrong(format!("spin: {count} blocks of {} each", self.blocks)))
            }
        }
    }

    /// Finds by trial the iterations that keep the engine busy for `target`.
    pub fn calibrate(&mut self, channel: &mut Channel, target: Duration) -> Result<(), GuestError> {
        let mut methods = Methods::new();
        self.push(&mut methods);
        let mut iterations = 1000u32;
        loop {
            self.set_iterations(iterations);
            let (before, start) = (channel.query()?.engine_ns, Instant::now());
            channel.run(&methods)?;
            let wall = start.elapsed().as_nanos() as u64;
            let engine = channel.query()?.engine_ns.saturating_sub(before);
            // Uses engine time if the device reports it promptly, because other vGPUs may have run
            // meanwhile.
            let took = if engine == 0 { wall } else { engine.clamp(wall / 20, wall) };
            let long_enough = took >= 2_000_000 || wall >= 50_000_000;
            if long_enough {
                let scaled = u128::from(iterations) * target.as_nanos() / u128::from(took.max(1));
                self.set_iterations(scaled.clamp(1, 1 << 30) as u32);
                self.prepare();
                return Ok(());
            }
            iterations *= 4;
        }
    }
}

impl Work for Spin {
    fn name(&self) -> &'static str {
        "spin"
    }

    fn amount(&self) -> (f64, &'static str) {
        (f64::from(self.iterations) * f64::from(self.blocks * self.threads), "iterations")
    }

    fn prepare(&self) {
        self.counter.window().write32(0, 0);
    }

    fn push(&self, methods: &mut Methods) {
        self.launch.push(methods);
    }

    fn verify(&self) -> Result<u64, GuestError> {
        match self.launches()? {
            1 => Ok(u64::from(self.blocks)),
            other => Err(GuestError::Wrong(format!("spin: {other} launches counted, expected 1"))),
        }
    }
}
