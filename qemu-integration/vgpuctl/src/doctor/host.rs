//! The host that is looked at: everything below one folder, which is `/` but in tests.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use vfio_user_server::users::Users;

/// Longest file that is read: /proc has no longer ones that we look at.
const MAX_FILE: usize = 1 << 20;

/// A host.
#[derive(Debug)]
pub struct Host {
    root: PathBuf,
    /// Who asks.
    pub uid: u32,
    /// The groups of who asks.
    pub gids: BTreeSet<u32>,
    /// Its users and groups.
    pub users: Users,
}

/// A process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its command line.
    pub args: Vec<String>,
}

impl Host {
    /// The host below `root`, asked about by whoever runs this.
    pub fn new(root: PathBuf) -> Self {
        let mut gids: BTreeSet<u32> =
            nix::unistd::getgroups().unwrap_or_default().iter().map(|gid| gid.as_raw()).collect();
        gids.insert(nix::unistd::getegid().as_raw());
        let users = Users::in_root(&root);
        Self { root, uid: nix::unistd::geteuid().as_raw(), gids, users }
    }

    /// Where a file of that host is; `path` has no slash at its beginning.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Whether something is there.
    pub fn has(&self, path: &str) -> bool {
        self.path(path).symlink_metadata().is_ok()
    }

    /// A file's text, where it can be read.
    pub fn read(&self, path: &str) -> Option<String> {
        let bytes = fs::read(self.path(path)).ok()?;
        Some(String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_FILE)]).into_owned())
    }

    /// What is in a folder, in order; nothing where it cannot be listed.
    pub fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Whether who asks may read and write a file, by its permissions.
    pub fn may_use(&self, path: &str) -> bool {
        let Ok(about) = fs::metadata(self.path(path)) else { return false };
        let bits = if self.uid == about.uid() {
            about.mode() >> 6
        } else if self.gids.contains(&about.gid()) {
            about.mode() >> 3
        } else {
            about.mode()
        };
        self.uid == 0 || bits & 6 == 6
    }

    /// Its processes.
    pub fn processes(&self) -> Vec<Process> {
        let numbers = self.names("proc").into_iter().filter_map(|name| name.parse::<u32>().ok());
        let process = |pid| {
            let line = self.read(&format!("proc/{pid}/cmdline"))?;
            let args = line.split('\0').map(str::to_owned).filter(|arg| !arg.is_empty()).collect();
            Some(Process { pid, args })
        };
        numbers.filter_map(process).collect()
    }
}

/// What a program prints, or `None` where it fails.
pub fn output(program: &Path, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
