//! Our own programs, built by cargo: the daemon and CLI for the host, and static ones that run where no library is.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::progress::{Progress, Step};

const STATIC_TARGET: &str = "x86_64-unknown-linux-gnu";

/// Programs, and a folder beside them for what is made of them.
#[derive(Clone, Debug)]
pub struct Programs {
    /// The programs by name.
    pub programs: BTreeMap<String, PathBuf>,
    /// Where things made of them may lie.
    pub folder: PathBuf,
}

impl Programs {
    /// The program with this name.
    pub fn find(&self, name: &str) -> Result<&Path> {
        Ok(self.programs.get(name).with_context(|| format!("There is no program {name}"))?)
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
    host_with(Profile::Dev, progress)
}

/// The same, built in a way of one's choice.
pub fn host_with(profile: Profile, progress: &Progress) -> Result<Programs> {
    let step = progress.step("Building vgpud and vgpuctl");
    let mut command = cargo();
    // Not by package: cargo then takes the workspace's features, which `cargo lab` itself was built with.
    command.args(["build", "--bin", "vgpud", "--bin", "vgpuctl"]);
    if profile == Profile::Release {
        command.arg("--release");
    }
    build(command, step)
}

/// `vgpu-guest`, which runs in a VM with nothing beside it.
pub fn guest(progress: &Progress) -> Result<Programs> {
    portable("Building vgpu-guest", &["--bin", "vgpu-guest"], Profile::Dev, progress)
}

/// How programs are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// As for tests.
    Dev,
    /// For speed.
    Release,
}

/// Programs that are linked statically, in a target folder of their own: they run where no library is.
pub fn portable(
    what: &'static str,
    targets: &[&str],
    profile: Profile,
    progress: &Progress,
) -> Result<Programs> {
    let step = progress.step(what);
    let folder = workspace().join("target/guest");
    let mut flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    flags.push_str(" -C target-feature=+crt-static -C strip=symbols");
    let mut command = cargo();
    command
        .arg("build")
        .args(targets)
        .args(["--target", STATIC_TARGET, "--target-dir"])
        .arg(&folder)
        .env("RUSTFLAGS", flags.trim())
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    if profile == Profile::Release {
        command.arg("--release");
    }
    let mut programs = build(command, step)?;
    programs.folder = folder;
    Ok(programs)
}

/// Runs a build; cargo's messages say what it made, its own progress is shown in the step.
fn build(mut command: Command, step: Step) -> Result<Programs> {
    command.arg("--message-format=json-render-diagnostics");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("Cannot run cargo")?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let mut programs = BTreeMap::new();
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
                let name = message["target"]["name"].as_str().unwrap_or_default();
                programs.insert(name.to_owned(), PathBuf::from(program));
            }
        }
    });
    if !child.wait()?.success() {
        bail!("The build failed:\n{}", complaints.join("\n"));
    }
    step.done();
    let first = programs.values().next().and_then(|program| program.parent());
    let folder = first.map(Path::to_path_buf);
    Ok(Programs { programs, folder: folder.unwrap_or_else(|| workspace().join("target")) })
}
