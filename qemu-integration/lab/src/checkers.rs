//! Debian's checkers for the contents of a package: lintian, mandoc, AppArmor's parser, and
//! Prometheus' promtool.
//!
//! The packages are unpacked into the cache folder and not installed. The checkers run with that
//! folder as their root, below an overlay in memory that discards all written files.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::cleanup::Scratch;
use crate::debs::{self, Debs};
use crate::guest::Output;
use crate::machine::Machine;
use crate::progress::Progress;
use crate::root::{cache_folder, lock};

/// Version of the cached folder's contents.
const LAYOUT: &str = "checkers-3";

/// Files that no checker reads.
const NOT_NEEDED: [&str; 3] = ["usr/share/doc", "usr/share/locale", "usr/share/man"];

/// Mounts the checked folder as the working directory. The root is read-only except for `/tmp`.
const RUN: &str = r#"
set -e
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
mount --bind "$2" "$1/mnt"
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LC_ALL=C.UTF-8 \
    chroot "$1" sh -c 'cd /mnt; eval "$1"' sh "$3"
"#;

/// Unpacked checkers.
#[derive(Clone, Debug)]
pub struct Checkers {
    root: PathBuf,
}

impl Checkers {
    /// Returns the reason why this machine cannot run the checkers, if any.
    pub fn impossible() -> Option<String> {
        Machine::impossible()
    }

    /// Finds the checkers in the cache, or fetches about 110 MiB.
    pub fn open(progress: &Progress) -> Result<Self> {
        let cache = cache_folder()?;
        let folder = cache.join(LAYOUT);
        let checkers = Self { root: folder.clone() };
        if folder.exists() {
            return Ok(checkers);
        }
        let _lock = lock(&cache, progress)?;
        if folder.exists() {
            return Ok(checkers);
        }
        let partial = Scratch::at(cache.join("checkers.partial"))?;
        let fetched = cache.join("checkers.fetched");
        let step = progress.step("Fetching Debian's checkers of packages");
        let debs = Debs::open(&fetched)?;
        debs.fetch_chosen(&["?essential", "lintian", "mandoc", "apparmor", "promtool"])?;
        // Needed only for its AppArmor profiles.
        debs.fetch(&["libvirt-daemon-driver-qemu", "libvirt-daemon"])?;
        step.done();
        let step = progress.step("Unpacking them");
        debs::unpack(&debs.packages()?, partial.path())?;
        prepare(partial.path())?;
        for folder in NOT_NEEDED {
            let _ = fs::remove_dir_all(partial.path().join(folder));
        }
        // Replaces a step of base-files' script: lintian reads the vendor of packages from this
        // link.
        let origins = partial.path().join("etc/dpkg/origins");
        symlink("debian", origins.join("default")).context("Cannot say that this is a Debian")?;
        partial.rename(&folder)?;
        let _ = fs::remove_dir_all(&fetched);
        step.done();
        Ok(checkers)
    }

    /// Runs a shell script with the checkers in a writable folder of the host.
    pub fn run(&self, folder: &Path, script: &str) -> Result<Output> {
        run_in(&self.root, folder, script)
    }
}

/// Creates the mount points of [`run_in`].
pub(crate) fn prepare(root: &Path) -> Result<()> {
    for folder in ["proc", "dev", "tmp", "mnt"] {
        fs::create_dir_all(root.join(folder))?;
    }
    Ok(())
}

/// Runs a shell script with unpacked packages in a writable folder of the host.
pub(crate) fn run_in(root: &Path, folder: &Path, script: &str) -> Result<Output> {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--net", "--fork", "--kill-child"]);
    command.args(["sh", "-c", RUN, "sh"]).arg(root).arg(folder).arg(script);
    Ok(command.stdin(Stdio::null()).output().context("Cannot run unshare")?.into())
}
