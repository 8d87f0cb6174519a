//! Debian's checkers for the contents of a package: lintian, mandoc, AppArmor's parser, and
//! Prometheus' promtool.
//!
//! The packages are unpacked into the cache folder and not installed. The checkers run with that
//! folder as their root, which they can only read, and with an empty `/tmp` in memory.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::cache::{self, cache_folder};
use crate::debs::{self, Debs};
use crate::guest::Output;
use crate::machine::Machine;
use crate::progress::Progress;

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
        let found = |folder: &Path| folder.exists().then(|| Self { root: folder.to_owned() });
        cache::find_or_prepare(&cache_folder()?, LAYOUT, progress, found, |folder, fetched| {
            let step = progress.step("Fetching Debian's checkers of packages");
            let debs = Debs::open(fetched)?;
            debs.fetch_chosen(&["?essential", "lintian", "mandoc", "apparmor", "promtool"])?;
            // Needed only for its AppArmor profiles.
            debs.fetch(&["libvirt-daemon-driver-qemu", "libvirt-daemon"])?;
            step.done();
            let step = progress.step("Unpacking them");
            debs::unpack(&debs.packages()?, folder)?;
            prepare(folder)?;
            debs::remove_parts(folder, &NOT_NEEDED);
            // Replaces a step of base-files' script: lintian reads the vendor of packages from this
            // link.
            let origins = folder.join("etc/dpkg/origins");
            symlink("debian", origins.join("default"))
                .context("Cannot say that this is a Debian")?;
            step.done();
            Ok(())
        })
    }

    /// Runs a shell script with the checkers in a writable folder of the host.
    pub fn run(&self, folder: &Path, script: &str) -> Result<Output> {
        run_in(&self.root, folder, script)
    }
}

/// Creates the mount points of [`run_in`], and the link that the script of Debian's mawk creates.
pub(crate) fn prepare(root: &Path) -> Result<()> {
    for folder in ["proc", "dev", "tmp", "mnt"] {
        fs::create_dir_all(root.join(folder))?;
    }
    let awk = root.join("usr/bin/awk");
    if !awk.exists() {
        symlink("mawk", awk)?;
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
