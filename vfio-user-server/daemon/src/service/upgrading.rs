//! Replacing workers by workers of this program, under running VMs.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use mdev_core::ids::VgpuId;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use vgpud_api::{ErrorCode, ErrorDetail, UpgradedVgpu};

use super::Service;
use crate::manager::{Result, Upgradable};
use crate::{blocking, worker_client};

/// This program in memory, for the workers of all vGPUs. An anchor can run no file that has
/// replaced its own program since it started.
#[derive(Clone, Debug, Default)]
pub struct OwnProgram(Arc<Mutex<Option<Arc<OwnedFd>>>>);

impl OwnProgram {
    fn get(&self) -> io::Result<Arc<OwnedFd>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = &*known {
            return Ok(Arc::clone(program));
        }
        let program = Arc::new(program_in_memory(Path::new("/proc/self/exe"))?);
        Ok(Arc::clone(known.insert(program)))
    }
}

/// Returns a copy of a program in memory, sealed against changes.
pub fn program_in_memory(path: &Path) -> io::Result<OwnedFd> {
    let mut copy = File::from(executable_memfd()?);
    io::copy(&mut File::open(path)?, &mut copy)?;
    let seals = SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK;
    fcntl(&copy, FcntlArg::F_ADD_SEALS(seals | SealFlag::F_SEAL_SEAL))?;
    // A program that is open for writing cannot be run.
    Ok(File::open(format!("/proc/self/fd/{}", copy.as_raw_fd()))?.into())
}

/// Creates a file in memory that can be run. Kernels before 6.3 know no flag for that, and need
/// none.
fn executable_memfd() -> io::Result<OwnedFd> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let with_exec = flags | MFdFlags::from_bits_retain(libc::MFD_EXEC);
    Ok(memfd_create("vgpud", with_exec).or_else(|_| memfd_create("vgpud", flags))?)
}

impl Service {
    /// Replaces a running vGPU's worker by one of this program. Its VM does not notice.
    pub async fn upgrade(&self, id: VgpuId) -> Result<UpgradedVgpu> {
        let reserved = self.saving.reserve(id)?;
        let sockets = self.call(move |manager| manager.upgradable(id)).await?;
        let program = self.program.clone();
        blocking::run(move || {
            let _reserved = reserved;
            upgrade(id, &sockets, &program)
        })
        .await?
    }
}

fn upgrade(id: VgpuId, sockets: &Upgradable, program: &OwnProgram) -> Result<UpgradedVgpu> {
    let conflict = |why: String| {
        ErrorDetail::new(
            ErrorCode::Conflict,
            format!("vGPU {id} keeps its worker until it is stopped: {why}"),
        )
    };
    let failed = |error: io::Error| conflict(error.to_string());
    let before = worker_client::patient_status(&sockets.control).map_err(failed)?;
    if !sockets.upgrade.exists() {
        return Err(conflict("it has the GPU for itself, and ends with its VM".to_owned()));
    }
    let program = program.get().map_err(failed)?;
    let taken = worker_client::pass_program(&sockets.upgrade, program.as_fd()).map_err(failed)?;
    worker_client::leave(&sockets.control).map_err(failed)?;
    if !taken.works().map_err(failed)? {
        return Err(conflict(
            "one of this release cannot continue; see the log of vgpud".to_owned(),
        ));
    }
    let after = worker_client::patient_status(&sockets.control).map_err(failed)?;
    log::info!("vGPU {id}: worker {} follows worker {}", after.pid, before.pid);
    Ok(UpgradedVgpu { uuid: id, pid_before: before.pid, pid: after.pid })
}
