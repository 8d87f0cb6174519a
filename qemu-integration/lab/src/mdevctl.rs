//! Real mdevctl for comparison, built once from its release into the lab's cache.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, bail};

use crate::build::cargo;
use crate::cleanup::Scratch;
use crate::progress::Progress;
use crate::root::{cache_folder, lock};

/// Release that `vgpuctl` follows.
const VERSION: &str = "1.4.0";

/// Builds mdevctl if needed and returns its path.
pub fn open(progress: &Progress) -> Result<PathBuf> {
    let cache = cache_folder()?;
    let folder = cache.join(format!("mdevctl-{VERSION}"));
    let program = folder.join("bin/mdevctl");
    if program.exists() {
        return Ok(program);
    }
    let _lock = lock(&cache, progress)?;
    if program.exists() {
        return Ok(program);
    }
    let step = progress.step("Building mdevctl");
    let partial = Scratch::at(cache.join("partial-mdevctl"))?;
    let root = partial.path().join("root");
    let mut command = cargo();
    // Unoptimized, because an optimized build takes twice as long and mdevctl runs for
    // milliseconds.
    command.args(["install", "mdevctl", "--quiet", "--locked", "--debug", "--version", VERSION]);
    command.arg("--root").arg(&root).arg("--target-dir").arg(partial.path().join("target"));
    // Building its manual needs a tool that may be missing. Backtraces would clutter its errors.
    command.env("RST2MAN", "true").stdin(Stdio::null());
    for name in ["CARGO_ENCODED_RUSTFLAGS", "RUSTFLAGS", "CARGO_TARGET_DIR"] {
        command.env_remove(name);
    }
    let output = command.output().context("Cannot run cargo")?;
    if !output.status.success() {
        bail!("Cannot build mdevctl: {}", String::from_utf8_lossy(&output.stderr));
    }
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::rename(&root, &folder)
        .with_context(|| format!("Cannot make the folder {}", folder.display()))?;
    step.done();
    Ok(program)
}
