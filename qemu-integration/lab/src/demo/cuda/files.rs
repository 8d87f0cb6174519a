//! Files of this machine that the demo's CUDA VMs need: the guest's module, the programs, NVIDIA's
//! libraries, and what these link to.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::Lab;
use crate::build::{self, Profile};
use crate::bundle;
use crate::demo::Options;
use crate::demo::cuda::python::Python;
use crate::guest_driver::{Kernels, MODULE};
use crate::kernel::Kernel;
use crate::nvcc;
use crate::place::{Bundle, layout};
use crate::progress::Progress;
use crate::vfio;

/// Folder of NVIDIA's libraries and of what they link to, in the VM.
pub(super) const LIBRARIES: &str = "cuda";
/// The program in the VM.
pub(super) const PROGRAM: &str = "bin/programs";
/// The program for checkpoints in the VM.
pub(super) const CHECKPOINT: &str = "bin/vgpu-checkpoint";
/// Folders of libcuda that the loader does not always know.
const FOLDERS: [&str; 3] = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64"];

/// What the VMs need of this machine.
pub(super) struct Needs {
    module: PathBuf,
    /// The CUDA programs, compiled for this machine's GPU.
    pub(super) program: PathBuf,
    libraries: Vec<PathBuf>,
    pub(super) python: Option<Python>,
    /// Program for checkpoints, if the VMs are saved.
    checkpoint: Option<PathBuf>,
}

impl Needs {
    /// Compiles the programs, and finds the rest.
    pub(super) fn find(
        lab: &Lab,
        options: &Options,
        folder: &Path,
        progress: &Progress,
    ) -> Result<Self> {
        let (module, source) = if let Some(bundle) = Bundle::find() {
            (bundle.path(layout::MODULE), bundle.path(layout::PROGRAMS_SOURCE))
        } else {
            let kernels = Kernels::open(progress)?.map_err(anyhow::Error::msg)?;
            let target = kernels.for_kernel(&lab.root.kernel)?;
            let module = kernels.build(&target)?;
            (module, build::workspace().join(bundle::PROGRAMS_SOURCE))
        };
        ensure!(module.is_file(), "this bundle has no module for its kernel");
        let libcuda = libcuda().context("this machine has no libcuda.so.1")?;
        let python = options.python.as_ref();
        let python = python
            .map(|program| Python::new(program, &libcuda, folder, options.kills.is_some()))
            .transpose()?;
        let mut libraries = vec![libcuda.clone()];
        let compiler = libcuda.with_file_name("libnvidia-ptxjitcompiler.so.1");
        libraries.extend(Some(compiler).filter(|path| path.is_file()));
        libraries.extend_from_slice(&options.libraries);
        let program = nvcc::launching_program(&source, folder)?;
        let checkpoint = options.live.map(|_| match Bundle::find() {
            Some(bundle) => Ok(bundle.path(layout::CHECKPOINT)),
            None => build::checkpoint(Profile::Dev, progress),
        });
        Ok(Self { module, program, libraries, python, checkpoint: checkpoint.transpose()? })
    }

    /// Returns the files by their paths in the VM.
    pub(super) fn files(&self, kernel: &Kernel) -> Result<Vec<(String, PathBuf)>> {
        let mut files = vec![
            (MODULE.to_owned(), self.module.clone()),
            (PROGRAM.to_owned(), self.program.clone()),
        ];
        if let Some(python) = &self.python {
            files.extend(python.files(kernel));
        }
        let mut linked = vfio::libraries(&self.program)?;
        if let Some(checkpoint) = &self.checkpoint {
            files.push((CHECKPOINT.to_owned(), checkpoint.clone()));
            linked.extend(vfio::libraries(checkpoint)?);
        }
        for library in &self.libraries {
            linked.push(library.clone());
            linked.extend(vfio::libraries(library)?);
        }
        for library in linked {
            let name = library.file_name().context("A library without a name")?.to_string_lossy();
            // Programs name their loader by its path.
            let folder = if name.starts_with("ld-linux") { "lib64" } else { LIBRARIES };
            files.push((format!("{folder}/{name}"), library));
        }
        Ok(files)
    }
}

/// Finds libcuda as the loader does.
fn libcuda() -> Option<PathBuf> {
    const NAME: &str = "libcuda.so.1";
    let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut found: Vec<PathBuf> =
        std::env::split_paths(&folders).map(|folder| folder.join(NAME)).collect();
    for ldconfig in ["ldconfig", "/sbin/ldconfig"] {
        let output = Command::new(ldconfig).arg("-p").output();
        let text = output.map(|output| output.stdout).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        found.extend(text.lines().filter_map(|line| library_at(line, NAME)));
    }
    found.extend(FOLDERS.iter().map(|folder| Path::new(folder).join(NAME)));
    found.into_iter().find(|path| path.is_file())
}

/// Returns the path of a library in a line of `ldconfig -p`, if it is one for x86-64.
fn library_at(line: &str, name: &str) -> Option<PathBuf> {
    let (about, path) = line.trim().split_once(" => ")?;
    (about.split(' ').next() == Some(name) && about.contains("x86-64")).then(|| path.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_for_x86_64_is_found_in_the_loaders_list() {
        let at = |line| library_at(line, "libcuda.so.1");
        let path = "/usr/lib/x86_64-linux-gnu/libcuda.so.1";
        let line = format!("\tlibcuda.so.1 (libc6,x86-64) => {path}");
        assert_eq!(at(&line), Some(path.into()));
        assert_eq!(at("\tlibcuda.so.1 (libc6) => /usr/lib/i386-linux-gnu/libcuda.so.1"), None);
        assert_eq!(at("\tlibcuda.so (libc6,x86-64) => /usr/lib/libcuda.so"), None);
    }
}
