//! CUDA's compiler, where there is one: it makes the machine code of the guest runtime's kernels.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// What the kernels are compiled for: the GPUs whose channel classes the runtime speaks.
const ARCHITECTURE: &str = "-arch=sm_90";

/// Where it is, in the path or where its own installer puts it.
fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    folders.push("/usr/local/cuda/bin".into());
    folders.into_iter().map(|folder| folder.join("nvcc")).find(|file| file.is_file())
}

/// Compiles `source` in `folder`, and says where the machine code is.
pub fn compile(source: &Path, folder: &Path) -> Result<PathBuf> {
    let to = folder.join("kernels.cubin");
    run(source, folder, &[ARCHITECTURE, "--cubin"], &to).map(|()| to)
}

/// Makes a program of `source` in `folder`, and says where it is.
pub fn program(source: &Path, folder: &Path) -> Result<PathBuf> {
    let to = folder.join(source.file_stem().unwrap_or(source.as_os_str()));
    run(source, folder, &["-O2", "-ldl"], &to).map(|()| to)
}

fn run(source: &Path, folder: &Path, options: &[&str], to: &Path) -> Result<()> {
    let Some(nvcc) = find() else {
        bail!("There is no nvcc: install CUDA's compiler, or name machine code with --cubin");
    };
    let mut command = Command::new(&nvcc);
    command.args(options).arg("-o").arg(to).arg(source);
    // It calls the rest of the compiler by name, and a C++ compiler.
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
