//! Kernel with iommufd and VFIO device files, both of which Debian's kernel lacks.
//!
//! Debian's sources of both are compiled with Debian's compiler as modules for Debian's kernel and
//! replace the packaged modules. The compiler runs with unpacked packages as its root; only the
//! modules are kept. The modules also support the older group interface.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::Lab;
use crate::cache::{self, cache_folder};
use crate::checkers;
use crate::cleanup::Scratch;
use crate::debs::{self, Debs};
use crate::kernel::Kernel;
use crate::machine::Machine;
use crate::progress::Progress;
use crate::vfio;

/// Version of the cached folder's contents.
const LAYOUT: &str = "iommufd-1";

/// Configuration beyond Debian's, as make variables and as C macros.
const MAKE: &str = "CONFIG_IOMMUFD=m CONFIG_VFIO_DEVICE_CDEV=y CONFIG_VFIO_MDEV=";
const DEFINES: &str =
    "-DCONFIG_IOMMUFD_MODULE=1 -DCONFIG_VFIO_DEVICE_CDEV=1 -DCONFIG_INTERVAL_TREE_SPAN_ITER=1";

/// Compiled parts of the sources.
const SOURCES: [&str; 3] = ["drivers/iommu/*", "drivers/vfio/*", "lib/interval_tree.c"];

/// Library code that the kernel contains only for iommufd. Debian's kernel lacks it, so the module
/// includes it.
const SPANS: &str = "#include <linux/export.h>
#undef EXPORT_SYMBOL_GPL
#define EXPORT_SYMBOL_GPL(symbol)
#include \"../../../lib/interval_tree.c\"
";

/// Paths of the modules below the build folder, except for a module taken from Debian's package.
const MADE: [&str; 5] = [
    "drivers/iommu/iommufd/iommufd",
    "drivers/vfio/vfio",
    "drivers/vfio/vfio_iommu_type1",
    "drivers/vfio/pci/vfio-pci-core",
    "drivers/vfio/pci/vfio-pci",
];
const STOCK: &str = "irqbypass";

/// Prepares the lab with such a kernel and adds programs of this machine to the guest. Otherwise
/// returns the reason.
pub fn lab(
    lab: &Lab,
    programs: &[&Path],
    folder: &Path,
    progress: &Progress,
) -> Result<Result<Lab, String>> {
    let kernel = match kernel(progress)? {
        Ok(kernel) => kernel,
        Err(reason) => return Ok(Err(reason)),
    };
    let modules = MADE.map(|path| path.rsplit('/').next().unwrap_or(path));
    let modules: Vec<_> = [STOCK].into_iter().chain(modules).collect();
    vfio::lab_with(lab, kernel, &modules, programs, folder).map(Ok)
}

/// Returns the kernel, cached or newly compiled. Otherwise returns the reason.
fn kernel(progress: &Progress) -> Result<Result<Kernel, String>> {
    let cache = cache_folder()?;
    let found =
        |folder: &Path| folder.exists().then(|| Kernel::in_folder(folder).with_uncompressed());
    cache::or_reason(cache::find_or_prepare(&cache, LAYOUT, progress, found, |folder, fetched| {
        // The compiler runs in a separate root.
        Machine::require()?;
        let step = progress.step("Fetching the sources of a kernel's iommufd, and a compiler");
        let packages = Packages::fetch(fetched).map_err(|error| cache::unavailable(&error))?;
        step.done();
        let step = progress.step("Compiling iommufd and vfio for that kernel");
        packages.make(&cache, folder).context("Cannot compile a kernel's iommufd")?;
        step.done();
        Ok(())
    }))
}

/// Packages to fetch.
struct Packages {
    debs: Debs,
    /// `linux-image-6.12.107+deb13-amd64`
    image: String,
    /// `6.12.107+deb13-amd64`
    release: String,
    /// `linux-source-6.12`
    source: String,
}

impl Packages {
    fn fetch(folder: &Path) -> Result<Self> {
        let debs = Debs::open(folder)?;
        let image = Kernel::fetch(&debs)?;
        let release = image.strip_prefix("linux-image-").unwrap_or(&image).to_owned();
        let headers = format!("linux-headers-{release}");
        // Fetches the headers' compiler and build tools, but not the kernel package.
        let needs = debs.dependencies(&headers)?;
        let named = |prefix: &str| needs.iter().find(|name| name.starts_with(prefix));
        let (Some(gcc), Some(kbuild), Some(common)) =
            (named("gcc-"), named("linux-kbuild-"), named("linux-headers-"))
        else {
            bail!("{headers} names no compiler: {}", needs.join(", "));
        };
        let source = debs::linux_source(&release);
        debs.fetch_chosen(&["?essential", "make", "xz-utils", gcc, kbuild])?;
        debs.fetch(&[&headers, common, &source])?;
        Ok(Self { debs, image, release, source })
    }

    /// Compiles the modules and copies all files that a VM needs into `folder`.
    fn make(&self, cache: &Path, folder: &Path) -> Result<()> {
        let kernel = Kernel::unpack(&self.debs, &self.image, folder)?;
        let stock = Scratch::at(cache.join("iommufd-stock"))?;
        let image = self.debs.package(&self.image)?;
        debs::unpack_some(&image, stock.path(), &[&format!("*/{STOCK}.ko*")])?;
        let modules = folder.join("vfio");
        fs::create_dir_all(&modules)?;
        kernel.decompress(STOCK, stock.path(), &modules.join(format!("{STOCK}.ko")))?;

        let root = Scratch::at(cache.join("iommufd-root"))?;
        let source = self.debs.package(&self.source)?;
        let mut packages = self.debs.packages()?;
        packages.retain(|package| *package != image && *package != source);
        debs::unpack(&packages, root.path())?;
        checkers::prepare(root.path())?;

        let build = Scratch::at(cache.join("iommufd-build"))?;
        self.unpack_sources(&source, build.path())?;
        let script = format!(
            "set -e\n\
             make -s -C /usr/src/linux-headers-{} M=/mnt -j\"$(nproc)\" {MAKE} KCPPFLAGS=\"{DEFINES}\" modules\n\
             strip --strip-debug {}\n",
            self.release,
            MADE.map(|path| format!("{path}.ko")).join(" "),
        );
        checkers::run_in(root.path(), build.path(), &script)?.success()?;
        for path in MADE {
            let made = build.path().join(format!("{path}.ko"));
            let name = made.file_name().unwrap_or_default();
            fs::copy(&made, modules.join(name))
                .with_context(|| format!("The build made no {}", made.display()))?;
        }
        Ok(())
    }

    /// Unpacks the compiled parts of the sources and adds a Kbuild file for modules.
    fn unpack_sources(&self, package: &Path, build: &Path) -> Result<()> {
        let name = &self.source;
        let patterns = SOURCES.map(|pattern| format!("{name}/{pattern}"));
        let choice: Vec<_> = ["--wildcards".to_owned()].into_iter().chain(patterns).collect();
        debs::unpack_linux_source(package, name, build, &choice)?;
        fs::write(build.join("Kbuild"), "obj-m := drivers/iommu/iommufd/ drivers/vfio/\n")?;
        let iommufd: PathBuf = build.join("drivers/iommu/iommufd");
        fs::write(iommufd.join("interval_tree_spans.c"), SPANS)?;
        let makefile = iommufd.join("Makefile");
        let mut text = fs::read_to_string(&makefile).context("The sources have no iommufd")?;
        text.push_str("\niommufd-y += interval_tree_spans.o\n");
        fs::write(makefile, text).map_err(Into::into)
    }
}
