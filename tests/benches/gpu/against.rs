//! A vGPU compared with a plain client of the GPU and with CUDA, each alone, alternating.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use crate::cuda::Cuda;
use crate::kernels::{KernelSpec, Which};
use crate::solo::{Solo, SoloSpec, median};
use crate::tenant::Tenant;
use crate::{Bench, GpuKind, RAM, load};

/// Number of measurements of each contender.
const ROUNDS: u32 = 5;

/// A figure measured for both contenders.
type Figure = fn(&Solo) -> f64;

impl Bench<'_> {
    pub fn solo_spec(&self, quick: bool) -> SoloSpec {
        match (quick, self.kind) {
            (true, _) => {
                SoloSpec { bytes: 2 << 20, time: Duration::from_millis(50), rows: 64, trips: 200 }
            }
            (false, GpuKind::Soft) => {
                SoloSpec { bytes: 64 << 20, time: Duration::from_secs(1), rows: 256, trips: 20_000 }
            }
            (false, GpuKind::Nvidia) => SoloSpec {
                bytes: 128 << 20,
                time: Duration::from_millis(200),
                rows: 2048,
                trips: 4000,
            },
        }
    }

    /// Measures client and vGPU in alternating order, so that other load affects both alike.
    pub fn solo(&mut self, plain: &mut Tenant, quick: bool) -> Result<()> {
        let spec = self.solo_spec(quick);
        let mut fleet = self.fleet(RAM, &[json!([])])?;
        let (mut plains, mut vgpus) = (Vec::new(), Vec::new());
        for round in 0..if quick { 1 } else { ROUNDS } {
            // The order alternates between rounds.
            if round % 2 == 0 {
                plains.push(plain.solo(&spec)?);
            }
            vgpus.push(fleet.tenants[0].solo(&spec)?);
            if round % 2 != 0 {
                plains.push(plain.solo(&spec)?);
            }
        }
        drop(fleet);
        let figures: [(&str, Figure, &str); 4] = [
            ("copy, video memory to video memory", |solo| solo.video, "GB/s"),
            ("copy, RAM to video memory", |solo| solo.to_video, "GB/s"),
            ("copy, video memory to RAM", |solo| solo.from_video, "GB/s"),
            ("matrix product", |solo| solo.product, "GFLOP/s"),
        ];
        let (one, other) = (Solo::median(&plains), Solo::median(&vgpus));
        for (what, figure, unit) in figures {
            let ratios: Vec<f64> =
                plains.iter().zip(&vgpus).map(|(a, b)| figure(b) / figure(a)).collect();
            let ratio = median(ratios.iter().copied());
            let show = |solo| format!("{:.1} {unit}", figure(solo));
            let (least, most) = bounds(&ratios);
            let verdict = format!("{ratio:.3} (0.99), {least:.3} to {most:.3}");
            self.row(what, show(&one), show(&other), verdict, ratio >= 0.99);
        }
        let show = |solo: &Solo| format!("{:.2} / {:.2} us", solo.p50, solo.p99);
        let ratio = other.p50 / one.p50;
        let verdict = format!("{ratio:.2} (1.1)");
        let what = "doorbell to semaphore, p50 / p99, mapped";
        self.row(what, show(&one), show(&other), verdict, ratio <= 1.1);
        if self.kind == GpuKind::Nvidia {
            let options = std::mem::replace(&mut self.options, ",doorbell=direct");
            let fleet = self.fleet(RAM, &[json!([])]);
            self.options = options;
            let spec = SoloSpec { time: Duration::from_millis(50), ..spec.clone() };
            let other = fleet?.tenants[0].solo(&spec)?;
            let ratio = other.p50 / one.p50;
            let verdict = format!("{ratio:.2} (1.1)");
            let what = "the same, doorbell=direct";
            self.row(what, show(&one), show(&other), verdict, ratio <= 1.1);
        }
        let trapped = json!([{ "doorbell": "trapped" }]);
        let mut fleet = self.fleet(RAM, &[trapped])?;
        let spec = SoloSpec { time: Duration::from_millis(50), trips: spec.trips / 2, ..spec };
        let other = fleet.tenants[0].solo(&spec)?;
        let verdict = format!("{:.2}", other.p50 / one.p50);
        self.row("the same, trapped", show(&one), show(&other), verdict, true);
        Ok(())
    }

    /// Measures the same kernels by CUDA in a separate process and by a vGPU, alternating.
    pub fn cuda(&mut self, program: Option<&Path>) -> Result<()> {
        let skipped = |bench: &mut Self, why: &str| {
            let what = "kernels against CUDA's";
            let verdict = format!("skipped: {why}");
            bench.row(what, String::new(), String::new(), verdict, true);
            Ok(())
        };
        let Some(program) = program else { return skipped(self, "no program is named by --cuda") };
        let mut cuda = match Cuda::start(program, self.cubin) {
            Ok(cuda) => cuda,
            Err(error) => return skipped(self, &format!("{error:#}")),
        };
        let mut fleet = self.fleet(RAM, &[json!([])])?;
        // Calibrated by CUDA's clock, so that a kernel has the stated length.
        let long = KernelSpec { which: Which::Spin(100_000), count: 200, batch: 1, waits: false };
        let pace = cuda.measure(&long)? * 10.0;
        let spin = |us: u64| Which::Spin(load::iterations(Duration::from_micros(us), pace));
        let sets = [
            ("kernels of 50 us", spin(50), 4000, 1),
            ("kernels of 250 us", spin(250), 1000, 1),
            ("kernels of 250 us, eight in a submission", spin(250), 1000, 8),
            ("kernels of 500 us", spin(500), 500, 1),
            ("kernels of 1 ms", spin(1000), 250, 1),
            ("matrix product, 2048 rows", Which::Product(2048), 100, 1),
        ];
        for (what, which, count, batch) in sets {
            let spec = KernelSpec { which, count, batch, waits: false };
            let (mut theirs, mut ours) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                theirs.push(cuda.measure(&spec)?);
                ours.push(fleet.tenants[0].kernels(spec)?);
            }
            let ratios: Vec<f64> = theirs.iter().zip(&ours).map(|(a, b)| a / b).collect();
            let ratio = median(ratios.iter().copied());
            let (least, most) = bounds(&ratios);
            let show = |of: &[f64]| format!("{:.1} us", median(of.iter().copied()));
            let promised = which != spin(50);
            let verdict = format!(
                "{ratio:.3} of CUDA's speed{}, {least:.3} to {most:.3}",
                if promised { " (0.98)" } else { "" }
            );
            let cuda = format!("CUDA {}", show(&theirs));
            self.row(what, cuda, show(&ours), verdict, ratio >= 0.98 || !promised);
        }
        Ok(())
    }
}

fn bounds(of: &[f64]) -> (f64, f64) {
    of.iter().fold((f64::MAX, f64::MIN), |(least, most), one| (least.min(*one), most.max(*one)))
}
