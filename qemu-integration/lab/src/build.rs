//! The workspace's programs, built by cargo: dynamic ones for this host, static ones for guests and
//! bundles.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::progress::{Progress, Step};

/// Environment variable with the folder of host programs that are up to date.
///
/// `cargo lab test` builds programs together with the tests and sets the variable for the tests.
pub const PREBUILT: &str = "TESSERA_PROGRAMS";
/// File name of the preload library for CUDA programs.
pub const CUDA_LIBRARY: &str = "libtessera_cuda.so";
const HOST_PROGRAMS: [&str; 2] = ["vgpud", "vgpuctl"];
/// Program that asks libcuda for checkpoints in a VM.
const CHECKPOINT: &str = "vgpu-checkpoint";
/// Node agent of Kubernetes.
const KUBE: &str = "vgpu-kube";
/// Features that `cargo test` enables. With them, programs and tests share all crates.
const TEST_FEATURES: &str = "vendor-backends/test-util,vfio-user-server/test-util";
const STATIC_TARGET: &str = "x86_64-unknown-linux-gnu";

/// Build profile of programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Cargo's `dev`, which tests use.
    Dev,
    /// Cargo's `release`.
    Release,
}

/// Built programs.
#[derive(Clone, Debug)]
pub struct Programs {
    /// Paths of the programs by name.
    pub programs: BTreeMap<String, PathBuf>,
    /// Folder of the programs. Files made from them may be put there.
    pub folder: PathBuf,
}

impl Programs {
    /// Returns the path of a program.
    pub fn find(&self, name: &str) -> Result<&Path> {
        Ok(self.programs.get(name).with_context(|| format!("There is no program {name}"))?)
    }

    /// Returns the host programs that a folder holds.
    fn in_folder(folder: PathBuf) -> Self {
        let programs = HOST_PROGRAMS.map(|name| (name.to_owned(), folder.join(name)));
        Self { programs: programs.into(), folder }
    }
}

/// Returns the workspace's folder.
pub fn workspace() -> &'static Path {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR"));
    lab.ancestors().nth(2).unwrap_or(lab)
}

/// Returns the folder of what is built from the workspace.
pub(crate) fn target_folder() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| workspace().join("target"))
}

/// Returns the path of cargo.
fn cargo_path() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Returns a cargo command that runs in the workspace.
pub fn cargo() -> Command {
    let mut command = Command::new(cargo_path());
    command.current_dir(workspace());
    without_increments(&mut command);
    command
}

/// Returns a cargo command that runs in the workspace with low priority.
pub fn cargo_in_background() -> Command {
    cargo_by("nice", &["-n", "10"])
}

/// Returns a cargo command that runs in the workspace while a CPU is idle (`SCHED_IDLE`).
pub fn cargo_when_idle() -> Command {
    cargo_by("chrt", &["--idle", "0"])
}

/// Returns a cargo command that another program starts in the workspace.
fn cargo_by(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).arg(cargo_path()).current_dir(workspace());
    without_increments(&mut command);
    command
}

/// Turns incremental compilation off where nothing was compiled so yet: preparing for the next
/// compilation takes longer than the first one itself.
fn without_increments(command: &mut Command) {
    const VARIABLE: &str = "CARGO_INCREMENTAL";
    let folder = target_folder().join("debug/incremental");
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    // Cargo itself has compiled the lab.
    let exist = entries.map(|entry| entry.file_name()).any(|name| {
        let name = name.to_string_lossy();
        name.starts_with("vgpud-")
    });
    if !exist && std::env::var_os(VARIABLE).is_none() {
        command.env(VARIABLE, "0");
    }
}

/// Builds `vgpud` and `vgpuctl` in the profile `dev`.
pub fn host(progress: &Progress) -> Result<Programs> {
    host_with(Profile::Dev, progress)
}

/// Builds `vgpud` and `vgpuctl`.
pub fn host_with(profile: Profile, progress: &Progress) -> Result<Programs> {
    if profile == Profile::Dev
        && let Some(folder) = std::env::var_os(PREBUILT)
    {
        return Ok(Programs::in_folder(folder.into()));
    }
    let step = progress.step("Building vgpud and vgpuctl");
    let mut command = cargo();
    command.arg("build");
    // With --package, cargo would resolve other features than for `cargo lab` and build all
    // dependencies again.
    for name in HOST_PROGRAMS {
        command.args(["--bin", name]);
    }
    match profile {
        Profile::Dev => command.args(["--features", TEST_FEATURES]),
        Profile::Release => command.arg("--release"),
    };
    build(command, step)
}

/// Builds the preload library for CUDA programs and returns its path.
pub fn cuda_library(profile: Profile, progress: &Progress) -> Result<PathBuf> {
    if profile == Profile::Dev
        && let Some(folder) = std::env::var_os(PREBUILT).map(PathBuf::from)
    {
        // `cargo test` leaves libraries among the dependencies. Elsewhere, they may be older.
        let places = [folder.join("deps").join(CUDA_LIBRARY), folder.join(CUDA_LIBRARY)];
        if let Some(library) = places.into_iter().find(|path| path.is_file()) {
            return Ok(library);
        }
    }
    let mut command = cargo();
    command.args(["build", "--package", "tessera-cuda"]);
    if profile == Profile::Release {
        command.arg("--release");
    }
    let built = build(command, progress.step("Building the CUDA preload library"))?;
    Ok(built.find(CUDA_LIBRARY)?.to_owned())
}

/// Builds `vgpu-kube` and returns its path.
pub fn kube(profile: Profile, progress: &Progress) -> Result<PathBuf> {
    program(KUBE, profile, progress)
}

/// Builds `vgpu-checkpoint`, which loads a VM's libcuda, and returns its path.
pub fn checkpoint(profile: Profile, progress: &Progress) -> Result<PathBuf> {
    program(CHECKPOINT, profile, progress)
}

/// Builds a program that is linked dynamically, and returns its path.
fn program(name: &str, profile: Profile, progress: &Progress) -> Result<PathBuf> {
    if profile == Profile::Dev
        && let Some(folder) = std::env::var_os(PREBUILT).map(PathBuf::from)
    {
        return Ok(folder.join(name));
    }
    let mut command = cargo();
    command.args(["build", "--bin", name]);
    match profile {
        Profile::Dev => command.args(["--features", TEST_FEATURES]),
        Profile::Release => command.arg("--release"),
    };
    let step = progress.step(format!("Building {name}"));
    Ok(build(command, step)?.find(name)?.to_owned())
}

/// Builds `vgpu-guest`, statically linked.
pub fn guest(progress: &Progress) -> Result<Programs> {
    portable("Building vgpu-guest", &["--bin", "vgpu-guest"], Profile::Dev, progress)
}

/// Builds statically linked programs, which run on hosts and guests without libraries.
///
/// The programs share the target folder with dynamic ones, and with them build scripts and
/// procedural macros.
pub fn portable(
    what: &'static str,
    targets: &[&str],
    profile: Profile,
    progress: &Progress,
) -> Result<Programs> {
    let mut command = cargo();
    build_statically(&mut command, targets);
    if profile == Profile::Release {
        command.arg("--release");
    }
    build(command, progress.step(what))
}

/// Makes a cargo command build statically linked programs.
pub fn build_statically(cargo: &mut Command, targets: &[&str]) {
    let mut flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    flags.push_str(" -C target-feature=+crt-static -C strip=symbols");
    cargo.arg("build").args(targets).args(["--target", STATIC_TARGET]);
    cargo.env("RUSTFLAGS", flags.trim()).env_remove("CARGO_ENCODED_RUSTFLAGS");
    // They are stripped.
    cargo.env("CARGO_PROFILE_DEV_DEBUG", "false");
}

/// Runs a build and returns the programs and preload libraries that cargo reports. The step shows
/// cargo's progress.
fn build(mut command: Command, step: Step) -> Result<Programs> {
    command.arg("--message-format=json-render-diagnostics");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("Cannot run cargo")?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let mut programs = BTreeMap::new();
    let mut diagnostics = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for line in stderr.into_iter().flat_map(|err| BufReader::new(err).lines()).flatten() {
                step.at(line.trim());
                diagnostics.push(line);
            }
        });
        for line in stdout.into_iter().flat_map(|out| BufReader::new(out).lines()).flatten() {
            let message: Value = serde_json::from_str(&line).unwrap_or_default();
            if let Some(program) = message["executable"].as_str() {
                let name = message["target"]["name"].as_str().unwrap_or_default();
                programs.insert(name.to_owned(), PathBuf::from(program));
            }
            for file in message["filenames"].as_array().into_iter().flatten() {
                let path = PathBuf::from(file.as_str().unwrap_or_default());
                if path.ends_with(CUDA_LIBRARY) {
                    programs.insert(CUDA_LIBRARY.to_owned(), path);
                }
            }
        }
    });
    if !child.wait()?.success() {
        bail!("The build failed:\n{}", diagnostics.join("\n"));
    }
    step.done();
    let first = programs.values().next().and_then(|program| program.parent());
    let folder = first.map(Path::to_path_buf);
    Ok(Programs { programs, folder: folder.unwrap_or_else(target_folder) })
}
