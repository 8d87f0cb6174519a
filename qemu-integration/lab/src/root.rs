//! QEMU and the guest kernel: the system's QEMU if new enough, otherwise a cached copy.
//!
//! The cached QEMU consists of unpacked Debian packages (see [`crate::debs`]), run through their
//! own dynamic loader, independently of the host's C library.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache::{self, cache_folder};
use crate::debs::{self, Debs};
use crate::kernel::Kernel;
use crate::progress::Progress;

/// Version of the cached folder's contents.
const LAYOUT: &str = "2";
/// First QEMU version with a vfio-user client.
const OLDEST_QEMU: (u32, u32) = (10, 1);
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LOADER: &str = "lib64/ld-linux-x86-64.so.2";
const PROGRAM: &str = "usr/bin/qemu-system-x86_64";
/// Firmware for a q35 machine that boots a kernel directly.
const FIRMWARE: [&str; 3] = [
    "usr/share/seabios/bios-256k.bin",
    "usr/share/qemu/linuxboot_dma.bin",
    "usr/share/qemu/kvmvapic.bin",
];

/// QEMU and kernel of the VMs.
#[derive(Clone, Debug)]
pub struct Root {
    /// Emulator.
    pub qemu: Qemu,
    /// Kernel that the VMs boot.
    pub kernel: Kernel,
}

/// QEMU with `vfio-user-pci`.
#[derive(Clone, Debug)]
pub struct Qemu {
    program: PathBuf,
    args: Vec<OsString>,
    modules: Option<PathBuf>,
    /// Folder that QEMU was unpacked to.
    folder: Option<PathBuf>,
    /// Version for display, such as `11.1.3`.
    pub version: String,
}

impl Root {
    /// Finds or prepares QEMU and the kernel.
    pub fn open(progress: &Progress) -> Result<Self> {
        Self::find_or_prepare(Qemu::system().as_ref(), progress)
    }

    /// Finds or prepares the cached QEMU, even if the system's QEMU is new enough.
    pub fn open_own(progress: &Progress) -> Result<Self> {
        Self::find_or_prepare(None, progress)
    }

    /// Returns the contents of a folder, if complete and executable on this machine.
    pub fn in_folder(folder: &Path) -> Option<Self> {
        Self::at(folder, None)
    }

    fn find_or_prepare(system: Option<&Qemu>, progress: &Progress) -> Result<Self> {
        let found = |folder: &Path| Self::at(folder, system);
        let cache = cache_folder()?;
        let root = cache::find_or_prepare(&cache, LAYOUT, progress, found, |folder, fetched| {
            if !cfg!(target_arch = "x86_64") {
                bail!("The lab runs on x86-64 hosts only");
            }
            if !Debs::possible() {
                bail!(
                    "The lab fetches a guest kernel (and QEMU, unless the system's is 10.1 or newer) as Debian \
                     packages and needs apt-get, dpkg-deb and tar: run it on Debian or Ubuntu"
                );
            }
            prepare(fetched, folder, system.is_none(), progress)
                .context("Cannot prepare the lab's QEMU and guest kernel")
        })?;
        Ok(Self { kernel: root.kernel.with_uncompressed(), ..root })
    }

    fn at(folder: &Path, system: Option<&Qemu>) -> Option<Self> {
        let kernel = Kernel::in_folder(folder);
        let qemu = system.cloned().or_else(|| Qemu::unpacked(&folder.join("root")))?;
        kernel.image.exists().then_some(Self { qemu, kernel })
    }
}

fn prepare(fetched: &Path, folder: &Path, with_qemu: bool, progress: &Progress) -> Result<()> {
    let step = progress.step("Reading Debian's package lists");
    let debs = Debs::open(fetched)?;
    step.done();
    let step = progress.step("Fetching the guest's kernel");
    let kernel = Kernel::fetch(&debs)?;
    step.done();
    if !with_qemu {
        let step = progress.step("Unpacking the guest's kernel");
        Kernel::unpack(&debs, &kernel, folder)?;
        step.done();
        return Ok(());
    }
    let step = progress.step("Fetching QEMU and the libraries it needs");
    debs.fetch_closure(&["qemu-system-x86", "qemu-system-data", "seabios"])?;
    step.done();
    let step = progress.step("Unpacking them");
    let root = folder.join("root");
    fs::create_dir_all(&root)?;
    let kernel_package = debs.package(&kernel)?;
    let mut packages = debs.packages()?;
    packages.retain(|package| *package != kernel_package);
    std::thread::scope(|scope| {
        let unpacked = scope.spawn(|| Kernel::unpack(&debs, &kernel, folder));
        debs::unpack(&packages, &root)?;
        match unpacked.join() {
            Ok(result) => result.map(drop),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })?;
    step.done();
    Ok(())
}

impl Qemu {
    /// Returns the system's QEMU, if suitable.
    fn system() -> Option<Self> {
        Self::check("qemu-system-x86_64".into(), Vec::new(), None, None)
    }

    /// Returns the QEMU in an unpacked root, run through the root's dynamic loader.
    fn unpacked(root: &Path) -> Option<Self> {
        let libraries = root.join(LIBRARIES);
        let args = vec![
            "--library-path".into(),
            libraries.clone().into(),
            root.join(PROGRAM).into(),
            "-L".into(),
            root.join("usr/share/qemu").into(),
            "-L".into(),
            root.join("usr/share/seabios").into(),
        ];
        let loader = root.join(LOADER);
        let modules = Some(libraries.join("qemu"));
        loader.exists().then(|| Self::check(loader, args, modules, Some(root.to_path_buf())))?
    }

    /// Returns the folder that QEMU was unpacked to; none for the system's QEMU.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Returns all files that an unpacked QEMU needs: the program, libraries and firmware.
    pub fn files(&self) -> Result<Vec<PathBuf>> {
        let root = self.folder().context("The system's QEMU cannot be bundled")?;
        let mut files = vec![root.join(LOADER), root.join(PROGRAM)];
        let mut list = Command::new(root.join(LOADER));
        list.arg("--library-path").arg(root.join(LIBRARIES)).arg("--list").arg(root.join(PROGRAM));
        let output = list.output().context("Cannot list QEMU's libraries")?;
        // "libz.so.1 => /folder/libz.so.1 (0x00007f...)"
        let text = String::from_utf8_lossy(&output.stdout);
        let libraries = text.lines().filter_map(|line| line.split_once("=> "));
        files.extend(libraries.map(|(_, path)| path.split(" (0x").next().unwrap_or(path).into()));
        files.retain(|file| file.starts_with(root));
        files.extend(FIRMWARE.map(|name| root.join(name)));
        Ok(files)
    }

    fn check(
        program: PathBuf,
        args: Vec<OsString>,
        modules: Option<PathBuf>,
        folder: Option<PathBuf>,
    ) -> Option<Self> {
        let mut qemu = Self { program, args, modules, folder, version: String::new() };
        let output = qemu.command().arg("--version").output().ok()?;
        let (version, number) = parse_version(&String::from_utf8_lossy(&output.stdout))?;
        qemu.version = version;
        if number < OLDEST_QEMU {
            return None;
        }
        let output = qemu.command().args(["-device", "help"]).output().ok()?;
        String::from_utf8_lossy(&output.stdout).contains("\"vfio-user-pci\"").then_some(qemu)
    }

    /// Returns a command that runs QEMU.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        if let Some(modules) = &self.modules {
            command.env("QEMU_MODULE_DIR", modules);
        }
        command
    }
}

/// Parses a text such as "QEMU emulator version 11.1.3 (Debian ...)".
fn parse_version(text: &str) -> Option<(String, (u32, u32))> {
    let version = text.split_once("version ")?.1.split_whitespace().next()?;
    let mut numbers = version.split('.').map(str::parse);
    let number = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    Some((version.to_owned(), number))
}

#[cfg(test)]
mod tests {
    use super::parse_version;

    #[test]
    fn versions_compare_as_numbers() {
        let (text, number) =
            parse_version("QEMU emulator version 11.1.3 (Debian 1:11)\n...").unwrap();
        assert_eq!((text.as_str(), number), ("11.1.3", (11, 1)));
        assert!(parse_version("QEMU emulator version 9.2.0").unwrap().1 < super::OLDEST_QEMU);
        assert!(parse_version("something else").is_none());
    }
}
