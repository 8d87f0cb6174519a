//! CUDA programs on vGPUs, against the same programs without a vGPU on the same GPU.
//!
//! `programs/programs.cu` is compiled on the machine; `programs/torch_programs.py` needs PyTorch.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::{Vgpud, cuda_library, kill_process, vgpuctl, wait_for};

use crate::fleet::mdev_type;
use crate::{Bench, GpuKind};

const TORCH: &str = include_str!("programs/torch_programs.py");

/// Number of turns of a program without a vGPU and on one.
const TURNS: usize = 5;

/// Video memory of a vGPU, as in the names of types.
const SIZE: &str = "-8C";

/// Duration of a load in seconds.
const LOAD_SECONDS: u32 = 5;

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

const RESULTS: [Figure; 2] = [
    figure("vector_addition", "vector addition", Promise::Right),
    figure("launches_by_kernels", "launches by kernels", Promise::Right),
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

/// Numbers by their names, as a program prints them.
type Numbers = BTreeMap<String, f64>;

fn number(line: &str) -> Option<(String, f64)> {
    let (name, value) = line.split_once(' ')?;
    Some((name.to_owned(), value.trim().parse().ok()?))
}

/// A running program, killed when dropped.
struct Running {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Running {
    fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn().with_context(|| format!("Cannot run {command:?}"))?;
        let output = BufReader::new(child.stdout.take().context("No standard output")?);
        Ok(Self { child, output })
    }

    /// Waits until the program says that it is ready.
    fn wait_until_ready(&mut self) -> Result<()> {
        let mut line = String::new();
        while self.output.read_line(&mut line)? > 0 {
            if line.trim_end() == "ready 1" {
                return Ok(());
            }
            line.clear();
        }
        bail!("A program has ended before it was ready")
    }

    /// Waits for the end and returns the numbers.
    fn finish(mut self) -> Result<Numbers> {
        let lines = self.output.by_ref().lines().collect::<std::io::Result<Vec<_>>>()?;
        let status = self.child.wait()?;
        ensure!(status.success(), "A program failed: {status}");
        Ok(lines.iter().filter_map(|line| number(line)).collect())
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The daemon, and how programs run on its vGPUs.
struct Host<'a> {
    vgpud: Vgpud,
    program: &'a Path,
    mdev_type: String,
}

impl<'a> Host<'a> {
    fn start(kind: GpuKind, options: &str, program: &'a Path) -> Result<Self> {
        let vgpud = Vgpud::start_with(&["--parent", &format!("{}{options}", kind.argument())])?;
        let mdev_type = mdev_type(&vgpud, SIZE)?;
        Ok(Self { vgpud, program, mdev_type })
    }

    /// Starts a vGPU with attributes.
    fn vgpu(&self, attrs: &Value) -> Result<String> {
        self.vgpud.create(&json!({ "mdev_type": self.mdev_type, "attrs": attrs, "run": true }))
    }

    /// Returns a command that runs `words` on a vGPU, or without one.
    fn command(&self, vgpu: Option<&str>, words: &[&str]) -> Result<Command> {
        let Some(vgpu) = vgpu else {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]);
            return Ok(command);
        };
        let mut command = Command::new(vgpuctl::path()?);
        command.arg("--socket").arg(self.vgpud.api_socket()).args(["run", "-u", vgpu, "--"]);
        command.args(words).env("TESSERA_CUDA_LIBRARY", cuda_library()?);
        Ok(command)
    }

    fn run(&self, vgpu: Option<&str>, words: &[&str]) -> Result<Numbers> {
        Running::start(self.command(vgpu, words)?)?.finish()
    }

    /// Starts a program of `programs.cu`.
    fn start_program(&self, vgpu: Option<&str>, words: &[&str]) -> Result<Running> {
        let program = self.program.to_str().context("The path is not UTF-8")?;
        Running::start(self.command(vgpu, &[&[program], words].concat())?)
    }

    /// Starts a load of kernels of some microseconds and waits until it begins.
    fn load(&self, vgpu: &str, microseconds: u32) -> Result<Running> {
        let (kernel, time) = (microseconds.to_string(), LOAD_SECONDS.to_string());
        let mut load = self.start_program(Some(vgpu), &["load", &kernel, &time])?;
        load.wait_until_ready()?;
        Ok(load)
    }

    /// Returns the work per second of a load alone.
    fn alone(&self, vgpu: &str, microseconds: u32) -> Result<f64> {
        work(&self.load(vgpu, microseconds)?.finish()?)
    }

    fn used_memory(&self, vgpu: &str) -> Result<u64> {
        let stats = self.vgpud.get("/v1/stats")?;
        let all = stats["vgpus"].as_array().context("No statistics")?;
        let found = all.iter().find(|one| one["uuid"] == vgpu).context("No statistics")?;
        Ok(found["programs"]["vram_used_bytes"].as_u64().unwrap_or(0))
    }
}

fn work(numbers: &Numbers) -> Result<f64> {
    numbers.get("work").copied().context("A load did not tell its work")
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Bench<'_> {
    /// Measures CUDA programs.
    pub fn programs(&mut self, program: Option<&Path>) -> Result<()> {
        let program = program.context("no program was compiled: nvcc is missing")?;
        let host = Host::start(self.kind, self.options, program)?;
        let path = program.to_str().context("The path is not UTF-8")?;
        let vgpu = host.vgpu(&json!([]))?;
        self.compare(&host, &vgpu, &[path, "results"], &RESULTS)?;
        self.compare(&host, &vgpu, &[path, "times"], &TIMES)?;
        if Command::new("python3").args(["-c", "import torch"]).output()?.status.success() {
            self.compare(&host, &vgpu, &["python3", "-c", TORCH], &PYTORCH)?;
        } else {
            eprintln!("gpu: no PyTorch here: its programs are left out");
        }
        let done = self.shares_of_work(&host);
        self.attempt("shares of work", done);
        let done = self.misbehaving_programs(&host, &vgpu);
        self.attempt("beside misbehaving programs", done);
        Ok(())
    }

    /// Compares figures of a program without a vGPU and on one, in turns.
    fn compare(
        &mut self,
        host: &Host<'_>,
        vgpu: &str,
        words: &[&str],
        figures: &[Figure],
    ) -> Result<()> {
        let (mut native, mut on_vgpu) = (Vec::new(), Vec::new());
        for _ in 0..TURNS {
            native.push(host.run(None, words)?);
            on_vgpu.push(host.run(Some(vgpu), words)?);
        }
        for Figure { name, what, promise } in figures {
            let of = |all: &[Numbers]| {
                median(all.iter().filter_map(|n| n.get(*name)).copied().collect())
            };
            let (native, vgpu) = (of(&native), of(&on_vgpu));
            let (verdict, kept) = promise.judge(native, vgpu);
            self.row(what, format!("{native:.3}"), format!("{vgpu:.3}"), verdict, kept);
        }
        Ok(())
    }

    /// Measures shares of the work that programs do alone.
    fn shares_of_work(&mut self, host: &Host<'_>) -> Result<()> {
        let core = |core: u32| host.vgpu(&json!([{ "core": core.to_string() }]));
        let (first, second) = (core(80)?, core(20)?);
        for (what, kernels) in [
            ("80/20, kernels of 250 us", [250, 250]),
            ("80/20, kernels of 5 ms", [5000, 5000]),
            ("80/20, kernels of 20 ms and 50 us", [20_000, 50]),
            ("80/20, kernels of 50 us and 20 ms", [50, 20_000]),
        ] {
            let alone = [host.alone(&first, kernels[0])?, host.alone(&second, kernels[1])?];
            let mut loads = Vec::new();
            for (vgpu, kernel) in [(&first, kernels[0]), (&second, kernels[1])] {
                loads.push(host.load(vgpu, kernel)?);
            }
            let mut parts = Vec::new();
            for (load, alone) in loads.into_iter().zip(alone) {
                parts.push(work(&load.finish()?)? / alone * 100.0);
            }
            let off = (parts[0] - 80.0).abs().max((parts[1] - 20.0).abs());
            let together = parts[0] + parts[1];
            let shares = format!("{:.1} / {:.1} %, together {together:.1}", parts[0], parts[1]);
            let verdict = format!("{off:.1} points off (2); together 97");
            self.row(
                what,
                "asked 80 / 20".to_owned(),
                shares,
                verdict,
                off <= 2.0 && together >= 97.0,
            );
        }
        let hard = host.vgpu(&json!([{ "core": "25" }, { "mode": "hard" }]))?;
        let part = host.alone(&hard, 250)? / host.alone(&first, 250)? * 100.0;
        let kept = (part - 25.0).abs() <= 2.0;
        let verdict = "25 +- 2".to_owned();
        self.row(
            "hard 25 alone, of work",
            "100 %".to_owned(),
            format!("{part:.1} %"),
            verdict,
            kept,
        );
        Ok(())
    }

    /// Measures a program beside others that misbehave on a vGPU with an equal share.
    fn misbehaving_programs(&mut self, host: &Host<'_>, bad: &str) -> Result<()> {
        let good = host.vgpu(&json!([]))?;
        let alone = host.alone(&good, 250)?;
        let mut endless = host.start_program(Some(bad), &["endless"])?;
        endless.wait_until_ready()?;
        let numbers = host.load(&good, 250)?.finish()?;
        let part = work(&numbers)? / alone * 100.0;
        let wait = numbers.get("longest_wait_ms").copied().unwrap_or(f64::NAN);
        let seen = format!("{part:.1} % of its work alone, waits {wait:.1} ms at most");
        let verdict = "47.5 % and 10 ms".to_owned();
        let kept = part >= 47.5 && wait <= 10.0;
        self.row("beside an endless kernel", String::new(), seen, verdict, kept);

        kill_process(endless.pid(), Signal::SIGKILL)?;
        let killed = Instant::now();
        wait_for("the memory of a killed program", || {
            host.used_memory(bad).is_ok_and(|bytes| bytes == 0)
        })?;
        let took = killed.elapsed();
        let kept = took <= Duration::from_secs(1);
        let seen = format!("{:.2} s", took.as_secs_f64());
        self.row("memory of a killed program", String::new(), seen, "1 s".to_owned(), kept);

        let load = host.load(&good, 250)?;
        let fault = host.start_program(Some(bad), &["fault"])?.finish()?;
        let part = work(&load.finish()?)? / alone * 100.0;
        let error = fault.get("error").copied().unwrap_or(f64::NAN);
        let seen = format!("{part:.1} % of its work alone; the faulty one gets error {error}");
        let kept = part >= 90.0 && (error - 700.0).abs() < 0.5;
        self.row("beside a fault", String::new(), seen, "90 %, error 700".to_owned(), kept);
        Ok(())
    }
}
