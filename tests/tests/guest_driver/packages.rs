//! The packages for VMs.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lab::build::Profile;
use lab::checkers::Checkers;
use lab::cleanup::Scratch;
use lab::deb::{Options, guest};
use lab::progress::Progress;
use system_tests::skipped;

use crate::kernels;

/// Debian's packaging checkers find nothing, and the packaged source compiles. Findings must be
/// fixed or overridden with a reason.
#[test]
#[ignore = "fetches Debian's checkers: cargo lab test runs it"]
fn debians_checkers_find_nothing_and_the_packaged_module_compiles() -> Result<()> {
    let Some(kernels) = kernels()? else { return Ok(()) };
    if let Some(reason) = Checkers::impossible() {
        skipped(&format!("Debian's checkers of packages: {reason}"));
        return Ok(());
    }
    let scratch = Scratch::new()?;
    let options = Options { out: scratch.path().to_owned(), profile: Profile::Dev };
    let [program, module] = guest::write(&options, &Progress::new())?;
    let checkers = Checkers::open(&Progress::new())?;
    for package in [&program, &module] {
        let name = package.file_name().context("No name")?.to_string_lossy();
        let script =
            format!("lintian --allow-root --fail-on error,warning,info --display-info ./{name}");
        let output = checkers.run(scratch.path(), &script)?;
        ensure!(output.status == 0 && output.stdout.trim().is_empty(), "{output:?}");
    }
    let name = program.file_name().context("No name")?.to_string_lossy();
    let page = format!(
        "dpkg-deb -x ./{name} /tmp/root && zcat /tmp/root/usr/share/man/man1/*.gz > /tmp/vgpu-guest.1 \
         && mandoc -T lint -W warning /tmp/vgpu-guest.1"
    );
    let output = checkers.run(scratch.path(), &page)?;
    ensure!(output.status == 0 && output.stdout.trim().is_empty(), "{output:?}");
    let source = unpacked(&module, scratch.path())?;
    kernels.compile(&kernels.stable()?, &source).map(drop)
}

/// Unpacks the module's package and returns the folder of its source.
fn unpacked(package: &Path, folder: &Path) -> Result<std::path::PathBuf> {
    let root = folder.join("unpacked");
    let status = Command::new("dpkg-deb").arg("-x").args([package, &root]).status()?;
    ensure!(status.success(), "dpkg-deb: {status}");
    let mut sources = std::fs::read_dir(root.join("usr/src"))?;
    Ok(sources.next().context("The package has no source")??.path())
}
