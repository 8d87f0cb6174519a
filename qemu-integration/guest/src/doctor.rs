//! `doctor`: checks of this VM, with a fix for each problem.
//!
//! Checks read files below a root directory, so that tests can create VMs with one defect each.
//! Checks return [`Finding`]s and change nothing.
//!
//! * [`device`]: the vGPU's PCI function, its driver, and what stands between it and its use
//! * [`module`]: the Linux module for CUDA programs
//! * [`cuda`]: device nodes and NVIDIA's libraries

mod cuda;
mod device;
mod module;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use host_inventory::{Finding, HostFiles, finding};

use self::device::Vgpu;
use crate::pci::{Access, PciPlatform};
use crate::properties::Properties;

/// Checks the VM below a root directory. Returns the findings, and the number of problems.
pub fn run(root: PathBuf) -> (Vec<Finding>, usize) {
    let vm = HostFiles::new(root);
    let findings = examine(&vm, &queue_version);
    let problems = finding::problems(&findings);
    (findings, problems)
}

/// Runs all checks. `queue_version` reads the version of a vGPU's control queue, if that is
/// possible.
fn examine(vm: &HostFiles, queue_version: &dyn Fn(&str) -> Option<u32>) -> Vec<Finding> {
    let vgpus = Vgpu::all(vm);
    let mut findings = device::check(vm, &vgpus);
    if let Some(vgpu) = vgpus.iter().find(|vgpu| vgpu.runs_cuda()) {
        findings.extend(module::check(vm, vgpu, queue_version));
        findings.extend(cuda::check(vm, vgpu));
    }
    findings
}

/// Reads the version of a vGPU's control queue from its registers, which only root can do, and only
/// while no driver has them.
fn queue_version(address: &str) -> Option<u32> {
    let platform = PciPlatform::open(Some(address), Access::Shared).ok()?;
    Some(Properties::of(&platform).queue_version())
}
