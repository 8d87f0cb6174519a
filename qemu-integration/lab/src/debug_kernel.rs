//! Guest kernels that look for faults of the guest's module while it runs.
//!
//! Debian's source package of the lab's kernel is compiled with Debian's compiler, with the few
//! parts that a VM of the lab needs, and with one of the kernel's own checkers. The compiler runs
//! with unpacked packages as its root. The kernel, and what the module's compilation reads, are
//! kept.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use uuid::Uuid;

use crate::build;
use crate::cache::{self, cache_folder, lock};
use crate::checkers;
use crate::cleanup::Scratch;
use crate::debs::{self, Debs};
use crate::guest_driver::{self, MODULE};
use crate::kernel::Kernel;
use crate::machine::Machine;
use crate::progress::Progress;
use crate::whole_file;

/// Version of the cached folder's contents.
const LAYOUT: &str = "debug-kernel-1";

/// Compiler, and what the kernel's own tools need.
const COMPILER: &str = "gcc-14";
const TOOLS: [&str; 7] = ["?essential", "make", "xz-utils", "flex", "bison", "bc", "libelf-dev"];

/// Configuration of all kernels, beyond `allnoconfig`.
const CONFIG: &str = include_str!("debug_kernel/vm.config");

/// Parts of the sources that no such kernel contains. Their Kconfig files are needed.
const LEFT_OUT: [&str; 8] = [
    "*/Documentation/*.rst",
    "*/Documentation/*.yaml",
    "*/arch/arm*/*.dts*",
    "*/drivers/gpu/*.[chS]",
    "*/drivers/media/*.[ch]",
    "*/drivers/net/*/*.[ch]",
    "*/drivers/staging/*.[ch]",
    "*/sound/*.[ch]",
];

/// Parts of a compiled kernel's folder that the module's compilation reads.
const KEPT: [&str; 7] =
    [".config", "Makefile", "Module.symvers", "arch/x86", "include", "scripts", "tools/objtool"];

/// Checker that a kernel contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checker {
    /// Accesses to freed memory and beyond its end (KASAN), and the order of locks (lockdep).
    AddressesAndLocks,
    /// Accesses by two CPUs that nothing orders (KCSAN).
    Races,
}

impl Checker {
    fn name(self) -> &'static str {
        match self {
            Self::AddressesAndLocks => "kasan",
            Self::Races => "kcsan",
        }
    }

    /// Returns the configuration of the checker.
    fn config(self) -> &'static str {
        match self {
            Self::AddressesAndLocks => include_str!("debug_kernel/kasan.config"),
            Self::Races => include_str!("debug_kernel/kcsan.config"),
        }
    }
}

/// A kernel with a checker.
#[derive(Clone, Debug)]
pub struct DebugKernel {
    /// Kernel image and busybox. The kernel has no modules.
    pub kernel: Kernel,
    checker: Checker,
    folder: PathBuf,
}

impl DebugKernel {
    /// Finds the kernel, or compiles it: minutes to an hour, by the number of CPUs. Otherwise
    /// returns the reason.
    pub fn open(checker: Checker, progress: &Progress) -> Result<Result<Self, String>> {
        let found = |folder: &Path| {
            let kernel = Kernel::in_folder(folder);
            folder.exists().then(|| Self { kernel, checker, folder: folder.to_owned() })
        };
        let cache = cache_folder()?;
        let name = format!("{LAYOUT}-{}", checker.name());
        let found = cache::find_or_prepare(&cache, &name, progress, found, |folder, fetched| {
            // The compiler runs in a separate root.
            Machine::require()?;
            let step = progress.step("Fetching the sources of a kernel, and a compiler");
            let packages = Packages::fetch(fetched).map_err(|error| cache::unavailable(&error))?;
            step.done();
            let step = progress.step(format!("Compiling a kernel with {}", checker.name()));
            packages.compile(checker, folder).context("Cannot compile a kernel")?;
            step.done();
            Ok(())
        });
        let kernel = |found: Self| Self { kernel: found.kernel.with_uncompressed(), ..found };
        Ok(cache::or_reason(found)?.map(kernel))
    }

    /// Compiles the guest's module for this kernel, unless the same sources have been compiled
    /// already. Returns its path in cargo's target folder.
    pub fn module(&self) -> Result<PathBuf> {
        let mut sources = Vec::new();
        for (name, path) in guest_driver::sources()? {
            sources.push((name, fs::read(path)?));
        }
        let whole = format!("{:?}", (LAYOUT, self.checker, &sources));
        let identity = Uuid::new_v5(&Uuid::NAMESPACE_OID, whole.as_bytes());
        let target = build::target_folder().join("guest-driver");
        let module = target.join(format!("{}-{identity}.ko", self.checker.name()));
        let _lock = lock(&target, &Progress::new())?;
        if module.is_file() {
            return Ok(module);
        }
        let scratch = Scratch::at(self.folder.join("module"))?;
        for (name, bytes) in &sources {
            fs::write(scratch.path().join(name), bytes)?;
        }
        let script =
            format!("set -e; cd module; make -s -C /mnt/tree M=/mnt/module CC={COMPILER} modules");
        checkers::run_in(&self.folder.join("root"), &self.folder, &script)?.success()?;
        whole_file::write(&module, &fs::read(scratch.path().join(MODULE))?)?;
        Ok(module)
    }
}

/// Fetched packages.
struct Packages {
    debs: Debs,
    /// `linux-source-6.12`
    source: String,
}

impl Packages {
    fn fetch(folder: &Path) -> Result<Self> {
        let debs = Debs::open(folder)?;
        let image = debs.dependency("linux-image-amd64")?;
        let release = image.strip_prefix("linux-image-").unwrap_or(&image);
        let source = debs::linux_source(release);
        let tools: Vec<_> = TOOLS.into_iter().chain([COMPILER]).collect();
        debs.fetch_chosen(&tools)?;
        debs.fetch(&[&source, "busybox-static"])?;
        Ok(Self { debs, source })
    }

    /// Compiles a kernel and copies all that a VM and the module need into `folder`.
    fn compile(&self, checker: Checker, folder: &Path) -> Result<()> {
        let kernel = Kernel::in_folder(folder);
        let (root, tree) = (folder.join("root"), folder.join("tree"));
        for path in [&root, &tree] {
            fs::create_dir_all(path)?;
        }
        let source = self.debs.package(&self.source)?;
        let busybox = self.debs.package("busybox-static")?;
        let mut packages = self.debs.packages()?;
        packages.retain(|package| *package != source && *package != busybox);
        debs::unpack(&packages, &root)?;
        checkers::prepare(&root)?;
        let raw = Scratch::at(folder.join("raw"))?;
        debs::unpack_some(&busybox, raw.path(), &["*/bin/busybox"])?;
        fs::rename(raw.path().join("usr/bin/busybox"), &kernel.busybox)
            .context("busybox is not where it was")?;
        let left_out = LEFT_OUT.map(|pattern| format!("--exclude={pattern}"));
        debs::unpack_linux_source(&source, &self.source, &tree, &left_out)?;

        fs::write(tree.join("lab.config"), [CONFIG, checker.config()].concat())?;
        let make = format!("nice -n 10 make -s CC={COMPILER} HOSTCC={COMPILER} -j\"$(nproc)\"");
        let script = format!(
            "set -e\n\
             {make} KCONFIG_ALLCONFIG=lab.config allnoconfig\n\
             grep '^CONFIG_' lab.config | while read -r option; do\n\
                 grep -qxF \"$option\" .config || {{ echo \"no $option\" >&2; exit 1; }}\n\
             done\n\
             {make} bzImage modules_prepare\n"
        );
        checkers::run_in(&root, &tree, &script)?.success()?;
        fs::rename(tree.join("arch/x86/boot/bzImage"), &kernel.image)?;
        // Without modules, the kernel's own symbols are listed at its link.
        let symbols = tree.join("vmlinux.symvers");
        ensure!(symbols.is_file(), "The build made no {}", symbols.display());
        fs::rename(symbols, tree.join("Module.symvers"))?;
        prune(&tree)
    }
}

/// Removes from a compiled kernel's folder what is not [`KEPT`].
fn prune(tree: &Path) -> Result<()> {
    let pruned = tree.with_file_name("pruned");
    for part in KEPT {
        let to = pruned.join(part);
        fs::create_dir_all(to.parent().unwrap_or(&pruned))?;
        fs::rename(tree.join(part), &to).with_context(|| format!("There is no {part}"))?;
    }
    fs::remove_dir_all(tree)?;
    fs::rename(pruned, tree).map_err(Into::into)
}
