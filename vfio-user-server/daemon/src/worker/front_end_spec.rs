//! Parameters of a front end for CUDA programs.

use anyhow::Result;
use mdev_core::ids::VgpuId;
use nvidia_rm::recording::Recorded;
use nvidia_rm::version::Layout;
use vendor_backends::nvidia::frontend::identity::Identity;
use vendor_backends::nvidia::frontend::{DRIVER_WITHOUT_GPU, FrontEnd};

use crate::worker_protocol::{ProgramsSpec, WorkerSpec};

/// PCI ids and address that programs see.
const PCI_IDS: (u16, u16) = (0x10de, 0x2335);
const PCI_ADDRESS: (u8, u8) = (0, 6);

/// Parameters of a front end.
#[derive(Clone, Debug)]
pub struct FrontEndSpec {
    vgpu: VgpuId,
    programs: ProgramsSpec,
    /// Version of the driver.
    driver: String,
    vram_bytes: u64,
    max_system_bytes: u64,
}

impl FrontEndSpec {
    /// Returns the parameters for a vGPU on a GPU with this version of the driver.
    pub fn new(spec: &WorkerSpec, programs: &ProgramsSpec, driver: Option<&str>) -> Self {
        Self {
            vgpu: spec.function.vgpu,
            programs: programs.clone(),
            driver: driver.unwrap_or(DRIVER_WITHOUT_GPU).to_owned(),
            vram_bytes: spec.client.vram_bytes,
            max_system_bytes: spec.client.max_import_bytes,
        }
    }

    /// Creates a front end that no program has used.
    pub fn create(&self) -> Result<FrontEnd> {
        let identity = Identity {
            vgpu: self.vgpu,
            name: self.programs.name.clone(),
            driver: self.driver.clone(),
            pci_ids: PCI_IDS,
            address: PCI_ADDRESS,
            vram_bytes: self.vram_bytes,
        };
        let layout = Layout::of_programs(&self.driver)?;
        let queries = Recorded::hopper()?;
        Ok(FrontEnd::new(identity, layout, queries, self.max_system_bytes))
    }
}
