//! Kernels of a known length on a GPU whose clocks depend on its load.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use vgpu_guest::channel::Channel;
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::{Work, spin::Spin};

/// Shortest load before the result counts. An idle GPU has not raised its clocks before.
const WARM_UP: Duration = Duration::from_secs(2);
/// Limit of the whole calibration.
const LIMIT: Duration = Duration::from_secs(15);
/// Length of the kernels that are measured together.
const BATCH: Duration = Duration::from_millis(300);
/// Accepted difference from the wanted length, as a part of it.
const TOLERANCE: f64 = 0.02;

/// Sets the iterations of a kernel so that each of many queued launches takes `target` at the
/// clocks that the GPU has under load. Nothing else may use the GPU. Returns the measured length.
///
/// # Errors
///
/// Fails if the length does not come within 2 % of `target`.
pub fn calibrate_under_load(
    spin: &mut Spin,
    channel: &mut Channel,
    target: Duration,
) -> Result<Duration> {
    spin.calibrate(channel, target)?;
    let launches = (BATCH.as_nanos() / target.as_nanos().max(1)).clamp(2, 256) as u32;
    let begun = Instant::now();
    loop {
        let mut methods = Methods::new();
        spin.push(&mut methods);
        let since = Instant::now();
        for _ in 0..launches {
            channel.submit(&methods)?;
        }
        channel.wait_idle()?;
        let each = since.elapsed() / launches;
        let part = each.as_secs_f64() / target.as_secs_f64();
        if begun.elapsed() >= WARM_UP && (part - 1.0).abs() <= TOLERANCE {
            spin.prepare();
            return Ok(each);
        }
        ensure!(begun.elapsed() < LIMIT, "kernels of {each:?} do not come to {target:?}");
        let iterations = f64::from(spin.iterations()) / part;
        #[allow(clippy::cast_sign_loss, reason = "it is at least 1")]
        spin.set_iterations(iterations.clamp(1.0, f64::from(1 << 30)) as u32);
    }
}
