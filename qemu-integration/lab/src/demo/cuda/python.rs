//! Python of this machine in the demo's CUDA VMs: they mount the machine's files read-only, and run
//! it in them.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::kernel::Kernel;
use crate::shared_folder;

const SCRIPT: &str = include_str!("pytorch.py");
/// Script of the trainings under deaths of a worker.
const TRAINING: &str = include_str!("training.py");
/// Path of the script in the VM.
const IN_VM: &str = "cuda/pytorch.py";
/// Mount point of this machine's files in the VM.
const MOUNTED: &str = "/machine";
/// File in the VM that lets the script measure times.
pub(super) const GO: &str = "/machine/tmp/go";
/// File in the VM that ends the trainings.
pub(super) const STOP: &str = "/machine/tmp/stop";
/// Memory that PyTorch needs in a VM, in MiB.
pub(super) const MEMORY: u32 = 6144;
/// Longest time of the script. An emulated CPU takes minutes for PyTorch's import.
pub(super) const LIMIT: Duration = Duration::from_secs(480);

/// A Python with PyTorch.
pub(super) struct Python {
    program: String,
    script: PathBuf,
    /// Environment in which the Python runs, here and in VMs.
    environment: Vec<(&'static str, String)>,
}

impl Python {
    /// Writes the script to `folder`. `libcuda` is the path of the library that programs need;
    /// `is_training` selects trainings under deaths of a worker.
    pub(super) fn new(
        program: &str,
        libcuda: &Path,
        folder: &Path,
        is_training: bool,
    ) -> Result<Self> {
        let script = folder.join("pytorch.py");
        fs::write(&script, if is_training { TRAINING } else { SCRIPT })
            .context("Cannot write the script for Python")?;
        let of = |name| env::var(name).ok().filter(|value| !value.is_empty());
        let mut libraries = libcuda.parent().unwrap_or(Path::new("/")).display().to_string();
        if let Some(more) = of("LD_LIBRARY_PATH") {
            libraries = format!("{libraries}:{more}");
        }
        let path = of("PATH").unwrap_or_else(|| "/usr/bin:/bin".to_owned());
        let environment = vec![("PATH", path), ("LD_LIBRARY_PATH", libraries)];
        Ok(Self { program: program.to_owned(), script, environment })
    }

    /// Returns the command without a VM. `home` is a folder that it may write to.
    pub(super) fn native(&self, home: &Path) -> Command {
        // A file that exists.
        self.command(home, [&self.script, &self.script])
    }

    /// Returns the command without a VM. The script measures when the first of the files exists,
    /// and a training ends when the second one exists.
    pub(super) fn command(&self, home: &Path, files: [&Path; 2]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(&self.script).args(files);
        command.envs(self.environment.iter().cloned()).env("HOME", home);
        command
    }

    /// Returns the files that a VM needs, by their paths in it.
    pub(super) fn files(&self, kernel: &Kernel) -> Vec<(String, PathBuf)> {
        let mut files = shared_folder::files(kernel);
        files.push((IN_VM.to_owned(), self.script.clone()));
        files
    }

    /// Returns the shell command that runs the script in a VM, up to where it waits for [`GO`].
    pub(super) fn in_vm(&self) -> String {
        let environment: Vec<_> =
            self.environment.iter().map(|(name, value)| format!("{name}='{value}'")).collect();
        let (environment, program) = (environment.join(" "), &self.program);
        let env = format!("/usr/bin/env HOME=/tmp {environment}");
        format!("chroot {MOUNTED} {env} '{program}' /tmp/pytorch.py /tmp/go /tmp/stop")
    }
}

/// Returns the shell command that prepares a VM.
pub(super) fn prepare() -> String {
    format!("{} && cp /{IN_VM} {MOUNTED}/tmp/", shared_folder::mount_root(MOUNTED))
}
