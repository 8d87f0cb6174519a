//! Host in a VM: a kernel with an IOMMU and vfio-pci, for tests that need physical devices.
//!
//! The devices are emulated by QEMU (`edu`, the standard display adapter) and appear physical to
//! the kernel in the VM: they are in IOMMU groups, drivers bind to them, and the emulated IOMMU
//! translates their DMA.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::json;

use crate::Lab;
use crate::cache::{self, cache_folder};
use crate::cleanup::Scratch;
use crate::debs::{self, Debs};
use crate::initramfs;
use crate::kernel::Kernel;
use crate::place::layout;
use crate::progress::Progress;
use crate::qemu::{Vm, VmSpec};
use crate::root::Root;

/// File name of a guest's saved state.
const SAVED: &str = "saved";
/// Version of the cached folder's contents.
const LAYOUT: &str = "vfio-3";
/// Modules in load order.
pub const MODULES: [&str; 5] =
    ["irqbypass", "vfio", "vfio_iommu_type1", "vfio-pci-core", "vfio-pci"];
/// Shell command that loads the modules in the VM.
pub const LOAD: &str = "[ ! -e /vfio/iommufd.ko ] || insmod /vfio/iommufd.ko || exit 1; \
    for m in irqbypass vfio vfio_iommu_type1 vfio-pci-core vfio-pci; do insmod /vfio/$m.ko || exit 1; done";

/// Prepares the lab with a vfio-pci kernel and adds programs of this machine to the guest.
pub fn lab(lab: &Lab, programs: &[&Path], folder: &Path, progress: &Progress) -> Result<Lab> {
    lab_with(lab, kernel(progress)?, &MODULES, programs, folder)
}

/// Prepares the lab with another kernel and its modules.
pub(crate) fn lab_with(
    lab: &Lab,
    kernel: Kernel,
    names: &[&str],
    programs: &[&Path],
    folder: &Path,
) -> Result<Lab> {
    let mut files = modules(&kernel, names);
    for program in programs {
        let name = program.file_name().context("A program without a name")?.to_string_lossy();
        files.push((format!("bin/{name}"), initramfs::stripped(program, folder)?));
        for library in libraries(program)? {
            let name = library.to_string_lossy().trim_start_matches('/').to_owned();
            files.push((name, library));
        }
    }
    let target = folder.join("host.cpio");
    let archives = [initramfs::archive(&kernel, &[])?, initramfs::extra(&files)?];
    initramfs::write(&target, &archives)?;
    let mut lab = Lab { initramfs: target, kvm: false, ..lab.clone() };
    lab.root.kernel = kernel;
    Ok(lab)
}

/// Adds QEMU and the saved state of a booted guest to the lab, because booting a nested VM takes
/// minutes. `plain` is the lab that creates the guest.
pub fn with_guest(
    host: Lab,
    plain: &Lab,
    guest: &VmSpec,
    folder: &Path,
    progress: &Progress,
) -> Result<Lab> {
    // The system's QEMU cannot be copied.
    let mut plain = Lab { root: Root::open_own(progress)?, kvm: false, ..plain.clone() };
    // The resumed VM has the same option ROMs only with the same kernel. An image is smaller.
    plain.root.kernel.uncompressed = None;
    let saved = folder.join("guest.saved");
    Vm::boot(&plain, guest, &folder.join("guest"))?.save(&saved)?;
    let qemu = &plain.root.qemu;
    let unpacked = qemu.folder().context("QEMU is not unpacked")?;
    let inside = |name: &str| format!("{}/{name}", layout::ROOT);
    let mut files = vec![
        (inside("vmlinuz"), plain.root.kernel.image.clone()),
        (layout::INITRAMFS.to_owned(), plain.initramfs),
        (inside(SAVED), saved),
    ];
    for path in qemu.files()? {
        let name = path.strip_prefix(unpacked).context("A library lies outside of QEMU's root")?;
        files.push((inside(&format!("root/{}", name.display())), path.clone()));
    }
    let initramfs = folder.join("host-with-guest.cpio");
    initramfs::write(&initramfs, &[fs::read(&host.initramfs)?, initramfs::extra(&files)?])?;
    Ok(Lab { initramfs, ..host })
}

/// Resumes the guest of [`with_guest`], inside a host that contains it.
pub fn guest_inside(guest: &VmSpec, folder: &Path) -> Result<Vm> {
    let top = Path::new("/");
    let root = Root::in_folder(&top.join(layout::ROOT)).context("The QEMU inside does not run")?;
    let lab = Lab { root, initramfs: top.join(layout::INITRAMFS), kvm: false };
    let saved = Some(top.join(layout::ROOT).join(SAVED));
    let mut vm = Vm::start(&lab, &VmSpec { saved, ..guest.clone() }, folder)?;
    vm.wait_running()?;
    Ok(vm)
}

/// A VM with an IOMMU, the standard display adapter at 0000:00:02.0 and `edu` at 0000:00:03.0.
pub fn machine(name: &str) -> VmSpec {
    let mut spec = VmSpec::new(name);
    spec.devices = vec![
        json!({ "driver": "intel-iommu" }),
        json!({ "driver": "VGA", "id": "display", "addr": "0x2" }),
        json!({ "driver": "edu", "id": "edu", "addr": "0x3" }),
    ];
    spec
}

/// Returns the modules of a kernel as files of the VM.
pub fn modules(kernel: &Kernel, names: &[&str]) -> Vec<(String, PathBuf)> {
    let folder = kernel.modules.with_file_name("vfio");
    let file = |name: &&str| (format!("vfio/{name}.ko"), folder.join(format!("{name}.ko")));
    names.iter().map(file).collect()
}

/// Path of the program that loads modules, as on Debian.
pub fn kmod(kernel: &Kernel) -> PathBuf {
    kernel.modules.with_file_name("kmod")
}

/// Returns the lab's stock kernel with more of its modules.
pub fn kernel(progress: &Progress) -> Result<Kernel> {
    let cache = cache_folder()?;
    let found = |folder: &Path| {
        folder.join("vfio").exists().then(|| Kernel::in_folder(folder).with_uncompressed())
    };
    cache::find_or_prepare(&cache, LAYOUT, progress, found, |folder, fetched| {
        let step = progress.step("Fetching a kernel with vfio-pci");
        let debs = Debs::open(fetched)?;
        let package = Kernel::fetch(&debs)?;
        let kernel = Kernel::unpack(&debs, &package, folder)?;
        let raw = Scratch::at(cache.join("vfio-raw"))?;
        let patterns = MODULES.map(|module| format!("*/{module}.ko*"));
        let patterns: Vec<_> = patterns.iter().map(String::as_str).collect();
        debs::unpack_some(&debs.package(&package)?, raw.path(), &patterns)?;
        debs.fetch(&["kmod"])?;
        debs::unpack_some(&debs.package("kmod")?, raw.path(), &["*/bin/kmod"])?;
        fs::create_dir_all(folder.join("vfio"))?;
        fs::rename(raw.path().join("usr/bin/kmod"), folder.join("kmod"))?;
        for module in MODULES {
            let target = folder.join("vfio").join(format!("{module}.ko"));
            kernel.decompress(module, raw.path(), &target)?;
        }
        step.done();
        Ok(())
    })
}

/// Returns the shared libraries and the loader of a program of this machine.
pub fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("Cannot run ldd")?;
    // "libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f...)", "/lib64/ld-linux-x86-64.so.2
    // (0x00007f...)"
    let text = String::from_utf8_lossy(&output.stdout);
    let paths = text.lines().filter_map(|line| {
        line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from)
    });
    Ok(paths.collect())
}
