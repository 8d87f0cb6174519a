//! `cargo lab bench`: the benchmarks, built for speed.

use anyhow::{Context, Result, bail};

use crate::build::cargo;

/// Runs all, or those of one name.
pub fn run(name: Option<&str>) -> Result<()> {
    let mut command = cargo();
    command.args(["bench", "--package", "system-tests"]);
    match name {
        Some(name) => command.args(["--bench", name]),
        None => command.arg("--benches"),
    };
    if !command.status().context("Cannot run cargo")?.success() {
        bail!("A benchmark failed");
    }
    Ok(())
}
