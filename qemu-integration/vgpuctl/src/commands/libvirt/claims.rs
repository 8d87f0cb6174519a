//! Claims of domains on vGPUs, as files in vgpud's run directory. A claim prevents the end of one
//! domain from stopping the vGPU of another one.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mdev_core::ids::VgpuId;
use mdev_core::untrusted::{TABLE, read_whole};
use serde::{Deserialize, Serialize};

/// Time between libvirt's calls `restore` and `prepare` for one start of a domain.
const RESTORE_LIMIT: Duration = Duration::from_secs(30);

/// Claim of a domain on a vGPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// Uuid of the domain.
    pub domain: String,
    /// Name of the domain, for messages.
    pub name: String,
    /// Whether the hook started the vGPU for the domain and must stop it.
    pub started: bool,
}

/// Claims of all domains on this host, locked against concurrent hooks.
#[derive(Debug)]
pub struct Claims {
    folder: PathBuf,
    _lock: File,
}

impl Claims {
    /// Locks the claims in a manager's run directory.
    pub fn lock(run_dir: &Path) -> io::Result<Self> {
        let folder = run_dir.join("libvirt");
        DirBuilder::new().mode(0o700).recursive(true).create(&folder)?;
        let lock = File::create(folder.join("lock"))?;
        lock.lock()?;
        Ok(Self { folder, _lock: lock })
    }

    /// Returns the claim on a vGPU.
    pub fn get(&self, vgpu: VgpuId) -> Option<Claim> {
        serde_json::from_slice(&read_whole(&self.path(vgpu), TABLE).ok()?).ok()
    }

    /// Records a claim on a vGPU.
    pub fn set(&self, vgpu: VgpuId, claim: &Claim) -> io::Result<()> {
        let fresh = self.folder.join(format!("{vgpu}.new"));
        fs::write(&fresh, serde_json::to_vec(claim)?)?;
        fs::rename(fresh, self.path(vgpu))
    }

    /// Removes the claim on a vGPU.
    pub fn remove(&self, vgpu: VgpuId) {
        // A failure is harmless: the claim on a stopped vGPU has no effect.
        let _ = fs::remove_file(self.path(vgpu));
    }

    /// Records that a domain is about to start from a saved state.
    pub fn set_restoring(&self, domain: &str) -> io::Result<()> {
        fs::write(self.restoring(domain), "")
    }

    /// Removes the record of [`Self::set_restoring`]. Returns whether there was a recent one.
    pub fn take_restoring(&self, domain: &str) -> bool {
        let record = self.restoring(domain);
        let written = fs::metadata(&record).and_then(|about| about.modified());
        let _ = fs::remove_file(record);
        written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age < RESTORE_LIMIT))
    }

    fn restoring(&self, domain: &str) -> PathBuf {
        let plain = domain.chars().filter(|c| c.is_ascii_hexdigit() || *c == '-');
        self.folder.join(format!("{}.restoring", plain.collect::<String>()))
    }

    fn path(&self, vgpu: VgpuId) -> PathBuf {
        self.folder.join(vgpu.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_lasts_until_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let vgpu = VgpuId::random();
        let claim = Claim { domain: "d".to_owned(), name: "vm1".to_owned(), started: true };
        let claims = Claims::lock(dir.path()).unwrap();
        assert_eq!(claims.get(vgpu), None);
        claims.set(vgpu, &claim).unwrap();
        drop(claims);
        let claims = Claims::lock(dir.path()).unwrap();
        assert_eq!(claims.get(vgpu), Some(claim));
        claims.remove(vgpu);
        assert_eq!(claims.get(vgpu), None);
        claims.set_restoring("0e6c-/../x").unwrap();
        assert!(!claims.take_restoring("0e6d"));
        assert!(claims.take_restoring("0e6c-/../x"));
        assert!(!claims.take_restoring("0e6c-/../x"), "it counts once");
    }
}
