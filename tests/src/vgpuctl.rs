//! Runs of `vgpuctl` against a test's daemon.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{Vgpud, beside, programs};

/// Result of a command.
#[derive(Debug)]
pub struct Done {
    /// Exit status.
    pub status: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// Returns the path of `vgpuctl`. A program beside the test takes precedence, as in a bundle.
pub fn path() -> Result<&'static Path> {
    static BESIDE: OnceLock<Option<PathBuf>> = OnceLock::new();
    match BESIDE.get_or_init(|| beside("vgpuctl")) {
        Some(path) => Ok(path),
        None => programs()?.find("vgpuctl"),
    }
}

/// Runs a command line and returns its result.
pub fn run(vgpud: &Vgpud, line: &str) -> Result<Done> {
    let output = Command::new(path()?)
        .arg("--socket")
        .arg(vgpud.api_socket())
        .args(line.split(' '))
        .output()?;
    Ok(Done {
        status: output.status.code().context("vgpuctl was killed")?,
        stdout: String::from_utf8(output.stdout)?,
        stderr: String::from_utf8(output.stderr)?,
    })
}

/// Runs a command line that must succeed and returns its output.
pub fn vgpuctl(vgpud: &Vgpud, line: &str) -> Result<String> {
    let done = run(vgpud, line)?;
    ensure!(done.status == 0, "vgpuctl {line}: {done:?}");
    Ok(done.stdout.trim_end().to_owned())
}

/// Runs a command line that must succeed and parses its output as JSON.
pub fn vgpuctl_json(vgpud: &Vgpud, line: &str) -> Result<Value> {
    Ok(serde_json::from_str(&vgpuctl(vgpud, line)?)?)
}

/// Runs a command line that must fail with a status and with one line that contains `words`.
pub fn refused(vgpud: &Vgpud, line: &str, status: i32, words: &str) -> Result<()> {
    let done = run(vgpud, line)?;
    let one_line = done.stderr.trim_end().lines().count() == 1;
    ensure!(
        done.status == status && one_line && done.stderr.contains(words) && done.stdout.is_empty(),
        "vgpuctl {line}: {done:?}, expected {status} with {words:?}"
    );
    Ok(())
}
