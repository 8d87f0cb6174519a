//! Cost of doorbells rung by the worker: latency after pauses, and the worker's CPU time.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;

use crate::kernels::{KernelSpec, Which};
use crate::load::{LoadSpec, iterations};
use crate::solo::SoloSpec;
use crate::tenant::{self, Order, Tenant};
use crate::{Bench, MIDDLE, SHORT, SMALL_RAM};

/// Pauses and numbers of repetitions.
const PAUSES: [(u64, usize); 3] = [(5, 100), (50, 60), (400, 12)];

impl Bench<'_> {
    /// Measures doorbells after pauses, for the client, for vGPUs with relayed doorbells and for
    /// vGPUs with direct ones; then the worker's CPU time.
    pub fn pauses(&mut self, plain: &mut Tenant) -> Result<()> {
        let polled = self.fleet(SMALL_RAM, &[json!([])])?;
        let options = std::mem::replace(&mut self.options, ",doorbell=direct");
        let direct = self.fleet(SMALL_RAM, &[json!([])]);
        self.options = options;
        let (mut polled, mut direct) = (polled, direct?);
        for (pause, count) in PAUSES {
            let after = |tenant: &mut Tenant| -> Result<String> {
                tenant.tell(&Order::Pauses(Duration::from_millis(pause), count))?;
                let (p50, p99) = tenant.hear::<(f64, f64)>()?;
                Ok(format!("{p50:.1} / {p99:.1} us"))
            };
            let what = format!("doorbell to semaphore after {pause} ms, p50 / p99");
            let (alone, other) = (after(plain)?, after(&mut polled.tenants[0])?);
            let own = format!("doorbell=direct {}", after(&mut direct.tenants[0])?);
            self.row(&what, alone, other, own, true);
        }
        drop(direct);
        for (what, load) in [
            ("a core of the worker's, kernels of 500 us queued", Some(MIDDLE)),
            ("the same, kernels of 50 us", Some(SHORT)),
            ("the same, one ring after the other", None),
            ("the same, nothing to do", None),
        ] {
            let begun;
            let before;
            if let Some(kernel) = load {
                polled.tenants[0].load(self.kernels(kernel))?;
                std::thread::sleep(self.settle);
                (begun, before) = (Instant::now(), polled.processor_time(0)?);
                tenant::measure(&mut polled.tenants, self.window)?;
            } else if what.ends_with("nothing to do") {
                std::thread::sleep(self.settle);
                (begun, before) = (Instant::now(), polled.processor_time(0)?);
                std::thread::sleep(self.window);
            } else {
                // Ends the tenant's load.
                polled.tenants[0].load(LoadSpec::default())?;
                (begun, before) = (Instant::now(), polled.processor_time(0)?);
                let spec = SoloSpec { trips: 200_000, ..self.solo_spec(true) };
                polled.tenants[0].solo(&spec)?;
            }
            let used = polled.processor_time(0)? - before;
            let part = format!("{:.1} %", used / begun.elapsed().as_secs_f64() * 100.0);
            self.row(what, String::new(), part, String::new(), true);
        }
        for us in [50, 200, 1000, 5000] {
            let spin = iterations(Duration::from_micros(us), self.pace);
            let (which, count) = (Which::Spin(spin), u32::try_from(2_000_000 / us)?);
            let spec = KernelSpec { which, count, batch: 1, waits: true };
            let (begun, before) = (Instant::now(), polled.processor_time(0)?);
            let took = polled.tenants[0].kernels(spec)?;
            let used = polled.processor_time(0)? - before;
            let part = used / begun.elapsed().as_secs_f64() * 100.0;
            let alone = format!("{:.1} us each", plain.kernels(spec)?);
            let what = format!("the same, kernels of {us} us, each waited for");
            self.row(&what, alone, format!("{part:.1} %, {took:.1} us each"), String::new(), true);
        }
        Ok(())
    }
}
