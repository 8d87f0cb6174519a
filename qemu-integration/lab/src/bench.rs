//! `cargo lab bench`: the benchmarks, built for speed; in a bundle, the one that came along, and tests of the hardware.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::build::cargo;
use crate::nvcc;
use crate::place::{Bundle, layout};

/// Runs all, or those of one name, which are told `args`.
pub fn run(name: Option<&str>, args: &[String]) -> Result<()> {
    match Bundle::find() {
        Some(bundle) => run_bundled(&bundle, name, args),
        None => finish(&mut by_cargo(name, args)),
    }
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

/// The tests of a GPU itself, which a bundle brings along; elsewhere cargo has them.
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

/// A bundle has the GPU's benchmark alone; it finds the daemon beside itself.
fn run_bundled(bundle: &Bundle, name: Option<&str>, args: &[String]) -> Result<()> {
    let name = name.unwrap_or("gpu");
    let program = bundle.programs()?.find(name)?.to_path_buf();
    let out = Path::new("lab-out");
    bundle.drop_privileges(out)?;
    let mut command = Command::new(program);
    command.arg("--bench").args(args);
    if Path::new("/dev/nvidiactl").exists() && !args.iter().any(|arg| arg == "--cubin") {
        let cubin = nvcc::compile(&bundle.path(layout::KERNELS), out)?;
        command.args(["--cubin".into(), OsString::from(cubin)]);
    }
    finish(&mut command)
}

fn finish(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    if std::env::var_os("RUST_LOG").is_none() {
        // What the daemon has to say would come between the figures.
        command.env("RUST_LOG", "error");
    }
    if !command.status().with_context(|| format!("Cannot run {name}"))?.success() {
        bail!("{name} has failed");
    }
    Ok(())
}
