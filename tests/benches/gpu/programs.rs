//! CUDA programs on vGPUs, against the same programs without a vGPU on the same GPU.
//!
//! `programs/programs.cu` is compiled on the machine. `programs/torch_programs.py` needs PyTorch,
//! and `programs/frameworks.py` runs those of CuPy, Triton and JAX that are installed.
//! `programs/features.cu` and `programs/libraries.py` try many features and libraries.

pub mod host;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::json;
use system_tests::{kill_process, wait_for};

use self::host::{Host, Load, Numbers, together, work};
use crate::Bench;

/// Measurement, by the path of the compiled programs.
type Measure = fn(&mut Bench<'_>, &Path) -> Result<()>;

/// Measurements by their names.
pub const PARTS: [(&str, Measure); 4] = [
    ("program-results", |bench, program| bench.program_results(program)),
    ("program-features", |bench, program| bench.program_features(program)),
    ("program-shares", |bench, program| bench.program_shares(program)),
    ("program-trouble", |bench, program| bench.program_trouble(program)),
];

/// Number of turns of a program without a vGPU and on one.
const TURNS: usize = 5;

/// Video memory of a vGPU, as in the names of types.
const SIZE: &str = "-8C";

/// Number of vGPUs with two programs each, and their video memory.
const MANY: usize = 8;
const SIZE_OF_MANY: &str = "-2C";

/// Figure of a program and its promise.
struct Figure {
    name: &'static str,
    what: &'static str,
    promise: Promise,
}

/// What a figure on a vGPU may be, compared with the figure without one.
#[derive(Clone, Copy)]
enum Promise {
    /// 1, as without a vGPU.
    Right,
    /// At least this part.
    AtLeast(f64),
    /// At most this multiple.
    AtMost(f64),
    /// At most this much more.
    More(f64),
}

impl Promise {
    fn judge(self, native: f64, vgpu: f64) -> (String, bool) {
        let ratio = vgpu / native;
        match self {
            Self::Right => ("right".to_owned(), (native - 1.0).abs() + (vgpu - 1.0).abs() == 0.0),
            Self::AtLeast(bound) => (format!("{ratio:.3} ({bound})"), ratio >= bound),
            Self::AtMost(bound) => (format!("{ratio:.3} (at most {bound})"), ratio <= bound),
            Self::More(bound) => {
                let more = vgpu - native;
                (format!("{more:+.2} (at most {bound:+})"), more <= bound)
            }
        }
    }
}

const fn figure(name: &'static str, what: &'static str, promise: Promise) -> Figure {
    Figure { name, what, promise }
}

const RESULTS: [Figure; 4] = [
    figure("vector_addition", "vector addition", Promise::Right),
    figure("launches_by_kernels", "launches by kernels", Promise::Right),
    figure("ptx", "PTX, compiled by the driver", Promise::Right),
    figure("cublas", "cuBLAS, matrix product", Promise::Right),
];

const RESULTS_OF_FRAMEWORKS: [Figure; 3] = [
    figure("cupy", "CuPy, kernel and FFT", Promise::Right),
    figure("triton", "Triton, vector addition", Promise::Right),
    figure("jax", "JAX, matrix product", Promise::Right),
];

const RESULTS_OF_PROCESSES: [Figure; 3] = [
    figure("shared_tensors", "PyTorch, tensors between processes", Promise::Right),
    figure("shared_event", "PyTorch, events between processes", Promise::Right),
    figure("long_waits", "PyTorch, waits of some seconds", Promise::Right),
];

const TIMES: [Figure; 9] = [
    figure("start_ms", "cuInit and context, ms", Promise::AtMost(1.0)),
    figure("launch_and_wait_us", "launch and wait, us", Promise::More(2.0)),
    figure("queued_launch_us", "queued launch, us", Promise::AtMost(1.1)),
    figure("small_copy_us", "copy of 64 bytes and wait, us", Promise::More(2.0)),
    figure("pinned_up_gbs", "pinned copies to the GPU, GB/s", Promise::AtLeast(0.98)),
    figure("pinned_down_gbs", "pinned copies from the GPU, GB/s", Promise::AtLeast(0.98)),
    figure("pageable_up_gbs", "pageable copies to the GPU, GB/s", Promise::AtLeast(0.95)),
    figure("pageable_down_gbs", "pageable copies from the GPU, GB/s", Promise::AtLeast(0.95)),
    figure("graph_us", "graph of 20 kernels, us", Promise::AtMost(1.05)),
];

const PYTORCH: [Figure; 4] = [
    figure("bf16_tflops", "PyTorch, bf16 matrix product, TFLOP/s", Promise::AtLeast(0.98)),
    figure("fp32_tflops", "PyTorch, fp32 matrix product, TFLOP/s", Promise::AtLeast(0.98)),
    figure("training_step_ms", "PyTorch, training step, ms", Promise::AtMost(1.05)),
    figure("loss_falls", "PyTorch, the loss falls", Promise::Right),
];

/// Errors of kernels that `programs.cu` makes.
const ERRORS: [&str; 5] = ["address", "alignment", "instruction", "trap", "assertion"];

/// Returns whether python3 has a module.
fn has_module(name: &str) -> bool {
    let output = Command::new("python3").args(["-c", &format!("import {name}")]).output();
    output.is_ok_and(|output| output.status.success())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Bench<'_> {
    /// Measures results and times of CUDA programs.
    pub fn program_results(&mut self, program: &Path) -> Result<()> {
        let host = Host::start(self.kind, self.options, program, SIZE)?;
        let path = program.to_str().context("The path is not UTF-8")?;
        let vgpu = host.vgpu(&json!([]))?;
        let [torch, shared, frameworks] =
            ["torch", "shared", "frameworks"].map(|name| host.script(name));
        let has_torch = has_module("torch");
        for (words, figures, turns, is_here) in [
            (&[path, "results"], RESULTS.as_slice(), TURNS, true),
            (&[path, "times"], TIMES.as_slice(), TURNS, true),
            (&["python3", torch.as_str()], PYTORCH.as_slice(), TURNS, has_torch),
            (&["python3", shared.as_str()], RESULTS_OF_PROCESSES.as_slice(), 1, has_torch),
            (
                &["python3", frameworks.as_str()],
                RESULTS_OF_FRAMEWORKS.as_slice(),
                1,
                has_module("sys"),
            ),
        ] {
            if is_here {
                self.attempt(&format!("{} on a vGPU", words.join(" ")), |bench| {
                    bench.compare(&host, &vgpu, words, figures, turns)
                });
            } else {
                eprintln!("gpu: {} is left out: Python or PyTorch is missing", words[1]);
            }
        }
        Ok(())
    }

    /// Compares the results of CUDA's features and libraries without a vGPU and on one.
    pub fn program_features(&mut self, program: &Path) -> Result<()> {
        let host = Host::start(self.kind, self.options, program, SIZE)?;
        let vgpu = host.vgpu(&json!([]))?;
        let features = self.features.map(|path| path.to_string_lossy().into_owned());
        let libraries = host.script("libraries");
        let features: Vec<_> = features.iter().map(String::as_str).collect();
        let path = program.to_str().context("The path is not UTF-8")?;
        let mut programs = vec![features];
        programs.extend(ERRORS.map(|error| vec![path, "error", error]));
        if has_module("torch") {
            programs.push(vec!["python3", &libraries]);
        }
        for words in programs.into_iter().filter(|words| !words.is_empty()) {
            let native = host.results(None, &words)?;
            let on_vgpu = host.results(Some(&vgpu), &words)?;
            for (name, native) in &native {
                let vgpu = on_vgpu.get(name).copied().unwrap_or(f64::NAN);
                // What fails natively says nothing about the vGPU.
                let kept = vgpu.to_bits() == native.to_bits();
                let verdict = if kept { "the same" } else { "another result" };
                let error = if words.contains(&"error") { "error of a kernel: " } else { "" };
                let what = format!("{error}{}", name.replace('_', " "));
                self.row(&what, native.to_string(), vgpu.to_string(), verdict.to_owned(), kept);
            }
        }
        Ok(())
    }

    /// Measures vGPUs whose programs compete.
    pub fn program_shares(&mut self, program: &Path) -> Result<()> {
        let host = Host::start(self.kind, self.options, program, SIZE)?;
        self.attempt("shares of work", |bench| bench.shares_of_work(&host));
        drop(host);
        let host = Host::start(self.kind, self.options, program, SIZE)?;
        self.attempt("hard 25 alone, of work", |bench| bench.hard_cap(&host));
        drop(host);
        let host = Host::start(self.kind, self.options, program, SIZE_OF_MANY)?;
        self.many_programs(&host)
    }

    /// Measures vGPUs with equal shares and two programs each.
    fn many_programs(&mut self, host: &Host<'_>) -> Result<()> {
        let vgpus = (0..MANY).map(|_| host.vgpu(&json!([]))).collect::<Result<Vec<_>>>()?;
        let alone = host.alone(&vgpus[0], 5000)?;
        let mut loads = Vec::new();
        for vgpu in vgpus.iter().chain(&vgpus) {
            loads.push(host.kernels(vgpu, 5000)?);
        }
        let work = together(loads)?;
        let parts: Vec<f64> =
            (0..MANY).map(|index| (work[index] + work[index + MANY]) / alone * 100.0).collect();
        let least = parts.iter().copied().fold(f64::INFINITY, f64::min);
        let most = parts.iter().copied().fold(0.0, f64::max);
        let total: f64 = parts.iter().sum();
        let asked = 100.0 / MANY as f64;
        let kept = least >= asked - 2.0 && most <= asked + 2.0;
        let seen = format!("{least:.1} to {most:.1} %, together {total:.1}");
        let verdict = format!("{asked} +- 2 each");
        self.row("two programs on each of eight vGPUs", String::new(), seen, verdict, kept);
        Ok(())
    }

    /// Compares figures of a program without a vGPU and on one, in turns.
    fn compare(
        &mut self,
        host: &Host<'_>,
        vgpu: &str,
        words: &[&str],
        figures: &[Figure],
        turns: usize,
    ) -> Result<()> {
        let (mut native, mut on_vgpu) = (Vec::new(), Vec::new());
        for _ in 0..turns {
            native.push(host.run(None, words)?);
            on_vgpu.push(host.run(Some(vgpu), words)?);
        }
        for Figure { name, what, promise } in figures {
            let of = |all: &[Numbers]| {
                median(all.iter().filter_map(|n| n.get(*name)).copied().collect())
            };
            let (native, vgpu) = (of(&native), of(&on_vgpu));
            if native.is_nan() {
                eprintln!("gpu: {what}: not on this machine");
                continue;
            }
            let (verdict, kept) = promise.judge(native, vgpu);
            self.row(what, format!("{native:.3}"), format!("{vgpu:.3}"), verdict, kept);
        }
        Ok(())
    }

    /// Measures shares of the work that programs do alone.
    fn shares_of_work(&mut self, host: &Host<'_>) -> Result<()> {
        let core = |core: u32| host.vgpu(&json!([{ "core": core.to_string() }]));
        let vgpus = [core(80)?, core(20)?];
        for (what, kernels) in [
            ("80/20, kernels of 250 us", [250, 250]),
            ("80/20, kernels of 5 ms", [5000, 5000]),
            ("80/20, kernels of 20 ms and 50 us", [20_000, 50]),
            ("80/20, kernels of 50 us and 20 ms", [50, 20_000]),
        ] {
            let load = |index: usize| host.kernels(&vgpus[index], kernels[index]);
            self.share_of_work(host, &vgpus, what, load)?;
        }
        if !has_module("torch") {
            eprintln!("gpu: training is left out: PyTorch is missing");
            return Ok(());
        }
        for (what, word) in [
            ("80/20, PyTorch training", "train"),
            ("80/20, PyTorch training that waits for each step", "train-and-wait"),
        ] {
            let words = ["python3", &host.script("torch"), word];
            self.share_of_work(host, &vgpus, what, |index| host.load(&vgpus[index], &words))?;
        }
        Ok(())
    }

    /// Measures a hard cap of a vGPU that has the GPU for itself.
    fn hard_cap(&mut self, host: &Host<'_>) -> Result<()> {
        let hard = host.vgpu(&json!([{ "core": "25" }, { "mode": "hard" }]))?;
        let whole = host.alone(&host.vgpu(&json!([]))?, 250)?;
        let part = host.alone(&hard, 250)? / whole * 100.0;
        let kept = (part - 25.0).abs() <= 2.0;
        let seen = format!("{part:.1} %");
        self.row("hard 25 alone, of work", "100 %".to_owned(), seen, "25 +- 2".to_owned(), kept);
        Ok(())
    }

    /// Compares the work of two loads at the same time with the work of each alone.
    fn share_of_work(
        &mut self,
        host: &Host<'_>,
        vgpus: &[String; 2],
        what: &str,
        load: impl Fn(usize) -> Result<Load>,
    ) -> Result<()> {
        let alone = [together(vec![load(0)?])?[0], together(vec![load(1)?])?[0]];
        let loads = vec![load(0)?, load(1)?];
        let before = host.engine_seconds(vgpus)?;
        let both = together(loads)?;
        let after = host.engine_seconds(vgpus)?;
        let engine = [after[0] - before[0], after[1] - before[1]];
        let engine = engine.map(|seconds| seconds / (engine[0] + engine[1]) * 100.0);
        let parts = [both[0] / alone[0] * 100.0, both[1] / alone[1] * 100.0];
        let sum = parts[0] + parts[1];
        let off = (parts[0] - 80.0).abs().max((parts[1] - 20.0).abs());
        let shares = format!(
            "{:.1} / {:.1} %, together {sum:.1}; engine time {:.1} / {:.1} %",
            parts[0], parts[1], engine[0], engine[1]
        );
        let verdict = format!("{off:.1} points off (2); together 97");
        let kept = off <= 2.0 && sum >= 97.0;
        self.row(what, "asked 80 / 20".to_owned(), shares, verdict, kept);
        Ok(())
    }

    /// Measures a program beside others that misbehave on a vGPU with an equal share.
    pub fn program_trouble(&mut self, program: &Path) -> Result<()> {
        let host = Host::start(self.kind, self.options, program, SIZE)?;
        let (bad, good) = (host.vgpu(&json!([]))?, host.vgpu(&json!([]))?);
        let alone = host.alone(&good, 250)?;
        let mut endless = host.start_program(Some(&bad), &["endless"])?;
        endless.wait_until_ready()?;
        let load = host.kernels(&good, 250)?;
        load.start()?;
        let numbers = load.finish()?;
        let part = work(&numbers)? / alone * 100.0;
        let wait = numbers.get("longest_wait_ms").copied().unwrap_or(f64::NAN);
        let seen = format!("{part:.1} % of its work alone, waits {wait:.1} ms at most");
        let verdict = "47.5 % and 10 ms".to_owned();
        let kept = part >= 47.5 && wait <= 10.0;
        self.row("beside an endless kernel", String::new(), seen, verdict, kept);

        kill_process(endless.pid(), Signal::SIGKILL)?;
        let killed = Instant::now();
        wait_for("the memory of a killed program", || {
            host.used_memory(&bad).is_ok_and(|bytes| bytes == 0)
        })?;
        let took = killed.elapsed();
        let kept = took <= Duration::from_secs(1);
        let seen = format!("{:.2} s", took.as_secs_f64());
        self.row("memory of a killed program", String::new(), seen, "1 s".to_owned(), kept);

        let load = host.kernels(&good, 250)?;
        let mut flood = host.start_program(Some(&bad), &["flood", "3"])?;
        flood.wait_until_ready()?;
        load.start()?;
        let rate = flood.next_number()?;
        kill_process(flood.pid(), Signal::SIGKILL)?;
        let numbers = load.finish()?;
        let part = work(&numbers)? / alone * 100.0;
        let wait = numbers.get("longest_wait_ms").copied().unwrap_or(f64::NAN);
        let seen = format!(
            "{part:.1} % of its work alone, waits {wait:.1} ms at most; {rate:.0} calls a second"
        );
        let kept = part >= 90.0 && wait <= 100.0 && rate > 100.0;
        let verdict = "90 %, 100 ms, over 100 calls".to_owned();
        self.row("beside a flood of requests, then killed", String::new(), seen, verdict, kept);

        let load = host.kernels(&good, 250)?;
        load.start()?;
        let fault = host.start_program(Some(&bad), &["error", "address"])?.finish()?;
        let part = work(&load.finish()?)? / alone * 100.0;
        let error = fault.get("address").copied().unwrap_or(f64::NAN);
        let seen = format!("{part:.1} % of its work alone; the faulty one gets error {error}");
        let kept = part >= 90.0 && (error - 700.0).abs() < 0.5;
        self.row("beside a fault", String::new(), seen, "90 %, error 700".to_owned(), kept);
        Ok(())
    }
}
