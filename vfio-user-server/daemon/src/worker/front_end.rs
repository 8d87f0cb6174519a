//! Front ends for CUDA programs, of the backends in this build.

use anyhow::{Context, Result};
use programs::FrontEnd;
use programs::front_end::FrontEndSpec;
use vendor_backends::backend::FRONT_END;

use crate::worker_protocol::{ProgramsSpec, WorkerSpec};

/// Returns the specification of front ends for a vGPU on a GPU with this version of the driver.
pub fn spec(worker: &WorkerSpec, programs: &ProgramsSpec, driver: Option<&str>) -> FrontEndSpec {
    FrontEndSpec {
        vgpu: worker.function.vgpu,
        name: programs.name.clone(),
        driver: driver.map(str::to_owned),
        vram_bytes: worker.client.vram_bytes,
        max_system_bytes: worker.client.max_import_bytes,
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
