//! Packages for virtual machines: `tessera-guest` with `vgpu-guest`, its agent and rules of udev,
//! `tessera-guest-dkms` with the source of the Linux module.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::CommandFactory;
use vgpu_guest::cli::Cli;

use super::{Options, Stage, read, text};
use crate::build;
use crate::cleanup::Scratch;
use crate::guest_driver;
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
    let stage = Stage::new(scratch, "tessera-guest", "packaging/debian/guest");
    stage.binary("usr/bin/vgpu-guest", program)?;
    stage.binary(CHECKPOINT, checkpoint)?;
    stage.copies(&GUEST_FILES)?;
    let mut page = Vec::new();
    clap_mangen::Man::new(Cli::command()).render(&mut page)?;
    stage.page("vgpu-guest", "1", &String::from_utf8(page)?)?;
    stage.finish(options, "amd64", &[], &[])
}

fn module_package(options: &Options, scratch: &Path) -> Result<PathBuf> {
    let stage = Stage::new(scratch, "tessera-guest-dkms", "packaging/debian/guest-dkms");
    let version = env!("CARGO_PKG_VERSION");
    let folder = format!("usr/src/tessera-guest-{version}");
    for (name, path) in guest_driver::sources()? {
        // The licence is part of Debian.
        if name != "LICENSE" {
            stage.file(&format!("{folder}/{name}"), 0o644, &fs::read(&path)?)?;
        }
    }
    let dkms = text("packaging/guest/dkms.conf.in")?.replace("@VERSION@", version);
    stage.file(&format!("{folder}/dkms.conf"), 0o644, dkms.as_bytes())?;
    let copyright = read("packaging/debian/guest-dkms/copyright")?;
    stage.file("usr/share/doc/tessera-guest-dkms/copyright", 0o644, &copyright)?;
    stage.finish(options, "all", &["postinst", "prerm"], &[])
}
