//! Steady mixed load that keeps the channel busy and checks every unit of work.

use std::fmt::{self, Display};
use std::time::{Duration, Instant};

use mdev_core::gpu::EngineKind;
use serde::Serialize;

use crate::GuestError;
use crate::channel::Channel;
use crate::device::Device;
use crate::fence::{Fence, WaitPolicy};
use crate::memory::Home;
use crate::pushbuffer::Methods;
use crate::work::Work;
use crate::work::sgemm::Sgemm;
use crate::work::spin::Spin;
use crate::work::vadd::VectorAdd;

/// Parameters of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Length of the run.
    pub duration: Duration,
    /// Time at the start and at the end that does not count as steady.
    pub margin: Duration,
    /// Approximate engine time of one unit.
    pub kernel: Duration,
    /// Units in flight: enough to keep the ring filled while the CPU is busy elsewhere.
    pub depth: u32,
}

impl Default for Load {
    fn default() -> Self {
        let (duration, kernel) = (Duration::from_secs(5), Duration::from_micros(500));
        Self { duration, margin: Duration::ZERO, kernel, depth: 64 }
    }
}

/// Results of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// "bench".
    pub job: &'static str,
    /// Measured length of the run, in seconds.
    pub seconds: f64,
    /// Units completed. A unit is a vector addition, a small matrix product and a spin.
    pub units: u64,
    /// Units whose results were compared with the CPU's. Every result was right.
    pub verified: u64,
    /// Units completed outside of the margins, multiplied by the spin's iterations.
    pub steady_work: f64,
    /// Units per second.
    pub units_per_second: f64,
    /// Engine time in seconds that the device charged to the channel.
    pub engine_seconds: f64,
    /// Engine time divided by wall time.
    pub engine_share: f64,
    /// Iterations of the spin in each unit.
    pub iterations: u32,
    /// Doorbell writes.
    pub doorbells: u64,
    /// Wake-ups: doorbell writes that caused a VM exit.
    pub wakes: u64,
    /// Wake-ups while earlier work was unfinished; should be zero.
    pub wakes_while_busy: u64,
    /// Trapped doorbell and wake writes, as counted by the device.
    pub trapped: u32,
}

impl Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "bench: {} units in {:.2} s ({:.0}/s), {} verified, engine share {:.1} %, {} doorbells, {} trapped",
            self.units,
            self.seconds,
            self.units_per_second,
            self.verified,
            self.engine_share * 100.0,
            self.doorbells,
            self.trapped
        )
    }
}

/// Unit of work in flight. Each unit has separate buffers, so that each result is checked
/// separately.
#[derive(Debug)]
struct Unit {
    add: VectorAdd,
    product: Sgemm,
    methods: Methods,
    fence: Option<Fence>,
}

impl Unit {
    fn new(device: &Device, spin: &Spin) -> Result<Self, GuestError> {
        let add = VectorAdd::new(device, Home::Guest, 1024)?;
        let product = Sgemm::new(device, Home::Guest, 16)?;
        let mut methods = Methods::new();
        add.prepare();
        product.prepare();
        add.push(&mut methods);
        product.push(&mut methods);
        spin.push(&mut methods);
        Ok(Self { add, product, methods, fence: None })
    }

    /// Waits for the unit, checks the results, and overwrites them for the next run.
    fn finish(&mut self, channel: &Channel) -> Result<bool, GuestError> {
        let Some(fence) = self.fence.take() else { return Ok(false) };
        channel.wait(fence)?;
        self.add.verify()?;
        self.product.verify()?;
        self.add.spoil();
        self.product.spoil();
        Ok(true)
    }
}

/// Runs the load on `device`.
pub fn run(device: &Device, load: &Load) -> Result<Measured, GuestError> {
    let mut channel = Channel::new(device, EngineKind::Compute)?;
    let mut spin = Spin::new(device, 1)?;
    spin.calibrate(&mut channel, load.kernel)?;
    let depth = load.depth.clamp(1, crate::channel::DEFAULT_ENTRIES - 2);
    let mut units = (0..depth).map(|_| Unit::new(device, &spin)).collect::<Result<Vec<_>, _>>()?;
    // Sleeps instead of spinning: the software GPU may need this CPU.
    channel.set_wait_policy(WaitPolicy { spin: Duration::ZERO, ..WaitPolicy::default() });

    let before = (channel.counters(), device.trapped_doorbells(), channel.query()?.engine_ns);
    let start = Instant::now();
    let (mut completed, mut steady, mut next) = (0u64, 0u64, 0);
    let steady_time = load.margin..load.duration.saturating_sub(load.margin);
    while start.elapsed() < load.duration {
        let unit = &mut units[next];
        let finished = u64::from(unit.finish(&channel)?);
        completed += finished;
        steady += if steady_time.contains(&start.elapsed()) { finished } else { 0 };
        unit.fence = Some(channel.submit_and_interrupt(&unit.methods)?);
        next = (next + 1) % units.len();
    }
    for unit in &mut units {
        completed += u64::from(unit.finish(&channel)?);
    }
    let seconds = start.elapsed().as_secs_f64();
    let counters = channel.counters();
    let trapped = device.trapped_doorbells().wrapping_sub(before.1);
    let engine_ns = channel.query()?.engine_ns.saturating_sub(before.2);
    if u64::from(spin.launches()?) != completed {
        return Err(GuestError::Wrong(format!(
            "bench: {} spins counted, {completed} submitted",
            spin.launches()?
        )));
    }
    let engine_seconds = engine_ns as f64 / 1e9;
    Ok(Measured {
        job: "bench",
        seconds,
        units: completed,
        verified: completed,
        steady_work: steady as f64 * f64::from(spin.iterations()),
        units_per_second: completed as f64 / seconds,
        engine_seconds,
        engine_share: engine_seconds / seconds,
        iterations: spin.iterations(),
        doorbells: counters.doorbells - before.0.doorbells,
        wakes: counters.wakes - before.0.wakes,
        wakes_while_busy: counters.wakes_while_busy - before.0.wakes_while_busy,
        trapped,
    })
}
