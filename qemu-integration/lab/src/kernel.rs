//! Guest kernel: Debian's stock kernel, unpacked and not installed, with busybox as userspace.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::debs::{self, Debs};
use crate::shared_folder;
use crate::vmlinux;
use crate::whole_file;

/// Modules for the guest's display, in load order.
pub const MODULES: [&str; 7] = [
    "drm",
    "drm_kms_helper",
    "drm_shmem_helper",
    "ttm",
    "drm_ttm_helper",
    "drm_vram_helper",
    "bochs",
];

/// Paths of the kernel's parts.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Kernel image.
    pub image: PathBuf,
    /// The same kernel, uncompressed, if emulated CPUs should start that. QEMU loads it again at
    /// each reset, and thus also when a suspended VM wakes up, which then reboots.
    pub uncompressed: Option<PathBuf>,
    /// Folder with the uncompressed [`MODULES`] and those of [`shared_folder`].
    pub modules: PathBuf,
    /// Static busybox.
    pub busybox: PathBuf,
}

impl Kernel {
    /// Returns the paths in a prepared folder.
    pub fn in_folder(folder: &Path) -> Self {
        Self {
            image: folder.join("vmlinuz"),
            uncompressed: None,
            modules: folder.join("modules"),
            busybox: folder.join("busybox"),
        }
    }

    /// Adds the uncompressed kernel, which stays beside its image. Without, VMs boot the image.
    #[must_use]
    pub fn with_uncompressed(mut self) -> Self {
        let path = self.image.with_file_name("vmlinux");
        let decompress = || {
            let kernel = vmlinux::uncompressed(&fs::read(&self.image).ok()?)?;
            whole_file::write(&path, &kernel).ok()
        };
        self.uncompressed = (path.exists() || decompress().is_some()).then_some(path);
        self
    }

    /// Returns the path of a module.
    pub fn module(&self, name: &str) -> PathBuf {
        self.modules.join(format!("{name}.ko"))
    }

    /// Returns the release, such as `6.12.107+deb13-amd64`, from the header of the image.
    pub fn release(&self) -> Result<String> {
        let image = fs::read(&self.image)
            .with_context(|| format!("Cannot read {}", self.image.display()))?;
        let release = release(&image);
        release.with_context(|| format!("{} names no release", self.image.display()))
    }

    /// Fetches the packages and returns the name of the kernel package.
    pub fn fetch(debs: &Debs) -> Result<String> {
        let package = debs.dependency("linux-image-amd64")?;
        debs.fetch(&[&package, "busybox-static"])?;
        Ok(package)
    }

    /// Unpacks the packages into `folder`.
    pub fn unpack(debs: &Debs, package: &str, folder: &Path) -> Result<Self> {
        let kernel = Self::in_folder(folder);
        let raw = folder.join("unpacked");
        debs::unpack_some(&debs.package("busybox-static")?, &raw, &["*/bin/busybox"])?;
        let mut patterns = vec!["./boot/vmlinuz-*".to_owned()];
        patterns.extend(MODULES.iter().map(|module| format!("*/drivers/gpu/drm/*{module}.ko*")));
        patterns.extend(shared_folder::MODULES.iter().map(|module| format!("*/{module}.ko*")));
        let patterns: Vec<_> = patterns.iter().map(String::as_str).collect();
        debs::unpack_some(&debs.package(package)?, &raw, &patterns)?;

        fs::create_dir_all(&kernel.modules)?;
        for path in files_below(&raw)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name == "busybox" {
                fs::rename(&path, &kernel.busybox)?;
            } else if name.starts_with("vmlinuz-") {
                fs::rename(&path, &kernel.image)?;
            }
        }
        for path in files_below(&raw)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let Some((module, compression)) = name.split_once(".ko") else { continue };
            if !MODULES.contains(&module) && !shared_folder::MODULES.contains(&module) {
                continue;
            }
            let target = kernel.module(module);
            kernel.plain(&path, compression, &target)?;
        }
        for path in kernel.parts() {
            path.metadata().with_context(|| {
                format!("The kernel's package {package} has no {}", path.display())
            })?;
        }
        fs::remove_dir_all(&raw)?;
        Ok(kernel)
    }

    /// Extracts a module from an unpacked package.
    pub fn decompress(&self, module: &str, unpacked: &Path, target: &Path) -> Result<()> {
        for path in files_below(unpacked)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if let Some((found, compression)) = name.split_once(".ko")
                && found == module
            {
                return self.plain(&path, compression, target);
            }
        }
        bail!("The kernel's package has no module {module}")
    }

    fn plain(&self, path: &Path, compression: &str, target: &Path) -> Result<()> {
        if compression == ".xz" {
            let mut command = Command::new(&self.busybox);
            command.args(["xz", "-d", "-k", "-f"]).arg(path);
            debs::run_quietly(command, &target.with_extension("log"))?;
            fs::rename(path.with_extension(""), target)?;
        } else {
            fs::rename(path, target)?;
        }
        Ok(())
    }

    fn parts(&self) -> Vec<PathBuf> {
        let modules =
            MODULES.iter().chain(&shared_folder::MODULES).map(|module| self.module(module));
        [self.image.clone(), self.busybox.clone()].into_iter().chain(modules).collect()
    }
}

/// Returns the release in the header of a kernel image, as Linux' boot protocol defines it.
fn release(image: &[u8]) -> Option<String> {
    const POINTER: usize = 0x20e;
    const BASE: usize = 0x200;
    let pointer: [u8; 2] = image.get(POINTER..POINTER + 2)?.try_into().ok()?;
    let text = image.get(BASE + usize::from(u16::from_le_bytes(pointer))..)?;
    let text = text.split(|byte| *byte == b' ' || *byte == 0).next()?;
    Some(std::str::from_utf8(text).ok()?.to_owned()).filter(|release| !release.is_empty())
}

/// Returns all files in a folder and the folders in it.
pub(crate) fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut folders, mut files) = (vec![folder.to_path_buf()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else {
                files.push(entry.path());
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_read_from_the_images_header() {
        let mut image = vec![0; 0x400];
        assert_eq!(release(&image), None);
        assert_eq!(release(&image[..0x20f]), None);
        image[0x20e..0x210].copy_from_slice(&0x150_u16.to_le_bytes());
        image[0x350..0x360].copy_from_slice(b"6.12.1-amd64 (x)");
        assert_eq!(release(&image).as_deref(), Some("6.12.1-amd64"));
        image[0x20e..0x210].copy_from_slice(&0xffff_u16.to_le_bytes());
        assert_eq!(release(&image), None);
    }
}
