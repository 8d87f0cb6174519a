//! Run directory: sockets, and the records by which a new manager adopts running processes.
//!
//! ```text
//! lock                      held by the running manager
//! control.sock              the control API
//! parents/<name>/           admin.sock, run.json
//! vgpus/<uuid>/             vfio.sock (for QEMU), cuda.sock (for programs), control.sock,
//!                           upgrade.sock, context.sock, run.json
//! vgpus/<uuid>/clients/     links to vfio.sock and cuda.sock, for a container
//! ```
//!
//! `run.json` records the process of a folder and its configuration. A folder without a running
//! process never prevents a start.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use mdev_core::ids::VgpuId;
use mdev_core::untrusted::{TABLE, VALUE, read_text, read_whole};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::sockets;

/// Longest path of a UNIX socket in bytes, without the terminating zero (unix(7)).
const MAX_SOCKET_PATH: usize = 107;

/// Name of a worker's control socket.
const CONTROL: &str = "control.sock";

/// Paths of the run directory.
#[derive(Clone, Debug)]
pub struct RunDir {
    root: PathBuf,
}

/// Lock of a run directory. Dropping it releases the lock.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl RunDir {
    /// Creates the run directory if it does not exist.
    pub fn create(root: &Path) -> anyhow::Result<Self> {
        sockets::create_traversable_dir(root)
            .with_context(|| format!("Cannot create the run directory {}", root.display()))?;
        let root = root.canonicalize()?;
        let run_dir = Self { root };
        let longest = run_dir.vgpu(VgpuId(uuid::Uuid::nil())).join(CONTROL);
        let over = longest.as_os_str().len().saturating_sub(MAX_SOCKET_PATH);
        if over > 0 {
            bail!(
                "The run directory {} is {over} bytes too long for the sockets in it; use a shorter --run-dir",
                run_dir.root.display()
            );
        }
        let (parents, vgpus) = (run_dir.parents(), run_dir.vgpus());
        sockets::create_private_dir(&parents)
            .with_context(|| format!("Cannot create {}", parents.display()))?;
        sockets::create_traversable_dir(&vgpus)
            .with_context(|| format!("Cannot create {}", vgpus.display()))?;
        Ok(run_dir)
    }

    /// Takes the lock. The error names the process that holds it.
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
            let holder = read_text(&path, VALUE).unwrap_or_default();
            format!(
                "A vgpud with pid {} manages {} already; stop it first, or use another --run-dir",
                holder.trim(),
                self.root.display()
            )
        })
    }

    /// Returns the run directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path of the control API's socket.
    pub fn api_socket(&self) -> PathBuf {
        self.root.join("control.sock")
    }

    /// Returns the folder of all vGPUs.
    pub fn vgpus(&self) -> PathBuf {
        self.root.join("vgpus")
    }

    /// Returns the folder of a vGPU.
    pub fn vgpu(&self, vgpu: VgpuId) -> PathBuf {
        self.vgpus().join(vgpu.to_string())
    }

    /// Returns the path of a vGPU's vfio-user socket.
    pub fn vfio_socket(&self, vgpu: VgpuId) -> PathBuf {
        self.vgpu(vgpu).join("vfio.sock")
    }

    /// Returns the path of the socket on which a vGPU's anchor takes the program of the next
    /// worker.
    pub fn upgrade_socket(&self, vgpu: VgpuId) -> PathBuf {
        self.vgpu(vgpu).join("upgrade.sock")
    }

    /// Returns the path of a vGPU's socket for CUDA programs.
    pub fn cuda_socket(&self, vgpu: VgpuId) -> PathBuf {
        self.vgpu(vgpu).join("cuda.sock")
    }

    /// Returns the folder of a vGPU that a container gets: links to the sockets for its clients,
    /// and nothing else.
    pub fn clients(&self, vgpu: VgpuId) -> PathBuf {
        self.vgpu(vgpu).join("clients")
    }

    /// Returns the path of the socket on which a vGPU's context takes GPU processes.
    pub fn context_socket(&self, vgpu: VgpuId) -> PathBuf {
        self.vgpu(vgpu).join("context.sock")
    }

    /// Returns the path of a worker's control socket.
    pub fn worker_socket(&self, vgpu: VgpuId) -> PathBuf {
        self.vgpu(vgpu).join(CONTROL)
    }

    /// Returns the path of the FIFO with the log of a vGPU's worker.
    pub fn worker_log(&self, vgpu: VgpuId) -> PathBuf {
        self.vgpu(vgpu).join("worker.log")
    }

    /// Returns the path of the FIFO with the log of a vGPU's context.
    pub fn context_log(&self, vgpu: VgpuId) -> PathBuf {
        self.vgpu(vgpu).join("context.log")
    }

    /// Returns the folder of all parents.
    pub fn parents(&self) -> PathBuf {
        self.root.join("parents")
    }

    /// Returns the folder of a parent.
    pub fn parent(&self, name: &str) -> PathBuf {
        self.parents().join(name)
    }

    /// Returns the path of the FIFO with the log of a GPU process.
    pub fn parent_log(&self, name: &str) -> PathBuf {
        self.parent(name).join("gpu.log")
    }

    /// Returns the path of a GPU process' socket.
    pub fn admin_socket(&self, name: &str) -> PathBuf {
        self.parent(name).join("admin.sock")
    }
}

/// Replaces `run.json` in `folder` atomically. The file is not synced, since the recorded process
/// does not survive a power failure either.
pub fn write_record<T: Serialize>(folder: &Path, record: &T) -> io::Result<()> {
    let fresh = folder.join("run.json.new");
    fs::write(&fresh, serde_json::to_vec(record)?)?;
    fs::rename(&fresh, folder.join("run.json"))
}

/// Reads `run.json` in `folder`. Returns `None` if it is missing or cannot be parsed.
pub fn read_record<T: DeserializeOwned>(folder: &Path) -> Option<T> {
    serde_json::from_slice(&read_whole(&folder.join("run.json"), TABLE).ok()?).ok()
}

/// Removes a folder with its contents. Errors are logged: a folder that remains does not prevent a
/// start.
pub fn remove(folder: &Path) {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            log::warn!("Cannot remove {}: {error}", folder.display());
        }
        _ => {}
    }
}

/// Lists the names in a folder, sorted.
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
    fn error_of_a_second_manager_names_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::create(dir.path()).unwrap();
        let lock = run_dir.lock().unwrap();
        let error = run_dir.lock().unwrap_err().to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
        drop(lock);
        run_dir.lock().unwrap();
    }

    #[test]
    fn path_too_long_for_a_socket_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = RunDir::create(&dir.path().join("x".repeat(90))).unwrap_err().to_string();
        assert!(error.contains("use a shorter --run-dir"), "{error}");
    }
}
