//! Debian's own checkers of what a package holds: lintian, mandoc, and AppArmor's compiler of profiles.
//!
//! Packages, unpacked into the cache folder as QEMU is; nothing of them is installed. They run in that folder as their
//! root, above which each run has a place in memory, so that none leaves anything there.

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

/// Changes when what is in the cached folder does.
const LAYOUT: &str = "checkers-2";

/// What none of them reads.
const NOT_NEEDED: [&str; 3] = ["usr/share/doc", "usr/share/locale", "usr/share/man"];

/// A checked folder is the working directory; the checkers' root is read only but for its `/tmp`.
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

/// Where they are.
#[derive(Clone, Debug)]
pub struct Checkers {
    root: PathBuf,
}

impl Checkers {
    /// Why there can be none here, if so.
    pub fn impossible() -> Option<String> {
        Machine::impossible()
    }

    /// Finds them, or fetches them: about 70 MiB.
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
        debs.fetch_chosen(&["?essential", "lintian", "mandoc", "apparmor"])?;
        // For the profiles in it alone.
        debs.fetch(&["libvirt-daemon-driver-qemu", "libvirt-daemon"])?;
        step.done();
        let step = progress.step("Unpacking them");
        debs::unpack(&debs.packages()?, partial.path())?;
        prepare(partial.path())?;
        for folder in NOT_NEEDED {
            let _ = fs::remove_dir_all(partial.path().join(folder));
        }
        // What base-files' script would have done: lintian asks whose packages these are to be.
        let origins = partial.path().join("etc/dpkg/origins");
        symlink("debian", origins.join("default")).context("Cannot say that this is a Debian")?;
        partial.rename(&folder)?;
        let _ = fs::remove_dir_all(&fetched);
        step.done();
        Ok(checkers)
    }

    /// Runs a shell script among them, in a folder of the host's that it may write to.
    pub fn run(&self, folder: &Path, script: &str) -> Result<Output> {
        run_in(&self.root, folder, script)
    }
}

/// Makes the folders that [`run_in`] puts something into.
pub(crate) fn prepare(root: &Path) -> Result<()> {
    for folder in ["proc", "dev", "tmp", "mnt"] {
        fs::create_dir_all(root.join(folder))?;
    }
    Ok(())
}

/// Runs a shell script among packages that were unpacked, in a folder of the host's that it may write to.
pub(crate) fn run_in(root: &Path, folder: &Path, script: &str) -> Result<Output> {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--net", "--fork", "--kill-child"]);
    command.args(["sh", "-c", RUN, "sh"]).arg(root).arg(folder).arg(script);
    Ok(command.stdin(Stdio::null()).output().context("Cannot run unshare")?.into())
}
