//! Packages for virtual machines: `tessera-guest` with `vgpu-guest`, its agent and rules of udev,
//! `tessera-guest-dkms` with the source of the Linux module.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::CommandFactory;
use vgpu_guest::cli::Cli;

use super::{
    Options, REVISION, Stage, date, debian_changelog, files_and_size, md5_sums, pack, pages, strip,
};
use crate::build::{self, workspace};
use crate::cleanup::Scratch;
use crate::guest_driver::SOURCES;
use crate::progress::Progress;

/// Files of `tessera-guest`: source and target.
const GUEST_FILES: [(&str, &str); 5] = [
    ("packaging/guest/60-tessera-guest.rules", "usr/lib/udev/rules.d/60-tessera-guest.rules"),
    ("packaging/guest/vgpu-guest-agent.service", "usr/lib/systemd/system/vgpu-guest-agent.service"),
    ("packaging/guest/tessera-guest.conf", "usr/lib/modprobe.d/tessera-guest.conf"),
    ("docs/guest.md", "usr/share/doc/tessera-guest/guest.md"),
    ("packaging/debian/copyright", "usr/share/doc/tessera-guest/copyright"),
];

/// Path of `vgpu-checkpoint` in the package, without the first slash of
/// [`vgpu_guest::checkpoint::DEFAULT_TOOL`].
const CHECKPOINT: &str = "usr/lib/tessera/vgpu-checkpoint";

/// Writes both packages and returns their paths.
pub fn write(options: &Options, progress: &Progress) -> Result<[PathBuf; 2]> {
    let targets = ["--bin", "vgpu-guest"];
    let programs = build::portable("Building vgpu-guest", &targets, options.profile, progress)?;
    let checkpoint = build::checkpoint(options.profile, progress)?;
    let step = progress.step("Putting the guest's packages together");
    let scratch = Scratch::new()?;
    let guest =
        program_package(options, programs.find("vgpu-guest")?, &checkpoint, scratch.path())?;
    let module = module_package(options, scratch.path())?;
    step.done();
    Ok([guest, module])
}

fn program_package(
    options: &Options,
    program: &Path,
    checkpoint: &Path,
    scratch: &Path,
) -> Result<PathBuf> {
    let root = scratch.join("tessera-guest");
    let stage = Stage { root: &root };
    for (file, to) in [(program, "usr/bin/vgpu-guest"), (checkpoint, CHECKPOINT)] {
        stage.file(to, 0o755, &fs::read(file)?)?;
        strip(&root.join(to));
    }
    for (from, to) in GUEST_FILES {
        stage.file(to, 0o644, &read(from)?)?;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(Cli::command()).render(&mut page)?;
    let page = pages::tidy(&String::from_utf8(page)?, "vgpu-guest", "1", &date("%Y-%m-%d")?);
    stage.packed("usr/share/man/man1/vgpu-guest.1.gz", page.as_bytes())?;
    finish(&stage, options, "guest", "amd64", &[], &[])
}

fn module_package(options: &Options, scratch: &Path) -> Result<PathBuf> {
    let root = scratch.join("tessera-guest-dkms");
    let stage = Stage { root: &root };
    let version = env!("CARGO_PKG_VERSION");
    let folder = format!("usr/src/tessera-guest-{version}");
    for entry in fs::read_dir(workspace().join(SOURCES)).context("No sources of the module")? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // The licence is part of Debian.
        if path.is_file() && name != "LICENSE" {
            stage.file(&format!("{folder}/{name}"), 0o644, &fs::read(&path)?)?;
        }
    }
    let dkms = text("packaging/guest/dkms.conf.in")?.replace("@VERSION@", version);
    stage.file(&format!("{folder}/dkms.conf"), 0o644, dkms.as_bytes())?;
    let copyright = read("packaging/debian/guest-dkms/copyright")?;
    stage.file("usr/share/doc/tessera-guest-dkms/copyright", 0o644, &copyright)?;
    finish(&stage, options, "guest-dkms", "all", &["postinst", "prerm"], &[])
}

/// Adds changelogs and control files, and packs `tessera-NAME`. `values` are those of further
/// placeholders in `control.in`.
pub(super) fn finish(
    stage: &Stage<'_>,
    options: &Options,
    name: &str,
    architecture: &str,
    scripts: &[&str],
    values: &[(&str, String)],
) -> Result<PathBuf> {
    let version = format!("{}-{REVISION}", env!("CARGO_PKG_VERSION"));
    let package = format!("tessera-{name}");
    let debian = format!("packaging/debian/{name}");
    let document = |file: &str| format!("usr/share/doc/{package}/{file}");
    stage.packed(&document("changelog.gz"), &read("CHANGELOG.md")?)?;
    let changelog = debian_changelog(&package, &version)?;
    stage.packed(&document("changelog.Debian.gz"), changelog.as_bytes())?;
    let overrides = read(&format!("{debian}/lintian-overrides"))?;
    stage.file(&format!("usr/share/lintian/overrides/{package}"), 0o644, &overrides)?;
    let (files, kibibytes) = files_and_size(stage.root)?;
    let mut control = text(&format!("{debian}/control.in"))?
        .replace("@VERSION@", &version)
        .replace("@SIZE@", &kibibytes.to_string());
    for (placeholder, value) in values {
        control = control.replace(placeholder, value);
    }
    stage.file("DEBIAN/control", 0o644, control.as_bytes())?;
    stage.file("DEBIAN/md5sums", 0o644, &md5_sums(stage.root, &files)?)?;
    for script in scripts {
        let content =
            text(&format!("{debian}/{script}.in"))?.replace("@VERSION@", env!("CARGO_PKG_VERSION"));
        stage.file(&format!("DEBIAN/{script}"), 0o755, content.as_bytes())?;
    }
    let target = options.out.join(format!("{package}_{version}_{architecture}.deb"));
    pack(stage.root, &target, options)?;
    Ok(target)
}

pub(super) fn read(path: &str) -> Result<Vec<u8>> {
    fs::read(workspace().join(path)).with_context(|| format!("No {path}"))
}

fn text(path: &str) -> Result<String> {
    Ok(String::from_utf8(read(path)?)?)
}
