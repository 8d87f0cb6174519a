//! NVIDIA's user-mode driver from Debian's archive, for tests of CUDA programs without a GPU.
//!
//! The packages are fetched into the lab's cache and unpacked there. They are NVIDIA's and not
//! free: nothing of them is part of Tessera or of what it ships.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::cache::{self, cache_folder};
use crate::debs::{self, Debs, Sources};
use crate::progress::Progress;

/// Packages with libcuda, and with NVML and its program.
const PACKAGES: [&str; 3] = ["libcuda1", "libnvidia-ml1", "nvidia-smi"];

/// Folder of the libraries in the packages.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu/nvidia/current";

/// NVIDIA's user-mode driver.
#[derive(Clone, Debug)]
pub struct CudaLibraries {
    root: PathBuf,
}

impl CudaLibraries {
    /// Finds or fetches the libraries.
    pub fn open(progress: &Progress) -> Result<Self> {
        let found = |folder: &Path| {
            let libraries = Self { root: folder.to_owned() };
            libraries.are_complete().then_some(libraries)
        };
        cache::find_or_prepare(&cache_folder()?, "cuda", progress, found, |folder, fetched| {
            if !Debs::possible() || !cfg!(target_arch = "x86_64") {
                bail!(
                    "NVIDIA's libraries come as Debian packages for x86-64: run this on Debian or Ubuntu"
                );
            }
            let step = progress.step("Fetching NVIDIA's libraries from Debian");
            let sources = Sources { components: "main non-free", ..Sources::default() };
            let debs = Debs::open_sources(fetched, sources)?;
            debs.fetch(&PACKAGES)?;
            debs::unpack(&debs.packages()?, folder)?;
            step.done();
            if found(folder).is_none() {
                bail!("Debian's packages {} have no libcuda any more", PACKAGES.join(", "));
            }
            Ok(())
        })
    }

    fn are_complete(&self) -> bool {
        self.version().is_ok()
    }

    /// Returns the folder for `LD_LIBRARY_PATH`.
    pub fn folder(&self) -> PathBuf {
        self.root.join(LIBRARIES)
    }

    /// Returns the path of `nvidia-smi`.
    pub fn nvidia_smi(&self) -> PathBuf {
        self.root.join("usr/lib/nvidia/current/nvidia-smi")
    }

    /// Returns the version of the driver, such as `550.163.01`.
    pub fn version(&self) -> Result<String> {
        let folder = self.folder();
        let entries =
            fs::read_dir(&folder).with_context(|| format!("Cannot read {}", folder.display()))?;
        let mut names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let version = names.find_map(|name| {
            let version = name.strip_prefix("libcuda.so.")?;
            version.contains('.').then(|| version.to_owned())
        });
        version.with_context(|| format!("There is no libcuda in {}", folder.display()))
    }
}
