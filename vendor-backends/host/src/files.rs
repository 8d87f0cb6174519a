//! Files and processes of a host, below a root directory.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use mdev_core::untrusted::{self, Aside, TABLE};

/// Largest part of a command line that is read, in bytes. libvirt's for a large VM have a tenth.
const MAX_COMMAND_LINE: usize = 128 << 10;

/// Wait for a command line, and number of those that may be late: a process can withhold its own.
const PATIENCE: Duration = Duration::from_millis(200);
const MAX_LATE: usize = 8;

/// A host's files below a root directory, which is `/` except in tests.
#[derive(Clone, Debug)]
pub struct HostFiles {
    root: PathBuf,
    /// User id of the caller.
    pub uid: u32,
    /// Group ids of the caller.
    pub gids: BTreeSet<u32>,
    aside: Arc<Aside>,
}

/// A process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Command line.
    pub args: Vec<String>,
}

impl HostFiles {
    /// Returns the files below `root`, as the user of this process sees them.
    pub fn new(root: PathBuf) -> Self {
        let mut gids: BTreeSet<u32> =
            nix::unistd::getgroups().unwrap_or_default().iter().map(|gid| gid.as_raw()).collect();
        gids.insert(nix::unistd::getegid().as_raw());
        let aside = Arc::new(Aside::new(MAX_LATE));
        Self { root, uid: nix::unistd::geteuid().as_raw(), gids, aside }
    }

    /// Returns the root directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the location of a file. `path` has no leading slash.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Returns true if a file exists.
    pub fn has(&self, path: &str) -> bool {
        self.path(path).symlink_metadata().is_ok()
    }

    /// Returns the text of a file, if the file can be read; of a long one, the first MiB.
    pub fn read(&self, path: &str) -> Option<String> {
        read_start(&self.path(path), TABLE)
    }

    /// Returns the names in a directory in ascending order; none if the directory cannot be listed.
    pub fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Returns true if the caller may read and write a file by its permissions.
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

    /// Returns true if every user may read and write a file by its permissions.
    pub fn is_open_to_all(&self, path: &str) -> bool {
        self.path(path).metadata().is_ok_and(|about| about.mode() & 6 == 6)
    }

    /// Returns the processes one after the other: users of the host can make all command lines
    /// together as long as they like. Processes that withhold theirs are left out.
    pub fn processes(&self) -> impl Iterator<Item = Process> {
        let numbers = self.names("proc").into_iter().filter_map(|name| name.parse::<u32>().ok());
        let process = |pid| {
            let path = self.path(&format!("proc/{pid}/cmdline"));
            let (sender, line) = mpsc::channel();
            self.aside.run(move || drop(sender.send(read_start(&path, MAX_COMMAND_LINE))));
            let line = line.recv_timeout(PATIENCE).ok()??;
            let args = line.split('\0').map(str::to_owned).filter(|arg| !arg.is_empty()).collect();
            let uid = fs::metadata(self.path(&format!("proc/{pid}"))).ok()?.uid();
            Some(Process { pid, uid, args })
        };
        numbers.filter_map(process)
    }

    /// Returns a hard limit of vgpud's manager by its name in `/proc/PID/limits`, if vgpud runs.
    pub fn limit_of_vgpud(&self, name: &str) -> Option<String> {
        let pid = self.read("run/vgpud/lock")?;
        let limits = self.read(&format!("proc/{}/limits", pid.trim()))?;
        let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.split_whitespace().nth(1)?.to_owned())
    }
}

fn read_start(path: &Path, max: usize) -> Option<String> {
    let bytes = untrusted::read_start(path, max).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the number that follows a name in a file of /proc.
pub fn number_after(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_is_read_up_to_the_limit() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("proc/7");
        fs::create_dir_all(&folder).unwrap();
        let file = fs::File::create(folder.join("cmdline")).unwrap();
        // Takes no space on the disk, as the command line of an attacker takes no memory.
        file.set_len(1 << 40).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"qemu\0-name\0web", 0).unwrap();
        let host = HostFiles::new(root.path().to_owned());
        let args = ["qemu", "-name", "web"].map(str::to_owned).to_vec();
        assert_eq!(host.processes().collect::<Vec<_>>(), [Process { pid: 7, uid: host.uid, args }]);
        let text = host.read("proc/7/cmdline").unwrap();
        assert_eq!(text.len(), TABLE);
    }
}
