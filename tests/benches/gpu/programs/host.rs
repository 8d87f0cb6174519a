//! The daemon, and programs and loads on its vGPUs.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use system_tests::{Vgpud, cuda_library, vgpuctl};

use crate::GpuKind;
use crate::fleet::mdev_type;
use crate::load::Window;

const TORCH: &str = include_str!("torch_programs.py");
const FRAMEWORKS: &str = include_str!("frameworks.py");
const LIBRARIES: &str = include_str!("libraries.py");
const SHARED_TENSORS: &str = include_str!("shared_tensors.py");

/// Duration of a load in seconds.
const LOAD_SECONDS: u32 = 5;

/// Numbers by their names, as a program prints them.
pub type Numbers = BTreeMap<String, f64>;

fn number(line: &str) -> Option<(String, f64)> {
    let (name, value) = line.split_once(' ')?;
    Some((name.to_owned(), value.trim().parse().ok()?))
}

/// A running program, killed when dropped.
pub struct Running {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Running {
    pub fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn().with_context(|| format!("Cannot run {command:?}"))?;
        let output = BufReader::new(child.stdout.take().context("No standard output")?);
        Ok(Self { child, output })
    }

    /// Waits until the program says that it is ready.
    pub fn wait_until_ready(&mut self) -> Result<()> {
        let mut line = String::new();
        while self.output.read_line(&mut line)? > 0 {
            if line.trim_end() == "ready 1" {
                return Ok(());
            }
            line.clear();
        }
        bail!("A program has ended before it was ready")
    }

    /// Waits for the next number.
    pub fn next_number(&mut self) -> Result<f64> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        number(&line).map(|(_, value)| value).context("A program has ended without a number")
    }

    /// Waits for the end and returns the numbers.
    pub fn finish(mut self) -> Result<Numbers> {
        let lines = self.output.by_ref().lines().collect::<std::io::Result<Vec<_>>>()?;
        let status = self.child.wait()?;
        ensure!(status.success(), "A program failed: {status}");
        Ok(lines.iter().filter_map(|line| number(line)).collect())
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

/// Running load that waits for its start.
pub struct Load {
    running: Running,
    /// The load starts when this file exists.
    start: PathBuf,
}

impl Load {
    pub fn start(&self) -> Result<()> {
        File::create(&self.start).context("Cannot start a load").map(drop)
    }

    /// Waits for the end and returns the numbers.
    pub fn finish(self) -> Result<Numbers> {
        self.running.finish()
    }
}

/// File with the time of CLOCK_MONOTONIC at which programs begin, so that all begin at once.
pub struct StartFile(PathBuf);

impl StartFile {
    /// Time for which programs look for the file at least once.
    const NOTICE: Duration = Duration::from_millis(100);

    /// Lets the programs begin.
    pub fn begin(&self) -> Result<()> {
        let at = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?) + Self::NOTICE;
        let unnamed = self.0.with_extension("new");
        fs::write(&unnamed, format!("{:.6}\n", at.as_secs_f64()))?;
        fs::rename(&unnamed, &self.0).context("Cannot start the programs")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The daemon, and how programs run on its vGPUs.
pub struct Host<'a> {
    vgpud: Vgpud,
    program: &'a Path,
    mdev_type: String,
    /// Folder of scripts and of the files that start loads.
    folder: tempfile::TempDir,
    loads: Cell<u32>,
}

impl<'a> Host<'a> {
    pub fn start(kind: GpuKind, options: &str, program: &'a Path, size: &str) -> Result<Self> {
        let vgpud = Vgpud::start_with(&["--parent", &format!("{}{options}", kind.argument())])?;
        let mdev_type = mdev_type(&vgpud, size)?;
        let folder = tempfile::tempdir()?;
        for (name, text) in [
            ("torch", TORCH),
            ("frameworks", FRAMEWORKS),
            ("shared", SHARED_TENSORS),
            ("libraries", LIBRARIES),
        ] {
            fs::write(folder.path().join(format!("programs_{name}.py")), text)?;
        }
        Ok(Self { vgpud, program, mdev_type, folder, loads: Cell::new(0) })
    }

    /// Returns the path of a script.
    pub fn script(&self, name: &str) -> String {
        self.folder.path().join(format!("programs_{name}.py")).to_string_lossy().into_owned()
    }

    /// Starts a vGPU with attributes.
    pub fn vgpu(&self, attrs: &Value) -> Result<String> {
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

    pub fn run(&self, vgpu: Option<&str>, words: &[&str]) -> Result<Numbers> {
        Running::start(self.command(vgpu, words)?)?.finish()
    }

    /// Runs a program that may fail after some results.
    pub fn results(&self, vgpu: Option<&str>, words: &[&str]) -> Result<Numbers> {
        let output = self.command(vgpu, words)?.stderr(Stdio::inherit()).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(text.lines().filter_map(number).collect())
    }

    /// Starts a program of `programs.cu`.
    pub fn start_program(&self, vgpu: Option<&str>, words: &[&str]) -> Result<Running> {
        let program = self.program.to_str().context("The path is not UTF-8")?;
        Running::start(self.command(vgpu, &[&[program], words].concat())?)
    }

    /// Prepares a load: `words` are followed by the duration and the file that starts the load.
    pub fn load(&self, vgpu: &str, words: &[&str]) -> Result<Load> {
        let StartFile(start) = self.start_file();
        let time = LOAD_SECONDS.to_string();
        let file = start.to_str().context("The path is not UTF-8")?;
        let command = self.command(Some(vgpu), &[words, &[time.as_str(), file]].concat())?;
        let mut running = Running::start(command)?;
        running.wait_until_ready()?;
        Ok(Load { running, start })
    }

    /// Prepares a load of kernels of some microseconds.
    pub fn kernels(&self, vgpu: &str, microseconds: u32) -> Result<Load> {
        let program = self.program.to_str().context("The path is not UTF-8")?;
        self.load(vgpu, &[program, "load", &microseconds.to_string()])
    }

    /// Returns a file that starts several programs.
    pub fn start_file(&self) -> StartFile {
        let number = self.loads.replace(self.loads.get() + 1);
        StartFile(self.folder.path().join(format!("start{number}")))
    }

    /// Starts a program that keeps kernels of some microseconds queued from the time in `start` on.
    /// The program tells the work per second of a window.
    pub fn queued(
        &self,
        vgpu: &str,
        microseconds: u32,
        window: Window,
        start: &StartFile,
    ) -> Result<Running> {
        let seconds = [window.settle, window.length, window.ramp];
        let seconds = seconds.map(|time| time.as_secs_f64().to_string());
        let kernel = microseconds.to_string();
        let file = start.0.to_str().context("The path is not UTF-8")?;
        let [settle, length, ramp] = seconds.each_ref().map(String::as_str);
        self.start_program(Some(vgpu), &["queued", &kernel, settle, length, ramp, file])
    }

    /// Returns the work per second of a load of kernels alone.
    pub fn alone(&self, vgpu: &str, microseconds: u32) -> Result<f64> {
        together(vec![self.kernels(vgpu, microseconds)?]).map(|work| work[0])
    }

    /// Returns the statistics of a vGPU.
    fn stats(&self, vgpu: &str) -> Result<Value> {
        let mut stats = self.vgpud.get("/v1/stats")?;
        let all = stats["vgpus"].as_array_mut().context("No statistics")?;
        let found = all.iter_mut().find(|one| one["uuid"] == vgpu).context("No statistics")?;
        Ok(found.take())
    }

    pub fn used_memory(&self, vgpu: &str) -> Result<u64> {
        Ok(self.stats(vgpu)?["programs"]["vram_used_bytes"].as_u64().unwrap_or(0))
    }

    /// Returns the seconds that vGPUs have had the engine.
    pub fn engine_seconds(&self, vgpus: &[String; 2]) -> Result<[f64; 2]> {
        let of = |vgpu: &str| {
            let ns = self.stats(vgpu)?["engine_ns"].as_u64().context("No engine time")?;
            anyhow::Ok(ns as f64 / 1e9)
        };
        Ok([of(&vgpus[0])?, of(&vgpus[1])?])
    }
}

/// Starts loads at the same time and returns the work per second of each.
pub fn together(loads: Vec<Load>) -> Result<Vec<f64>> {
    loads.iter().try_for_each(Load::start)?;
    loads.into_iter().map(|load| work(&load.finish()?)).collect()
}

/// Returns the work per second of a load.
pub fn work(numbers: &Numbers) -> Result<f64> {
    numbers.get("work").copied().context("A load did not tell its work")
}
