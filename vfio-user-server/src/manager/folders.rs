//! The run directory: where sockets are, and what a new manager finds.
//!
//! ```text
//! lock                      held by the manager that runs
//! control.sock              the control API
//! parents/<name>/           admin.sock, run.json
//! vgpus/<uuid>/             vfio.sock (QEMU attaches here), control.sock, run.json
//! ```
//!
//! `run.json` says which process a folder belongs to and what it was started with. A folder whose process is gone is
//! removed or started again; nothing in it stops the next start.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use mdev_core::ids::VgpuId;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::sockets;

/// Longest path of a UNIX socket, in bytes, without the zero at its end.
const MAX_SOCKET_PATH: usize = 107;

/// The run directory.
#[derive(Clone, Debug)]
pub struct Folders {
    root: PathBuf,
}

/// That this process is the manager of its run directory. Dropping it lets another in.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Folders {
    /// Makes the run directory where it is missing.
    pub fn create(root: &Path) -> anyhow::Result<Self> {
        sockets::passage(root)
            .with_context(|| format!("Cannot make the run directory {}", root.display()))?;
        let root = root.canonicalize()?;
        let folders = Self { root };
        let longest = folders.vgpu(VgpuId(uuid::Uuid::nil())).join(CONTROL);
        let over = longest.as_os_str().len().saturating_sub(MAX_SOCKET_PATH);
        if over > 0 {
            bail!(
                "The run directory {} is {over} bytes too long for the sockets in it; use a shorter --run-dir",
                folders.root.display()
            );
        }
        let (parents, vgpus) = (folders.parents(), folders.vgpus());
        sockets::closed(&parents).with_context(|| format!("Cannot make {}", parents.display()))?;
        sockets::passage(&vgpus).with_context(|| format!("Cannot make {}", vgpus.display()))?;
        Ok(folders)
    }

    /// Takes the lock, or says who has it.
    pub fn lock(&self) -> anyhow::Result<Lock> {
        let path = self.root.join("lock");
        let take = || {
            let mut options = File::options();
            let mut file =
                options.create(true).truncate(false).read(true).write(true).open(&path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(error),
            }
            file.set_len(0)?;
            writeln!(file, "{}", std::process::id())?;
            Ok(Some(Lock { _file: file }))
        };
        let taken = take().with_context(|| format!("Cannot lock {}", path.display()))?;
        taken.with_context(|| {
            let holder = fs::read_to_string(&path).unwrap_or_default();
            format!(
                "A vgpud with pid {} manages {} already; stop it first, or use another --run-dir",
                holder.trim(),
                self.root.display()
            )
        })
    }

    /// The run directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The control API's socket.
    pub fn api_socket(&self) -> PathBuf {
        self.root.join("control.sock")
    }

    /// Where vGPUs have their folders.
    pub fn vgpus(&self) -> PathBuf {
        self.root.join("vgpus")
    }

    /// A vGPU's folder.
    pub fn vgpu(&self, vgpu: VgpuId) -> PathBuf {
        self.vgpus().join(vgpu.to_string())
    }

    /// Where QEMU attaches.
    pub fn vfio_socket(&self, vgpu: VgpuId) -> PathBuf {
        self.vgpu(vgpu).join("vfio.sock")
    }

    /// Where the manager speaks to a worker.
    pub fn worker_socket(&self, vgpu: VgpuId) -> PathBuf {
        self.vgpu(vgpu).join(CONTROL)
    }

    /// Where parents have their folders.
    pub fn parents(&self) -> PathBuf {
        self.root.join("parents")
    }

    /// A parent's folder.
    pub fn parent(&self, name: &str) -> PathBuf {
        self.parents().join(name)
    }

    /// Where the manager speaks to a software GPU.
    pub fn admin_socket(&self, name: &str) -> PathBuf {
        self.parent(name).join("admin.sock")
    }
}

const CONTROL: &str = "control.sock";

/// Writes `run.json` in `folder`, so that a reader sees the old or the new one and never half of it. It need not
/// survive a power cut: what it speaks of does not either.
pub fn write_run<T: Serialize>(folder: &Path, run: &T) -> io::Result<()> {
    let fresh = folder.join("run.json.new");
    fs::write(&fresh, serde_json::to_vec(run)?)?;
    fs::rename(&fresh, folder.join("run.json"))
}

/// Reads `run.json` in `folder`; `None` where there is none that can be read.
pub fn read_run<T: DeserializeOwned>(folder: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(folder.join("run.json")).ok()?).ok()
}

/// Removes a folder and all in it. That it is gone already is no error; another error is logged, since a folder that
/// stays does no harm beyond its name.
pub fn remove(folder: &Path) {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            log::warn!("Cannot remove {}: {error}", folder.display());
        }
        _ => {}
    }
}

/// Names of what is in a folder.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_manager_is_told_who_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let folders = Folders::create(dir.path()).unwrap();
        let lock = folders.lock().unwrap();
        let error = folders.lock().unwrap_err().to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
        drop(lock);
        folders.lock().unwrap();
    }

    #[test]
    fn a_path_too_long_for_a_socket_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let error = Folders::create(&dir.path().join("x".repeat(90))).unwrap_err().to_string();
        assert!(error.contains("use a shorter --run-dir"), "{error}");
    }
}
