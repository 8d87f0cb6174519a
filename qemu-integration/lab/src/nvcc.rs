//! CUDA's compiler, if installed: compiles the machine code of the guest runtime's kernels.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::debs::in_path;

/// Target architecture: GPUs with the channel classes that the runtime supports.
const ARCHITECTURE: &str = "-arch=sm_90";

/// Finds nvcc in the path or in its installer's default folder.
fn find() -> Option<PathBuf> {
    let installed = PathBuf::from("/usr/local/cuda/bin/nvcc");
    in_path("nvcc").or_else(|| installed.is_file().then_some(installed))
}

/// Compiles `source` in `folder` and returns the path of the machine code.
pub fn compile(source: &Path, folder: &Path) -> Result<PathBuf> {
    let to = folder.join("kernels.cubin");
    run(source, folder, &[ARCHITECTURE, "--cubin"], &to).map(|()| to)
}

/// Builds a program from `source` in `folder` and returns its path.
pub fn program(source: &Path, folder: &Path) -> Result<PathBuf> {
    let to = folder.join(source.file_stem().unwrap_or(source.as_os_str()));
    run(source, folder, &["-O2", "-ldl"], &to).map(|()| to)
}

/// Builds a program from `source` whose kernels launch kernels, and returns its path.
pub fn launching_program(source: &Path, folder: &Path) -> Result<PathBuf> {
    let to = folder.join(source.file_stem().unwrap_or(source.as_os_str()));
    run(source, folder, &["-O2", ARCHITECTURE, "-rdc=true", "-lcudadevrt", "-ldl"], &to)
        .map(|()| to)
}

fn run(source: &Path, folder: &Path, options: &[&str], to: &Path) -> Result<()> {
    let Some(nvcc) = find() else {
        bail!("No nvcc found: install CUDA's compiler, or pass machine code with --cubin");
    };
    let mut command = Command::new(&nvcc);
    command.args(options).arg("-o").arg(to).arg(source);
    // nvcc runs the rest of the compiler and a C++ compiler by name.
    let mut path = nvcc.parent().unwrap_or(Path::new("/")).as_os_str().to_owned();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into()));
    command.env("PATH", path).env("TMPDIR", folder).stdin(Stdio::null());
    let output = command.output().with_context(|| format!("Cannot run {}", nvcc.display()))?;
    if !output.status.success() {
        bail!("nvcc failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
