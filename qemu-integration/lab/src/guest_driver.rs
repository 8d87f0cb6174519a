//! The guest's Linux module, compiled for Debian's kernels.
//!
//! Kernel headers, compilers and kernels come from Debian's packages of three suites: the previous
//! release, the release, and its backports with the newest kernel. The compilers run with the
//! unpacked packages as their root.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use uuid::Uuid;

use crate::build::{self, workspace};
use crate::cache::{self, cache_folder, lock};
use crate::checkers;
use crate::cleanup::Scratch;
use crate::debs::{self, Debs, Sources};
use crate::kernel::Kernel;
use crate::machine::Machine;
use crate::progress::Progress;
use crate::whole_file;

/// Version of the cached folder's contents.
const LAYOUT: &str = "guest-driver-1";

/// Suites of Debian with different kernels. The lab's VMs boot the kernel of [`RELEASE`].
const SUITES: [&str; 3] = ["bookworm", RELEASE, "trixie-backports"];
const RELEASE: &str = "trixie";

/// Folder of the module's sources in the workspace.
pub const SOURCES: &str = "qemu-integration/guest-driver";

/// File name of the module.
pub const MODULE: &str = "tessera_guest.ko";

/// Folder of compiled modules in cargo's target folder.
const BUILT: &str = "guest-driver";

/// Parts of the packages that no build reads.
const NOT_NEEDED: [&str; 4] = ["usr/share/doc", "usr/share/locale", "usr/share/man", "boot"];

/// Headers and compilers, and the kernels themselves.
#[derive(Clone, Debug)]
pub struct Kernels {
    folder: PathBuf,
}

/// A kernel that the module can be compiled for.
#[derive(Clone, Debug)]
pub struct Target {
    /// Release, such as `6.12.107+deb13-amd64`.
    pub release: String,
    /// Kernel image and busybox. The kernel has no modules.
    pub kernel: Kernel,
}

impl Kernels {
    /// Finds or fetches the kernels and compilers, some 500 MiB. Otherwise returns the reason.
    pub fn open(progress: &Progress) -> Result<Result<Self, String>> {
        let found = |folder: &Path| folder.exists().then(|| Self { folder: folder.to_owned() });
        let prepare = |folder: &Path, fetched: &Path| {
            // The compilers run in a separate root.
            Machine::require()?;
            let step = progress.step("Fetching headers of Debian's kernels, and compilers");
            let sources = Sources { suites: &SUITES, ..Sources::default() };
            let debs =
                Debs::open_sources(fetched, sources).map_err(|error| cache::unavailable(&error))?;
            prepare(&debs, folder).context("Cannot prepare Debian's kernels")?;
            step.done();
            Ok(())
        };
        cache::or_reason(cache::find_or_prepare(&cache_folder()?, LAYOUT, progress, found, prepare))
    }

    /// Returns the kernels, oldest first.
    pub fn targets(&self) -> Result<Vec<Target>> {
        SUITES.iter().map(|suite| self.target(suite)).collect()
    }

    /// Returns the kernel of the lab's release.
    pub fn stable(&self) -> Result<Target> {
        self.target(RELEASE)
    }

    /// Returns the target with the same release as a kernel.
    pub fn for_kernel(&self, kernel: &Kernel) -> Result<Target> {
        let release = kernel.release()?;
        let found = self.targets()?.into_iter().find(|target| target.release.trim() == release);
        found.with_context(|| {
            format!(
                "There are no headers of the lab's kernel {release}; remove the folder {} to fetch \
                 those of today",
                self.folder.display()
            )
        })
    }

    fn target(&self, suite: &str) -> Result<Target> {
        let folder = self.folder.join(suite);
        let release = fs::read_to_string(folder.join("release"))
            .with_context(|| format!("No kernel in {}", folder.display()))?;
        Ok(Target { release, kernel: Kernel::in_folder(&folder).with_uncompressed() })
    }

    /// Compiles the module for a kernel, with warnings as errors, unless the same sources have been
    /// compiled for this kernel already. Returns its path in cargo's target folder.
    pub fn build(&self, target: &Target) -> Result<PathBuf> {
        let sources = sources()?
            .into_iter()
            .map(|(name, path)| {
                let bytes = fs::read(&path);
                Ok((name, bytes.with_context(|| format!("Cannot read {}", path.display()))?))
            })
            .collect::<Result<Vec<_>>>()?;
        let folder = build::target_folder().join(BUILT);
        let release = target.release.trim();
        let module = folder.join(format!("{release}-{}.ko", identity(&target.script(), &sources)));
        if module.is_file() {
            return Ok(module);
        }
        let _lock = lock(&folder, &Progress::new())?;
        if !module.is_file() {
            let scratch = Scratch::new()?;
            for (name, bytes) in &sources {
                fs::write(scratch.path().join(name), bytes)?;
            }
            let compiled = self.compile(target, scratch.path())?;
            whole_file::write(&module, &fs::read(compiled)?)?;
        }
        Ok(module)
    }

    /// Compiles sources of the module in `folder`, as dkms does. Returns the module's path.
    pub fn compile(&self, target: &Target, folder: &Path) -> Result<PathBuf> {
        let output = checkers::run_in(&self.folder.join("root"), folder, &target.script())?;
        ensure!(
            output.status == 0 && !output.stderr.contains("warning:"),
            "The module does not compile for {}: {}\n{}",
            target.release,
            output.stdout,
            output.stderr
        );
        let module = folder.join(MODULE);
        ensure!(module.is_file(), "The build made no {}", module.display());
        Ok(module)
    }
}

impl Target {
    /// Returns the script that compiles the module.
    fn script(&self) -> String {
        format!(
            "set -e\n\
             make KDIR=/usr/src/linux-headers-{} -j\"$(nproc)\" KCFLAGS=-Werror\n\
             strip --strip-debug {MODULE}",
            self.release,
        )
    }
}

/// Returns the hash of everything that a compiled module depends on.
fn identity(script: &str, sources: &[(String, Vec<u8>)]) -> Uuid {
    let whole = (LAYOUT, script, sources);
    Uuid::new_v5(&Uuid::NAMESPACE_OID, format!("{whole:?}").as_bytes())
}

/// Returns the names and paths of the module's source files.
pub fn sources() -> Result<Vec<(String, PathBuf)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(workspace().join(SOURCES)).context("No sources of the module")? {
        let path = entry?.path();
        if path.is_file() {
            files.push((path.file_name().unwrap_or_default().to_string_lossy().into(), path));
        }
    }
    files.sort();
    Ok(files)
}

/// Fetches and unpacks everything into `folder`.
fn prepare(debs: &Debs, folder: &Path) -> Result<()> {
    let root = folder.join("root");
    fs::create_dir_all(&root)?;
    let mut headers = Vec::new();
    let mut images = Vec::new();
    for suite in SUITES {
        let named = |start: &str| {
            let names = debs.dependencies_in(&format!("{start}amd64"), suite)?;
            let found = names.into_iter().find(|name| is_versioned(name, start));
            found.with_context(|| format!("Debian {suite} has no {start}amd64"))
        };
        headers.push(named("linux-headers-")?);
        images.push((suite, named("linux-image-")?));
    }
    let mut wanted = vec!["?essential", "make", "xz-utils", "gcc-12", "gcc-14"];
    wanted.extend(headers.iter().map(String::as_str));
    debs.fetch_chosen(&wanted)?;
    debs::unpack(&debs.packages()?, &root)?;
    checkers::prepare(&root)?;
    debs::remove_parts(&root, &NOT_NEEDED);
    debs.fetch(&["busybox-static"])?;
    for (suite, image) in images {
        let release = image.strip_prefix("linux-image-").unwrap_or(&image);
        unpack_kernel(debs, release, &folder.join(suite))?;
    }
    Ok(())
}

/// Returns whether a package is that of one version, such as `linux-image-6.1.0-50-amd64`.
fn is_versioned(name: &str, start: &str) -> bool {
    name.strip_prefix(start).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// Fetches a kernel, and unpacks its image and busybox.
fn unpack_kernel(debs: &Debs, release: &str, folder: &Path) -> Result<()> {
    let kernel = Kernel::in_folder(folder);
    let raw = folder.join("raw");
    fs::create_dir_all(&raw)?;
    // Newer kernels have their image in a package of its own.
    let image = format!("linux-image-{release}");
    let binary = format!("linux-binary-{release}");
    let split = debs.dependencies(&image)?.contains(&binary);
    let package = if split { binary } else { image };
    debs.fetch(&[&package])?;
    let package = debs.package(&package)?;
    debs::unpack_some(&package, &raw, &["*vmlinuz*"])?;
    debs::unpack_some(&debs.package("busybox-static")?, &raw, &["*/bin/busybox"])?;
    for path in crate::kernel::files_below(&raw)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name == "busybox" {
            fs::rename(&path, &kernel.busybox)?;
        } else if name.starts_with("vmlinuz") {
            fs::rename(&path, &kernel.image)?;
        }
    }
    if !kernel.image.exists() {
        bail!("{} has no kernel", package.display());
    }
    fs::remove_dir_all(&raw)?;
    fs::write(folder.join("release"), release)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiled_module_is_that_of_the_same_sources_and_kernel_only() {
        let sources = |name: &str, text: &str| vec![(name.to_owned(), text.as_bytes().to_vec())];
        let first = identity("make 6.12", &sources("main.c", "int a;"));
        assert_eq!(first, identity("make 6.12", &sources("main.c", "int a;")));
        for other in [
            identity("make 6.1", &sources("main.c", "int a;")),
            identity("make 6.12", &sources("main.h", "int a;")),
            identity("make 6.12", &sources("main.c", "int b;")),
            identity("make 6.12", &[sources("main.c", "int a;"), sources("b.c", "")].concat()),
        ] {
            assert_ne!(first, other);
        }
    }
}
