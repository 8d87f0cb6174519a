//! `vgpuctl`, run against a daemon of one's own.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;

use crate::{Vgpud, program};

/// What a command did.
#[derive(Debug)]
pub struct Done {
    /// Its exit status.
    pub status: i32,
    /// What it printed.
    pub stdout: String,
    /// What it complained about.
    pub stderr: String,
}

/// Where it is: built once per test program.
pub fn path() -> Result<&'static PathBuf> {
    static PATH: OnceLock<std::result::Result<PathBuf, String>> = OnceLock::new();
    let path = PATH.get_or_init(|| program("vgpuctl", "vgpuctl").map_err(|e| format!("{e:#}")));
    path.as_ref().map_err(|error| anyhow!("{error}"))
}

/// Runs a command line, whatever comes of it.
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

/// Runs a command line that is to succeed; what it printed.
pub fn vgpuctl(vgpud: &Vgpud, line: &str) -> Result<String> {
    let done = run(vgpud, line)?;
    ensure!(done.status == 0, "vgpuctl {line}: {done:?}");
    Ok(done.stdout.trim_end().to_owned())
}

/// The same, read as JSON.
pub fn vgpuctl_json(vgpud: &Vgpud, line: &str) -> Result<Value> {
    Ok(serde_json::from_str(&vgpuctl(vgpud, line)?)?)
}

/// Runs a command line that is to be refused with a status, in one line that contains some words.
pub fn refused(vgpud: &Vgpud, line: &str, status: i32, words: &str) -> Result<()> {
    let done = run(vgpud, line)?;
    let one_line = done.stderr.trim_end().lines().count() == 1;
    ensure!(
        done.status == status && one_line && done.stderr.contains(words) && done.stdout.is_empty(),
        "vgpuctl {line}: {done:?}, expected {status} with {words:?}"
    );
    Ok(())
}
