//! Requests: single kernels at a known rate, each submitted and waited for, as a service does.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mdev_core::abi::control::Features;
use mdev_core::gpu::EngineKind;
use serde::{Deserialize, Serialize};
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::fence::WaitPolicy;
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::Work;

use crate::load::iterations;
use crate::solo::spin;

/// Time of the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Due {
    /// A fixed interval after the previous one was due, or at once if that one took longer.
    Every(Duration),
    /// A fixed pause after the end of the previous one.
    After(Duration),
}

/// Requests to make.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestSpec {
    /// Duration of a request's kernel.
    pub kernel: Duration,
    /// Nanoseconds of 1000 iterations.
    pub pace: f64,
    /// When requests are submitted.
    pub due: Due,
    /// Time before the first request is due.
    pub offset: Duration,
    /// Number of requests.
    pub count: u32,
}

impl RequestSpec {
    /// Returns the time from the start to the end of the last interval or pause.
    pub fn length(&self) -> Duration {
        let (Due::Every(time) | Due::After(time)) = self.due;
        self.offset + time * self.count
    }
}

/// Requests that were made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Requests {
    /// Latencies from submission to the released semaphore, in milliseconds and in ascending
    /// order.
    pub latencies: Vec<f64>,
    /// Part of the GPU's time that the kernels need at the rate that was reached. The rate is lower
    /// than planned if requests take longer than their interval.
    pub used: f64,
}

/// Latencies of requests in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Latency {
    pub p50: f64,
    pub p99: f64,
    pub worst: f64,
}

impl Latency {
    /// Summarizes latencies in ascending order.
    pub fn of(sorted: &[f64]) -> Result<Self> {
        let at = |hundredths: usize| sorted.get(sorted.len() * hundredths / 100).copied();
        let worst = sorted.last().copied().context("There were no requests")?;
        Ok(Self { p50: at(50).unwrap_or(worst), p99: at(99).unwrap_or(worst), worst })
    }

    /// Returns median, 99th percentile and the longest as text.
    pub fn text(self) -> String {
        format!("{:.2} / {:.2} / {:.2} ms", self.p50, self.p99, self.worst)
    }
}

/// Makes the requests.
pub fn measure(device: &Device, spec: &RequestSpec) -> Result<Requests> {
    let kernel = spin(device, iterations(spec.kernel, spec.pace))?;
    let mut methods = Methods::new();
    kernel.push(&mut methods);
    let mut channel = Channel::new(device, EngineKind::Compute)?;
    // The software GPU needs the CPUs on which a waiting thread would spin.
    if !device.features().contains(Features::SOFT_PROGRAMS) {
        channel.set_wait_policy(WaitPolicy::spinning());
    }
    // The first run of a channel is slower than the others.
    channel.run(&methods)?;
    let mut latencies = Vec::with_capacity(spec.count as usize);
    let begun = Instant::now() + spec.offset;
    let mut due = begun;
    for _ in 0..spec.count {
        if let Due::After(pause) = spec.due {
            due = Instant::now() + pause;
        }
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let submitted = Instant::now();
        channel.run(&methods)?;
        latencies.push(submitted.elapsed().as_secs_f64() * 1e3);
        if let Due::Every(interval) = spec.due {
            due += interval;
        }
    }
    // The last request's interval belongs to the time.
    let took = due.max(Instant::now()).duration_since(begun);
    latencies.sort_by(f64::total_cmp);
    let used = spec.kernel.as_secs_f64() * f64::from(spec.count) / took.as_secs_f64();
    Ok(Requests { latencies, used })
}
