//! NVIDIA's user-mode driver from Debian's archive, for tests of CUDA programs without a GPU.
//!
//! The packages are fetched into the lab's cache and unpacked there. They are NVIDIA's and not
//! free: nothing of them is part of Tessera or of what it ships.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::cleanup::Scratch;
use crate::debs::{self, Debs};
use crate::progress::Progress;
use crate::root::{cache_folder, lock};

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
        let cache = cache_folder()?;
        let root = cache.join("cuda");
        let libraries = Self { root };
        if libraries.are_complete() {
            return Ok(libraries);
        }
        if !Debs::possible() || !cfg!(target_arch = "x86_64") {
            bail!(
                "NVIDIA's libraries come as Debian packages for x86-64: run this on Debian or Ubuntu"
            );
        }
        let _lock = lock(&cache, progress)?;
        if libraries.are_complete() {
            return Ok(libraries);
        }
        let step = progress.step("Fetching NVIDIA's libraries from Debian");
        let fetched = cache.join("cuda-fetched");
        let debs = Debs::open_components(&fetched, "main non-free")?;
        debs.fetch(&PACKAGES)?;
        let partial = Scratch::at(cache.join("cuda-partial"))?;
        debs::unpack(&debs.packages()?, partial.path())?;
        if libraries.root.exists() {
            fs::remove_dir_all(&libraries.root)?;
        }
        partial.rename(&libraries.root)?;
        let _ = fs::remove_dir_all(&fetched);
        step.done();
        if !libraries.are_complete() {
            bail!("Debian's packages {} have no libcuda any more", PACKAGES.join(", "));
        }
        Ok(libraries)
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
