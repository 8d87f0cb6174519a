//! Records of claims that are prepared, or were to be when the agent ended: a file each.
//!
//! A record is written before the first vGPU of its claim starts, and removed after the last one
//! has stopped. Whatever is killed in between, the next agent finds the claim.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use mdev_core::ids::VgpuId;
use mdev_core::untrusted::{TABLE, read_whole};
use serde::{Deserialize, Serialize};

use super::claim::ClaimRef;

/// Longest UID of a claim, in bytes.
const MAX_UID: usize = 64;

/// Prepared claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// UID of the claim.
    pub uid: String,
    /// vGPUs of the claim.
    pub vgpus: Vec<VgpuId>,
}

impl Record {
    /// Returns the record of a claim with these vGPUs.
    pub fn new(claim: &ClaimRef, vgpus: Vec<VgpuId>) -> Self {
        let ClaimRef { namespace, name, uid } = claim.clone();
        Self { namespace, name, uid, vgpus }
    }

    /// Returns the claim.
    pub fn claim(&self) -> ClaimRef {
        let Self { namespace, name, uid, .. } = self.clone();
        ClaimRef { namespace, name, uid }
    }
}

/// Folder of records.
#[derive(Clone, Debug)]
pub struct Records {
    folder: PathBuf,
}

/// Returns whether a UID can be a part of a file's name.
pub fn is_uid(text: &str) -> bool {
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    (1..=MAX_UID).contains(&text.len()) && text.bytes().all(valid)
}

impl Records {
    /// Opens a folder, which is created if it is missing.
    pub fn open(state_dir: &Path) -> io::Result<Self> {
        let folder = state_dir.join("claims");
        fs::create_dir_all(&folder)?;
        Ok(Self { folder })
    }

    /// Returns all records. Files that are none are removed.
    pub fn all(&self) -> io::Result<Vec<Record>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let record =
                read_whole(&path, TABLE).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
            if let Some(record) = record {
                all.push(record);
            } else {
                log::warn!("{} is no record of a claim: removing it", path.display());
                remove(&path)?;
            }
        }
        Ok(all)
    }

    /// Returns the record of a claim.
    pub fn find(&self, uid: &str) -> Option<Record> {
        serde_json::from_slice(&read_whole(&self.path(uid), TABLE).ok()?).ok()
    }

    /// Writes a record.
    pub fn write(&self, record: &Record) -> io::Result<()> {
        write(&self.folder, &self.path(&record.uid), &serde_json::to_vec(record)?)
    }

    /// Removes a record, if it is there.
    pub fn remove(&self, uid: &str) -> io::Result<()> {
        remove(&self.path(uid))
    }

    fn path(&self, uid: &str) -> PathBuf {
        self.folder.join(format!("{uid}.json"))
    }
}

/// Replaces a file in one step. Its readers never see a part of it.
pub(super) fn write(folder: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = tempfile::Builder::new().prefix(".new").tempfile_in(folder)?;
    io::Write::write_all(&mut file, bytes)?;
    let readable = <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o644);
    file.as_file().set_permissions(readable)?;
    file.persist(path)?;
    Ok(())
}

/// Removes a file, if it is there.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let [namespace, name, uid] = ["ns", "c1", "u-1"].map(str::to_owned);
        let claim = ClaimRef { namespace, name, uid };
        let record = Record::new(&claim, vec![crate::vgpus::id(&["a"])]);
        Records::open(dir.path()).unwrap().write(&record).unwrap();
        let records = Records::open(dir.path()).unwrap();
        fs::write(dir.path().join("claims/odd.json"), "{").unwrap();
        assert_eq!(records.all().unwrap(), std::slice::from_ref(&record));
        assert_eq!((records.find("u-1"), record.claim()), (Some(record), claim));
        for _ in 0..2 {
            records.remove("u-1").unwrap();
        }
        assert_eq!(records.all().unwrap(), []);
    }

    #[test]
    fn uids_are_safe_in_paths() {
        assert!(is_uid("2f6cbf4e-70ee-4b5e-a4a5-3e2f1f0b7d11"));
        for text in ["", "..", "a/b", "a.json", &"a".repeat(65)] {
            assert!(!is_uid(text), "{text}");
        }
    }
}
