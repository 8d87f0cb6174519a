//! Waits for kernels and copies by interrupt, compared with looking at the semaphore.

use std::time::{Duration, Instant};

use anyhow::Result;
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde_json::json;
use system_tests::Vgpud;
use system_tests::ram::Ram;
use system_tests::vfio_user_guest::VfioUserGuest;
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::Work;
use vgpu_guest::work::copy::Copy;
use vgpu_guest::work::spin::Spin;

use crate::fleet::mdev_type;
use crate::load::iterations;
use crate::solo::{median_and_worst, spin};
use crate::{Bench, SMALL_RAM};

/// Runs of each job.
const RUNS: usize = 300;
const KERNEL: Duration = Duration::from_millis(5);
/// A wait whose interrupt is missed ends after 100 ms.
const MISSED: f64 = 90e3;

/// Times of a job's runs.
struct Waits {
    p50_us: f64,
    p99_us: f64,
    /// CPU time of the waiting thread per time.
    busy: f64,
}

impl Bench<'_> {
    /// Measures waits for kernels and copies, by looking and by interrupt. No interrupt may be
    /// missed.
    pub fn interrupts(&mut self) -> Result<()> {
        let parent = format!("{}{}", self.kind.argument(), self.options);
        let vgpud = Vgpud::start_with(&["--parent", &parent])?;
        let vgpu = json!({ "mdev_type": mdev_type(&vgpud, "-1C")?, "run": true });
        let socket = vgpud.vfio_socket(&vgpud.create(&vgpu)?);
        let ram = || Ram::new(SMALL_RAM * MIB, 2 * MIB);
        let looks = self.waits(VfioUserGuest::attach(&socket, ram()?)?)?;
        let interrupts = self.waits(VfioUserGuest::attach_with_interrupts(&socket, ram()?)?)?;
        for ((what, looks), (_, waits)) in looks.into_iter().zip(interrupts) {
            let say = |waits: &Waits| {
                let Waits { p50_us, p99_us, busy } = waits;
                format!("{p50_us:.0} / {p99_us:.0} us, {:.1} % of a core", busy * 100.0)
            };
            let what = format!("a wait for {what} by looking, by interrupt, p50 / p99");
            let kept = waits.p99_us < MISSED;
            self.row(&what, String::new(), say(&looks), say(&waits), kept);
        }
        Ok(())
    }

    fn waits(&self, guest: VfioUserGuest) -> Result<[(&'static str, Waits); 2]> {
        let device = Device::open_with(Box::new(guest), self.cubin)?;
        let kernel: Spin = spin(&device, iterations(KERNEL, self.pace))?;
        let kernels = times(&device, EngineKind::Compute, &kernel)?;
        let copies = times(&device, EngineKind::Copy, &Copy::new(&device, 4 * MIB)?)?;
        Ok([("a kernel of 5 ms", kernels), ("a copy of 4 MiB", copies)])
    }
}

fn times(device: &Device, engine: EngineKind, work: &dyn Work) -> Result<Waits> {
    let mut channel = Channel::new(device, engine)?;
    work.prepare();
    let mut methods = Methods::new();
    work.push(&mut methods);
    channel.run(&methods)?;
    let mut times = Vec::with_capacity(RUNS);
    let (begun, before) = (Instant::now(), processor_time()?);
    for _ in 0..RUNS {
        let start = Instant::now();
        channel.run(&methods)?;
        times.push(start.elapsed());
    }
    let busy = (processor_time()? - before) / begun.elapsed().as_secs_f64();
    let (p50_us, p99_us) = median_and_worst(times);
    Ok(Waits { p50_us, p99_us, busy })
}

/// Returns the CPU time of this thread in seconds.
fn processor_time() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_THREAD)?;
    Ok((usage.user_time() + usage.system_time()).num_microseconds() as f64 / 1e6)
}
