//! CUDA itself, in a process of its own: what the speed of kernels is set against.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::kernels::KernelSpec;

/// A process that launches kernels by `libcuda.so.1`; it ends when dropped.
#[derive(Debug)]
pub struct Cuda {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Cuda {
    /// Starts `program`, which `cuda.c` was made into.
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

    /// Launches a kernel so often, and says how long one took, in microseconds.
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
