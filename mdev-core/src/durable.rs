//! Files that are replaced or removed as a whole, whatever happens meanwhile: a process that dies, or a host that loses power.
//!
//! A change is a list of [`Step`]s, which is data: [`run`] carries it out, and the tests replay every part of it that a
//! disk may be left with.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// One thing that is done to a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Makes a folder, and those above it that are missing.
    MakeFolder(PathBuf),
    /// Writes a file, from its beginning.
    Write(PathBuf, Vec<u8>),
    /// Waits until what was written is on disk.
    SyncFile(PathBuf),
    /// Gives a file another's name, and so replaces that one.
    Rename(PathBuf, PathBuf),
    /// Removes a file.
    Remove(PathBuf),
    /// Waits until what was made, renamed and removed in a folder is on disk.
    SyncFolder(PathBuf),
}

impl Step {
    /// Does it.
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

/// How the file at `path` gets new contents, by way of `temp` in the same folder. The folder is made where it is missing.
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

/// How the file at `path` is removed.
pub fn remove(path: &Path) -> Vec<Step> {
    vec![Step::Remove(path.to_owned()), Step::SyncFolder(folder_of(path).to_owned())]
}

/// Carries out a change, until a step fails.
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
    fn a_change_is_carried_out_and_stops_at_the_first_failure() {
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
