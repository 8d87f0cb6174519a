//! A VM with the guest's Linux module.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::Lab;
use lab::initramfs;
use lab::kernel::Kernel;
use lab::progress::Progress;
use lab::qemu::{Vm, VmSpec, vgpu_device};
use lab::root::Root;
use lab::successor::Successor;

use crate::{Vgpud, vgpuctl};

/// Longest time of a command in the VM.
pub const LIMIT: Duration = Duration::from_secs(120);

/// Size of a VM.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Number of CPUs.
    pub cpus: u32,
}

impl Default for Size {
    fn default() -> Self {
        Self { memory_mib: 1024, cpus: 1 }
    }
}

/// A running VM.
#[derive(Debug)]
pub struct Guest {
    /// The VM.
    pub vm: Vm,
    lab: Lab,
    spec: VmSpec,
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
        Self::boot_with(kernel, module, files, vgpu, folder, Size::default())
    }

    /// Boots such a VM of another size.
    pub fn boot_with(
        kernel: &Kernel,
        module: &Path,
        files: &[(String, PathBuf)],
        vgpu: Option<&Path>,
        folder: &Path,
        size: Size,
    ) -> Result<Self> {
        let root = Root::open(&Progress::new())?;
        let target = folder.join("initramfs.cpio");
        let mut all = vec![("module.ko".to_owned(), module.to_owned())];
        all.extend_from_slice(files);
        let archives = [initramfs::archive(kernel, &[])?, initramfs::extra(&all)?];
        initramfs::write(&target, &archives)?;
        let mut lab = Lab { root, initramfs: target, kvm: false };
        lab.root.kernel = kernel.clone();
        let mut spec = VmSpec { replaceable: true, ..VmSpec::new("module") };
        (spec.memory_mib, spec.cpus) = (size.memory_mib, size.cpus);
        spec.devices.extend(vgpu.map(|socket| vgpu_device("vgpu0", socket)));
        let vm = Vm::boot(&lab, &spec, &folder.join("vm"))?;
        Ok(Self { vm, lab, spec })
    }

    /// Replaces the VM by one with a vGPU that waits for its state. Returns the VM before.
    pub fn restart_awaiting(&mut self, vgpu: &Path, folder: &Path) -> Result<Vm> {
        let devices = vec![vgpu_device("vgpu0", vgpu)];
        let spec = VmSpec { awaits_state: true, devices, ..self.spec.clone() };
        let new = Vm::start(&self.lab, &spec, folder)?;
        Ok(std::mem::replace(&mut self.vm, new))
    }

    /// Gives the VM, which has this vGPU, a new QEMU.
    pub fn upgrade(&self, vgpud: &Vgpud, vgpu: &str, folder: &Path) -> Result<Successor> {
        let devices = vec![vgpu_device("vgpu0", &vgpud.vfio_socket(vgpu))];
        let spec = VmSpec { devices, ..self.spec.clone() };
        let args = Successor::args(&self.lab, vgpu, &self.vm.keys(), &spec, folder)?;
        let mut command = Command::new(vgpuctl::path()?);
        let output = command.arg("--socket").arg(vgpud.api_socket()).args(args).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Successor::of(&vgpud.show(vgpu)?, folder)
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
        // KASAN, KCSAN and lockdep begin their reports with one of these.
        for sign in ["BUG:", "WARNING:", "Oops", "KFENCE", "general protection", "leaked"] {
            ensure!(!log.contains(sign), "{sign}\n{log}");
        }
        Ok(())
    }
}

/// Returns the libraries that a program or library of this machine links to, by their paths in a
/// VM.
pub fn linked(program: &Path) -> Result<Vec<(String, PathBuf)>> {
    let libraries = lab::vfio::libraries(program)?.into_iter();
    Ok(libraries
        .map(|library| (library.to_string_lossy().trim_start_matches('/').to_owned(), library))
        .collect())
}
