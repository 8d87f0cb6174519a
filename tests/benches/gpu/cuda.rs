//! CUDA in a separate process: the baseline for the speed of kernels.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::kernels::KernelSpec;

/// Process that launches kernels through `libcuda.so.1`; ended when dropped.
#[derive(Debug)]
pub struct Cuda {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Cuda {
    /// Starts `program`, compiled from `cuda.c`.
    pub fn start(program: &Path, cubin: &Path) -> Result<Self> {
        let mut command = Command::new(program);
        command.arg(cubin).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child =
            command.spawn().with_context(|| format!("Cannot run {}", program.display()))?;
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("No standard output")?);
        let mut cuda = Self { child, orders, answers };
        match cuda.hear()?.as_str() {
            "ready" => Ok(cuda),
            why => bail!("{why}"),
        }
    }

    fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    /// Launches a kernel repeatedly and returns the time of one launch in microseconds.
    pub fn measure(&mut self, spec: &KernelSpec) -> Result<f64> {
        let orders = self.orders.as_mut().context("CUDA's process was dismissed")?;
        writeln!(orders, "{}", spec.line())?;
        let answer = self.hear()?;
        answer.parse().with_context(|| format!("CUDA says {answer:?}"))
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        drop(self.orders.take());
        let _ = self.child.wait();
    }
}
