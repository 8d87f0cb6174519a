//! Two to 64 busy vGPUs on one GPU: shares of the work, and the total against one vGPU alone.
//!
//! The second half of the vGPUs has twice the `core` of the first half. The work is kernels of the
//! guest runtime and, on NVIDIA GPUs, of CUDA programs.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use crate::fleet::{TYPE, instances};
use crate::load::{LoadSpec, Window};
use crate::programs::host::{Host, Running, work};
use crate::tenant::{self, Tenant};
use crate::{Bench, GpuKind, MIDDLE};

/// Numbers of vGPUs.
const COUNTS: [usize; 7] = [2, 4, 8, 12, 16, 32, 64];
const QUICK_COUNTS: [usize; 2] = [2, 12];

/// Default slice of an NVIDIA GPU. `n` busy vGPUs need `n` slices for a round.
const SLICE: Duration = Duration::from_millis(12);
/// Rounds of a window, and rounds before it.
const ROUNDS: u32 = 20;
const ROUNDS_BEFORE: u32 = 4;
/// Shortest window of a measurement that is not quick.
const SHORTEST: Duration = Duration::from_secs(8);

/// Length of a CUDA program's kernels, in microseconds.
const PROGRAM_KERNEL: u32 = 600;

/// Bounds of a vGPU's work against its due, and of the total against one vGPU alone.
const LEAST: f64 = 0.98;
const MOST: f64 = 1.02;
const TOTAL: f64 = 0.94;

/// Load of a measurement.
#[derive(Clone, Copy)]
enum Work<'a> {
    /// Kernels of the guest runtime.
    Runtime,
    /// This CUDA program.
    Program(&'a Path),
}

/// Seconds of kernels per second: of one vGPU alone, and of each of several together.
struct Rates {
    alone: f64,
    together: Vec<f64>,
}

impl Bench<'_> {
    /// Measures busy vGPUs in growing numbers.
    pub fn many(&mut self, quick: bool, program: Option<&Path>) -> Result<()> {
        let counts = if quick { QUICK_COUNTS.as_slice() } else { &COUNTS };
        self.many_of("kernels of 500 us", counts, quick, Work::Runtime)?;
        if self.kind != GpuKind::Nvidia {
            return Ok(());
        }
        let what = format!("CUDA, kernels of some {PROGRAM_KERNEL} us");
        if let Some(program) = program {
            return self.many_of(&what, counts, quick, Work::Program(program));
        }
        let why = "skipped: nvcc is missing, nothing was compiled".to_owned();
        self.row(&what, String::new(), String::new(), why, true);
        Ok(())
    }

    /// Measures numbers of vGPUs with one kind of work. A number for which the video memory is too
    /// small is replaced by the largest that fits.
    fn many_of(&mut self, what: &str, counts: &[usize], quick: bool, of: Work<'_>) -> Result<()> {
        let largest = counts.iter().copied().max().unwrap_or_default();
        let most = instances(self.kind, &self.options_for(largest))?;
        let mut last = 0;
        for &wanted in counts {
            let count = wanted.min(most);
            if count == last {
                continue;
            }
            last = count;
            let memory =
                if count < wanted { format!(" ({wanted} do not fit)") } else { String::new() };
            let what = format!("{count} busy vGPUs{memory}, {what}");
            self.attempt(&what, |bench| {
                let window = bench.many_window(count, quick);
                let rates = match of {
                    Work::Runtime => bench.many_tenants(count, window),
                    Work::Program(program) => bench.many_cuda_programs(program, count, window),
                }?;
                bench.many_row(&what, &rates);
                Ok(())
            });
        }
        Ok(())
    }

    /// Adds the row of a number of vGPUs.
    fn many_row(&mut self, what: &str, rates: &Rates) {
        let total: f64 = rates.together.iter().sum();
        let cores = cores(rates.together.len());
        let sum: u32 = cores.iter().sum();
        let parts = rates.together.iter().zip(&cores);
        let parts = parts.map(|(rate, core)| rate / total * f64::from(sum) / f64::from(*core));
        let (least, most) =
            parts.fold((f64::MAX, f64::MIN), |(least, most), one| (least.min(one), most.max(one)));
        let whole = total / rates.alone;
        let alone = format!("one alone {:.1} % busy", rates.alone * 100.0);
        let seen = format!("{least:.3} to {most:.3} of the due, total {whole:.3} of one");
        let kept = least >= LEAST && most <= MOST && whole >= TOTAL;
        self.row(what, alone, seen, format!("{LEAST} to {MOST}, total {TOTAL}"), kept);
        if !kept && self.promised() {
            let list = rates.together.iter().zip(&cores);
            let list: Vec<_> =
                list.map(|(rate, core)| format!("{core}: {:.2}", rate * 100.0)).collect();
            eprintln!("  `core` and work of each in percent: {}", list.join(", "));
        }
    }

    /// Returns the window in which so many vGPUs are measured. A vGPU's work comes in slices, one
    /// in each round, so the window has many rounds, and its ramps have whole ones.
    fn many_window(&self, count: usize, quick: bool) -> Window {
        let mut length = self.window;
        if self.promised() {
            length = length.max(round(count) * ROUNDS);
        }
        if !quick {
            length = length.max(SHORTEST);
        }
        Window::new(self.settle.max(round(count) * ROUNDS_BEFORE), length)
    }

    fn window_alone(&self) -> Window {
        Window::new(self.settle, self.window)
    }

    /// Measures kernels of the guest runtime.
    fn many_tenants(&self, count: usize, window: Window) -> Result<Rates> {
        let mut fleet = self.large_fleet(&attributes(count))?;
        let load = self.kernels(MIDDLE);
        let alone = self.rates(&mut fleet.tenants[..1], load, self.window_alone())?;
        let together = self.rates(&mut fleet.tenants, load, window)?;
        Ok(Rates { alone: alone.iter().sum(), together })
    }

    /// Starts a load on all tenants and measures all in the same window.
    fn rates(&self, tenants: &mut [Tenant], load: LoadSpec, window: Window) -> Result<Vec<f64>> {
        self.start_loads_of(tenants, &vec![load; tenants.len()])?;
        tenant::rates(tenants, window)
    }

    /// Measures CUDA programs.
    fn many_cuda_programs(&self, program: &Path, count: usize, window: Window) -> Result<Rates> {
        let host = Host::start(self.kind, self.options, program, TYPE)?;
        let vgpus = attributes(count);
        let vgpus = vgpus.iter().map(|attrs| host.vgpu(attrs)).collect::<Result<Vec<_>>>()?;
        let alone = program_rates(&host, &vgpus[..1], self.window_alone())?;
        let together = program_rates(&host, &vgpus, window)?;
        Ok(Rates { alone: alone.iter().sum(), together })
    }
}

/// Runs a CUDA program on each vGPU and measures all in the same window.
fn program_rates(host: &Host<'_>, vgpus: &[String], window: Window) -> Result<Vec<f64>> {
    let start = host.start_file();
    let started = vgpus.iter().map(|vgpu| host.queued(vgpu, PROGRAM_KERNEL, window, &start));
    let mut programs = started.collect::<Result<Vec<_>>>()?;
    programs.iter_mut().try_for_each(Running::wait_until_ready)?;
    start.begin()?;
    programs.into_iter().map(|program| work(&program.finish()?)).collect()
}

/// Returns the shares of so many vGPUs: the second half has twice the share of the first.
fn cores(count: usize) -> Vec<u32> {
    let first = count / 2;
    let low = 100 / (first + 2 * (count - first)).max(1) as u32;
    (0..count).map(|index| if index < first { low } else { 2 * low }).collect()
}

fn attributes(count: usize) -> Vec<Value> {
    cores(count).iter().map(|core| json!([{ "core": core.to_string() }])).collect()
}

fn round(count: usize) -> Duration {
    SLICE * count as u32
}
