//! Atomic replacement and removal of files, durable against a crash of the process or a power loss.
//!
//! A change is a list of [`Step`]s. [`run`] executes it, and tests replay every part of it that a
//! crash can leave on the disk.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Step of a change of the file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Create a folder and its missing parents.
    MakeFolder(PathBuf),
    /// Create or truncate a file and write its contents.
    Write(PathBuf, Vec<u8>),
    /// Sync a file's contents to the disk.
    SyncFile(PathBuf),
    /// Rename a file and replace the target.
    Rename(PathBuf, PathBuf),
    /// Remove a file.
    Remove(PathBuf),
    /// Sync a folder's entries to the disk.
    SyncFolder(PathBuf),
}

impl Step {
    /// Executes the step.
    pub fn run(&self) -> io::Result<()> {
        match self {
            Self::MakeFolder(path) => fs::create_dir_all(path),
            Self::Write(path, bytes) => File::create(path)?.write_all(bytes),
            Self::SyncFile(path) | Self::SyncFolder(path) => File::open(path)?.sync_all(),
            Self::Rename(from, to) => fs::rename(from, to),
            Self::Remove(path) => fs::remove_file(path),
        }
    }
}

/// Returns the steps that replace the file at `path` by way of `temp` in the same folder, which is
/// created if missing.
pub fn replace(path: &Path, temp: &Path, bytes: Vec<u8>) -> Vec<Step> {
    let folder = folder_of(path);
    let mut steps = Vec::new();
    if !folder.is_dir() {
        steps.push(Step::MakeFolder(folder.to_owned()));
        steps.push(Step::SyncFolder(folder_of(folder).to_owned()));
    }
    let temp = temp.to_owned();
    steps.extend([
        Step::Write(temp.clone(), bytes),
        Step::SyncFile(temp.clone()),
        Step::Rename(temp, path.to_owned()),
        Step::SyncFolder(folder.to_owned()),
    ]);
    steps
}

/// Returns the steps that remove the file at `path`.
pub fn remove(path: &Path) -> Vec<Step> {
    vec![Step::Remove(path.to_owned()), Step::SyncFolder(folder_of(path).to_owned())]
}

/// Executes steps until one fails.
pub fn run(steps: &[Step]) -> io::Result<()> {
    steps.iter().try_for_each(Step::run)
}

fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_stops_at_the_first_failed_step() {
        let dir = tempfile::tempdir().unwrap();
        let (path, temp) = (dir.path().join("new/file"), dir.path().join("new/.file.tmp"));
        run(&replace(&path, &temp, b"one".to_vec())).unwrap();
        run(&replace(&path, &temp, b"two".to_vec())).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert!(!temp.exists());
        run(&remove(&path)).unwrap();
        assert_eq!(run(&remove(&path)).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
