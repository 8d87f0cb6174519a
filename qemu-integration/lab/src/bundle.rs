//! `cargo lab bundle`: one archive that runs the demo, the benchmark and the hardware tests on a
//! machine without installed dependencies.
//!
//! Tessera's programs are linked statically; QEMU comes with its libraries and dynamic loader. The
//! unpacked bundle needs no network, package, particular C library, root or home folder.

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use flate2::Compression;
use flate2::write::GzEncoder;

use crate::build::{self, Profile};
use crate::guest_driver::{self, Kernels};
use crate::initramfs;
use crate::place::layout;
use crate::progress::Progress;
use crate::root::Root;
use crate::shared_folder;

/// Folder that the archive unpacks to.
const TOP: &str = "tessera";
/// Path of the kernels' source in the workspace.
pub const SOURCE: &str = "qemu-integration/guest/kernels/kernels.cu";
/// Path of the source of the CUDA reference program in the workspace.
pub const CUDA_SOURCE: &str = "tests/benches/gpu/cuda.c";
/// Path of the source of the CUDA programs of the benchmark and of VMs in the workspace.
pub const PROGRAMS_SOURCE: &str = "tests/benches/gpu/programs/programs.cu";
/// Path of the source of the program that tries CUDA's features in the workspace.
pub const FEATURES_SOURCE: &str = "tests/benches/gpu/programs/features.cu";
const README: &str = include_str!("bundle.md");

/// Options of a bundle.
#[derive(Clone, Debug)]
pub struct Options {
    /// Path of the archive.
    pub to: PathBuf,
    /// Profile of the programs: optimized, or as in tests.
    pub profile: Profile,
    /// Whether to include the GPU's benchmark and tests.
    pub benchmark: bool,
}

/// Writes the archive and returns its length in bytes.
pub fn write(options: &Options, progress: &Progress) -> Result<u64> {
    let root = Root::open_own(progress)?;
    let mut targets =
        vec!["--bin", "vgpu-guest", "--bin", "vgpud", "--bin", "vgpuctl", "--bin", "lab"];
    if options.benchmark {
        targets.extend(["--bench", "gpu", "--test", "nvidia_hw"]);
    }
    let programs =
        build::portable("Building static programs", &targets, options.profile, progress)?;
    let step = progress.step("Packing");
    let guest = initramfs::archive(&root.kernel, &[programs.find("vgpu-guest")?.to_path_buf()])?;

    if let Some(folder) = options.to.parent() {
        fs::create_dir_all(folder)?;
    }
    let file = File::create(&options.to)
        .with_context(|| format!("Cannot write {}", options.to.display()))?;
    let level = if options.profile == Profile::Release { 9 } else { 1 };
    let packer = GzEncoder::new(BufWriter::new(file), Compression::new(level));
    let mut archive = Archive(tar::Builder::new(packer));
    archive.file(layout::RUN, 0o755, &read(programs.find("lab")?)?)?;
    for name in ["vgpud", "vgpuctl"] {
        let to = format!("{}/{name}", layout::PROGRAMS);
        archive.file(&to, 0o755, &read(programs.find(name)?)?)?;
    }
    let library = build::cuda_library(options.profile, progress)?;
    let to = format!("{}/{}", layout::PROGRAMS, build::CUDA_LIBRARY);
    archive.file(&to, 0o755, &read(&library)?)?;
    let checkpoint = build::checkpoint(options.profile, progress)?;
    archive.file(layout::CHECKPOINT, 0o755, &read(&checkpoint)?)?;
    if options.benchmark {
        for name in ["gpu", "nvidia_hw"] {
            let to = format!("{}/{name}", layout::PROGRAMS);
            archive.file(&to, 0o755, &read(programs.find(name)?)?)?;
        }
        for (name, source) in [(layout::CUDA, CUDA_SOURCE), (layout::FEATURES, FEATURES_SOURCE)] {
            archive.file(name, 0o644, &read(&build::workspace().join(source))?)?;
        }
    }
    let programs = read(&build::workspace().join(PROGRAMS_SOURCE))?;
    archive.file(layout::PROGRAMS_SOURCE, 0o644, &programs)?;
    match module(&root, progress) {
        Ok(module) => {
            archive.file(layout::MODULE, 0o644, &module)?;
            for (name, path) in guest_driver::sources()? {
                archive.file(&format!("{}/{name}", layout::MODULE_SOURCE), 0o644, &read(&path)?)?;
            }
        }
        // The demo reports that CUDA in VMs is left out for this reason.
        Err(reason) => eprintln!("The bundle has no module for its guests: {reason:#}"),
    }
    archive.file(layout::KERNELS, 0o644, &read(&build::workspace().join(SOURCE))?)?;
    archive.file("README.md", 0o644, README.as_bytes())?;
    archive.file("LICENSE-APACHE", 0o644, &read(&build::workspace().join("LICENSE-APACHE"))?)?;
    archive.file("LICENSE-MIT", 0o644, &read(&build::workspace().join("LICENSE-MIT"))?)?;
    archive.file(layout::INITRAMFS, 0o644, &guest)?;
    archive.file(&format!("{}/vmlinuz", layout::ROOT), 0o644, &read(&root.kernel.image)?)?;
    for name in shared_folder::MODULES {
        let to = format!("{}/modules/{name}.ko", layout::ROOT);
        archive.file(&to, 0o644, &read(&root.kernel.module(name))?)?;
    }
    let folder = root.qemu.folder().context("QEMU is not unpacked")?;
    for path in root.qemu.files()? {
        let name = path.strip_prefix(folder).context("A library lies outside of QEMU's root")?;
        let name = format!("{}/root/{}", layout::ROOT, name.display());
        // Stores a link's target under the link's name.
        archive.file(&name, 0o755, &read(&path)?)?;
    }
    archive.0.into_inner()?.finish()?.into_inner()?.sync_all()?;
    step.done();
    Ok(fs::metadata(&options.to)?.len())
}

/// Compiles the guest's Linux module for the bundle's kernel.
fn module(root: &Root, progress: &Progress) -> Result<Vec<u8>> {
    let kernels = Kernels::open(progress)?.map_err(anyhow::Error::msg)?;
    let target = kernels.for_kernel(&root.kernel)?;
    read(&kernels.build(&target)?)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("Cannot read {}", path.display()))
}

struct Archive<W: std::io::Write>(tar::Builder<W>);

impl<W: std::io::Write> Archive<W> {
    /// Adds a file, without time or user, so that equal bundles are equal files.
    fn file(&mut self, name: &str, mode: u32, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            bail!("{name} is empty");
        }
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(mode);
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        self.0.append_data(&mut header, format!("{TOP}/{name}"), bytes)?;
        Ok(())
    }
}
