//! Which domain a vGPU was started for: files that last as long as the run directory, so that one domain's end never
//! takes another one's vGPU.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use mdev_core::ids::VgpuId;
use serde::{Deserialize, Serialize};

/// That a vGPU is a domain's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The domain's uuid.
    pub domain: String,
    /// Its name, for people.
    pub name: String,
    /// Whether the vGPU was started for it, and is to be stopped after it.
    pub started: bool,
}

/// All claims on this host. Nobody else changes them while this is held.
#[derive(Debug)]
pub struct Claims {
    folder: PathBuf,
    _lock: File,
}

impl Claims {
    /// Those of the manager with this run directory.
    pub fn lock(run_dir: &Path) -> io::Result<Self> {
        let folder = run_dir.join("libvirt");
        DirBuilder::new().mode(0o700).recursive(true).create(&folder)?;
        let lock = File::create(folder.join("lock"))?;
        lock.lock()?;
        Ok(Self { folder, _lock: lock })
    }

    /// Whose a vGPU is.
    pub fn of(&self, vgpu: VgpuId) -> Option<Claim> {
        serde_json::from_slice(&fs::read(self.path(vgpu)).ok()?).ok()
    }

    /// Writes down whose a vGPU is.
    pub fn set(&self, vgpu: VgpuId, claim: &Claim) -> io::Result<()> {
        let fresh = self.folder.join(format!("{vgpu}.new"));
        fs::write(&fresh, serde_json::to_vec(claim)?)?;
        fs::rename(fresh, self.path(vgpu))
    }

    /// It is nobody's any more.
    pub fn remove(&self, vgpu: VgpuId) {
        // One that is not there need not be removed; one that stays is void, since its vGPU does not run.
        let _ = fs::remove_file(self.path(vgpu));
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
        assert_eq!(claims.of(vgpu), None);
        claims.set(vgpu, &claim).unwrap();
        drop(claims);
        let claims = Claims::lock(dir.path()).unwrap();
        assert_eq!(claims.of(vgpu), Some(claim));
        claims.remove(vgpu);
        assert_eq!(claims.of(vgpu), None);
    }
}
