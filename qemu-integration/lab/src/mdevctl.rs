//! Real mdevctl for comparison, built once from its release into the lab's cache.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};

use crate::build::cargo;
use crate::cache::{self, cache_folder};
use crate::progress::Progress;

/// Release that `vgpuctl` follows.
const VERSION: &str = "1.4.0";

/// Builds mdevctl if needed and returns its path.
pub fn open(progress: &Progress) -> Result<PathBuf> {
    let found = |folder: &Path| Some(folder.join("bin/mdevctl")).filter(|program| program.exists());
    let name = format!("mdevctl-{VERSION}");
    cache::find_or_prepare(&cache_folder()?, &name, progress, found, |folder, target| {
        let step = progress.step("Building mdevctl");
        let mut command = cargo();
        // Unoptimized, because an optimized build takes twice as long and mdevctl runs for
        // milliseconds.
        command.args(["install", "mdevctl", "--quiet", "--locked", "--debug"]);
        command.args(["--version", VERSION, "--root"]).arg(folder).arg("--target-dir").arg(target);
        // Building its manual needs a tool that may be missing. Backtraces would clutter its
        // errors.
        command.env("RST2MAN", "true").stdin(Stdio::null());
        for name in ["CARGO_ENCODED_RUSTFLAGS", "RUSTFLAGS", "CARGO_TARGET_DIR"] {
            command.env_remove(name);
        }
        let output = command.output().context("Cannot run cargo")?;
        if !output.status.success() {
            bail!("Cannot build mdevctl: {}", String::from_utf8_lossy(&output.stderr));
        }
        step.done();
        Ok(())
    })
}
