//! `cargo lab bench`: the benchmarks, built with optimization. A bundle contains one benchmark and
//! the hardware tests.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::build::{cargo, workspace};
use crate::bundle::{CUDA_SOURCE, FEATURES_SOURCE, PROGRAMS_SOURCE, SOURCE};
use crate::heartbeat::{Heartbeat, INTERVAL};
use crate::nvcc;
use crate::place::{Bundle, layout};
use crate::progress;

/// Runs all benchmarks, or the benchmark of one name, with `args`.
pub fn run(name: Option<&str>, args: &[String]) -> Result<()> {
    if let Some(bundle) = Bundle::find() {
        return run_bundled(&bundle, name, args);
    }
    let mut command = by_cargo(name, args);
    if name == Some("gpu") {
        let sources = [SOURCE, CUDA_SOURCE, PROGRAMS_SOURCE, FEATURES_SOURCE];
        let sources = sources.map(|source| workspace().join(source));
        let out = workspace().join("lab-out");
        std::fs::create_dir_all(&out)
            .with_context(|| format!("Cannot make the folder {}", out.display()))?;
        command.args(kernels(&sources, &out, args)?);
    }
    finish(&mut command)
}

fn by_cargo(name: Option<&str>, args: &[String]) -> Command {
    let mut command = cargo();
    command.args(["bench", "--package", "system-tests"]);
    match name {
        Some(name) => command.args(["--bench", name]),
        None => command.arg("--benches"),
    };
    command.arg("--").args(args);
    command
}

/// Hardware tests of a bundle; in a workspace, cargo builds them.
pub fn hardware_tests(name: &str) -> Result<()> {
    let target = format!("{name}_hw");
    let mut command = if let Some(bundle) = Bundle::find() {
        let program = bundle.programs()?.find(&target)?.to_path_buf();
        bundle.drop_privileges(Path::new("lab-out"))?;
        Command::new(program)
    } else {
        let mut command = cargo();
        command.args(["test", "--package", "vendor-backends", "--test", &target, "--"]);
        command
    };
    command.args(["--test-threads=1", "--nocapture"]);
    finish(&mut command)
}

/// Name of the only benchmark in a bundle, which finds the daemon in its own folder.
fn run_bundled(bundle: &Bundle, name: Option<&str>, args: &[String]) -> Result<()> {
    let name = name.unwrap_or("gpu");
    let program = bundle.programs()?.find(name)?.to_path_buf();
    let out = Path::new("lab-out");
    bundle.drop_privileges(out)?;
    let mut command = Command::new(program);
    command.arg("--bench").args(args);
    let sources = [layout::KERNELS, layout::CUDA, layout::PROGRAMS_SOURCE, layout::FEATURES];
    let sources = sources.map(|name| bundle.path(name));
    command.args(kernels(&sources, out, args)?);
    finish(&mut command)
}

/// Compiles the kernels, the CUDA reference program and the CUDA programs for this machine's NVIDIA
/// GPU. Returns the arguments that name them.
fn kernels(
    [kernels, cuda, programs, features]: &[PathBuf; 4],
    out: &Path,
    args: &[String],
) -> Result<Vec<OsString>> {
    if !Path::new("/dev/nvidiactl").exists() || args.iter().any(|arg| arg == "--cubin") {
        return Ok(Vec::new());
    }
    let mut named = vec!["--cubin".into(), nvcc::compile(kernels, out)?.into()];
    for (option, source, built) in [
        ("--cuda", cuda, nvcc::program(cuda, out)),
        ("--programs", programs, nvcc::launching_program(programs, out)),
        ("--features", features, nvcc::launching_program(features, out)),
    ] {
        match built {
            Ok(program) => named.extend([option.into(), program.into()]),
            // The benchmark reports which figures are missing for this reason.
            Err(error) => eprintln!("{}: {error:#}", source.display()),
        }
    }
    Ok(named)
}

fn finish(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    if std::env::var_os("RUST_LOG").is_none() {
        // The daemon's log would mix with the figures.
        command.env("RUST_LOG", "error");
    }
    let _heartbeat = Heartbeat::start(INTERVAL, |since| {
        eprintln!("{}", progress::running("Tests or benchmark", since, ""));
    });
    if !command.status().with_context(|| format!("Cannot run {name}"))?.success() {
        bail!("{name} failed");
    }
    Ok(())
}
