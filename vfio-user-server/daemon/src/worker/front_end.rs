//! Front ends for CUDA programs, of the backends in this build.

use anyhow::{Context, Result};
use nix::sys::resource::{Resource, getrlimit};
use programs::FrontEnd;
use programs::front_end::FrontEndSpec;
use vendor_backends::backend::FRONT_END;

use super::journal::descriptors::MAX_OF_PROGRAMS;
use super::programs::MAX_CONNECTIONS;
use crate::worker_protocol::{ProgramsSpec, WorkerSpec};

/// Descriptors of a worker and of its anchor that programs cannot have: for the manager, the GPU,
/// the records and messages in progress.
const RESERVED: u64 = 2048;

/// Returns how many open files and files of memory programs of the host may have, in a worker that
/// may have `limit` descriptors. The anchor can keep all of them, with the connections.
fn max_descriptors(limit: u64) -> usize {
    // A host with a low limit.
    let all = limit.saturating_sub(RESERVED).max(limit / 2);
    let all = usize::try_from(all).unwrap_or(usize::MAX).min(MAX_OF_PROGRAMS);
    all.saturating_sub(MAX_CONNECTIONS)
}

/// Returns the specification of front ends for a vGPU on a GPU with this version of the driver.
pub fn spec(worker: &WorkerSpec, programs: &ProgramsSpec, driver: Option<&str>) -> FrontEndSpec {
    FrontEndSpec {
        vgpu: worker.function.vgpu,
        name: programs.name.clone(),
        driver: driver.map(str::to_owned),
        vram_bytes: worker.client.vram_bytes,
        max_system_bytes: worker.client.max_import_bytes,
        max_descriptors: max_descriptors(getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |it| it.0)),
    }
}

/// Creates a front end that no program has used.
///
/// # Errors
///
/// Fails if the version of the GPU's driver is not supported.
pub fn create(spec: &FrontEndSpec) -> Result<Box<dyn FrontEnd>> {
    let create = FRONT_END.context("This build of vgpud has no front end for CUDA programs")?;
    create(spec).map_err(anyhow::Error::from_boxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_leave_descriptors_to_their_worker() {
        assert_eq!(max_descriptors(8192), MAX_OF_PROGRAMS - MAX_CONNECTIONS);
        assert_eq!(max_descriptors(u64::MAX), MAX_OF_PROGRAMS - MAX_CONNECTIONS);
        assert_eq!(max_descriptors(4096), 2048 - MAX_CONNECTIONS);
        assert_eq!(max_descriptors(1024), 512 - MAX_CONNECTIONS);
        assert_eq!(max_descriptors(64), 0);
    }
}
