//! Our own programs, built by cargo: the daemon and CLI for the host, and the static runtime for the guest.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::progress::{Progress, Step};

const GUEST_TARGET: &str = "x86_64-unknown-linux-gnu";

/// Programs, and a folder beside them for what is made of them.
#[derive(Clone, Debug)]
pub struct Programs {
    /// The programs.
    pub programs: Vec<PathBuf>,
    /// Where things made of them may lie.
    pub folder: PathBuf,
}

impl Programs {
    /// The program with this name.
    pub fn find(&self, name: &str) -> Result<&Path> {
        let found = self.programs.iter().find(|path| path.file_name().is_some_and(|f| f == name));
        Ok(found.with_context(|| format!("The build made no {name}"))?)
    }
}

/// The workspace's folder.
pub fn workspace() -> &'static Path {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR"));
    lab.ancestors().nth(2).unwrap_or(lab)
}

/// Cargo itself, in the workspace.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace());
    command
}

/// `vgpud` and `vgpuctl`.
pub fn host(progress: &Progress) -> Result<Programs> {
    let step = progress.step("Building vgpud and vgpuctl");
    let mut command = cargo();
    // Not by package: cargo then takes the workspace's features, which `cargo lab` itself was built with.
    command.args(["build", "--bin", "vgpud", "--bin", "vgpuctl"]);
    build(command, step)
}

/// `vgpu-guest`, linked statically, in a target folder of its own: it runs where no library is.
pub fn guest(progress: &Progress) -> Result<Programs> {
    let step = progress.step("Building vgpu-guest");
    let mut flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    flags.push_str(" -C target-feature=+crt-static -C strip=symbols");
    let mut command = cargo();
    command
        .args(["build", "--bins", "--package", "vgpu-guest", "--target", GUEST_TARGET])
        .arg("--target-dir")
        .arg(workspace().join("target/guest"))
        .env("RUSTFLAGS", flags.trim())
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    let mut programs = build(command, step)?;
    programs.folder = workspace().join("target/guest");
    Ok(programs)
}

/// Runs a build; cargo's messages say what it made, its own progress is shown in the step.
fn build(mut command: Command, step: Step) -> Result<Programs> {
    command.arg("--message-format=json-render-diagnostics");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("Cannot run cargo")?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let mut programs = Vec::new();
    let mut complaints = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for line in stderr.into_iter().flat_map(|err| BufReader::new(err).lines()).flatten() {
                step.at(line.trim());
                complaints.push(line);
            }
        });
        for line in stdout.into_iter().flat_map(|out| BufReader::new(out).lines()).flatten() {
            let message: Value = serde_json::from_str(&line).unwrap_or_default();
            if let Some(program) = message["executable"].as_str() {
                programs.push(PathBuf::from(program));
            }
        }
    });
    if !child.wait()?.success() {
        bail!("The build failed:\n{}", complaints.join("\n"));
    }
    step.done();
    let folder = programs.first().and_then(|program| program.parent()).map(Path::to_path_buf);
    Ok(Programs { programs, folder: folder.unwrap_or_else(|| workspace().join("target")) })
}
