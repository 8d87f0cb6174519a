//! A VM with the guest's Linux module.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::Lab;
use lab::initramfs;
use lab::kernel::Kernel;
use lab::progress::Progress;
use lab::qemu::{Vm, VmSpec, vgpu_device};
use lab::root::Root;

/// Longest time of a command in the VM.
pub const LIMIT: Duration = Duration::from_secs(120);

/// A running VM.
#[derive(Debug)]
pub struct Guest {
    /// The VM.
    pub vm: Vm,
}

impl Guest {
    /// Boots a kernel in a VM that has the module, other files by their paths inside, and a vGPU.
    pub fn boot(
        kernel: &Kernel,
        module: &Path,
        files: &[(String, PathBuf)],
        vgpu: Option<&Path>,
        folder: &Path,
    ) -> Result<Self> {
        let root = Root::open(&Progress::new())?;
        let target = folder.join("initramfs.cpio");
        let mut all = vec![("module.ko".to_owned(), module.to_owned())];
        all.extend_from_slice(files);
        let archives = [initramfs::archive(kernel, &[])?, initramfs::extra(&all)?];
        initramfs::write(&target, &archives)?;
        let mut lab = Lab { root, initramfs: target, kvm: false };
        lab.root.kernel = kernel.clone();
        let mut spec = VmSpec::new("module");
        spec.memory_mib = 1024;
        spec.devices.extend(vgpu.map(|socket| vgpu_device("vgpu0", socket)));
        Ok(Self { vm: Vm::boot(&lab, &spec, &folder.join("vm"))? })
    }

    /// Runs a command that must succeed, and returns its output.
    pub fn run(&mut self, command: &str) -> Result<String> {
        let output = self.vm.guest.run(command, LIMIT)?.success();
        let output = output.with_context(|| format!("`{command}`\n{}", self.vm.console()))?;
        Ok(output.stdout)
    }

    /// Checks that the kernel has found no fault.
    pub fn check_log(&mut self) -> Result<()> {
        let log = self.run("dmesg")?;
        for sign in ["BUG:", "WARNING:", "Oops", "KFENCE", "general protection", "leaked"] {
            ensure!(!log.contains(sign), "{sign}\n{log}");
        }
        Ok(())
    }
}

/// Returns the libraries that a program or library of this machine links to, by their paths in a VM.
pub fn linked(program: &Path) -> Result<Vec<(String, PathBuf)>> {
    let libraries = lab::vfio::libraries(program)?.into_iter();
    Ok(libraries
        .map(|library| (library.to_string_lossy().trim_start_matches('/').to_owned(), library))
        .collect())
}
