//! The lab: real QEMU and a real Linux guest on any machine, with or without KVM.
//!
//! In reading order:
//!
//! * [`root`]: which QEMU, which kernel; [`debs`] and [`kernel`] fetch and unpack them
//! * [`initramfs`]: the guest's root, with the init script `init.sh`
//! * [`qemu`]: virtual machines; [`qmp`] and [`guest`] speak to QEMU and to the guest
//! * [`kvm`]: whether KVM is of use here; [`mdevctl`]: the real one
//! * [`vfio`]: a VM that is a host with an IOMMU; [`iommufd`]: its kernel with the newer way to hand out devices
//! * [`booted`]: such a host with a Debian that systemd boots, and our package
//! * [`machine`]: a Debian machine with libvirt, fresh each time; [`checkers`]: what Debian checks packages with
//! * [`place`]: a workspace, or a [`bundle`] that has all of it
//! * [`build`]: our own programs, by cargo; [`nvcc`]: machine code for a GPU that runs it; [`host`]: `vgpud`, and `vgpuctl` to tell it what to do
//! * [`picture`]: what is on a screen; [`viewers`]: a browser and a VNC client that look at it
//! * [`demo`], [`test`], [`bench`], [`simulate`]: what `cargo lab` does
//! * [`cleanup`], [`progress`]: nothing is left behind; people see what goes on

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::build::Programs;
use crate::place::{Bundle, layout};
use crate::progress::Progress;
use crate::root::Root;

pub mod bench;
pub mod booted;
pub mod build;
pub mod bundle;
pub mod checkers;
pub mod cleanup;
pub mod deb;
pub mod debs;
pub mod demo;
pub mod guest;
pub mod host;
pub mod initramfs;
pub mod iommufd;
pub mod kernel;
pub mod kvm;
pub mod machine;
pub mod mdevctl;
pub mod nvcc;
pub mod picture;
pub mod place;
pub mod progress;
pub mod qemu;
pub mod qmp;
pub mod root;
pub mod simulate;
pub mod test;
pub mod vfio;
pub mod viewers;

/// All that a VM is made of.
#[derive(Clone, Debug)]
pub struct Lab {
    /// QEMU and the guest's kernel.
    pub root: Root,
    /// The guest's root.
    pub initramfs: PathBuf,
    /// Whether VMs had better run under KVM.
    pub kvm: bool,
}

impl Lab {
    /// Finds or prepares it: the first time this fetches packages and builds the guest's programs.
    pub fn open(progress: &Progress) -> Result<Self> {
        Self::open_beside(progress, || Ok(())).map(|(lab, ())| lab)
    }

    /// The same, and builds the host's programs.
    pub fn open_with_host(progress: &Progress) -> Result<(Self, Programs)> {
        if let Some(bundle) = Bundle::find() {
            let initramfs = bundle.path(layout::INITRAMFS);
            let mut lab = Self { root: bundle.root()?, initramfs, kvm: false };
            lab.kvm = kvm::probe(&lab, progress)?.is_ok();
            return Ok((lab, bundle.programs()?));
        }
        Self::open_beside(progress, || build::host(progress))
    }

    /// The same with machine code for `vgpu-guest`; `folder` is for what is made of it.
    pub fn with_machine_code(self, cubin: &Path, folder: &Path) -> Result<Self> {
        let initramfs = folder.join("initramfs.cpio");
        let whole = std::fs::read(&self.initramfs)?;
        initramfs::write(&initramfs, &[whole, initramfs::machine_code(cubin)?])?;
        Ok(Self { initramfs, ..self })
    }

    fn open_beside<T>(progress: &Progress, work: impl FnOnce() -> Result<T>) -> Result<(Self, T)> {
        std::thread::scope(|scope| {
            let root = scope.spawn(|| Root::open(progress));
            let result = work()?;
            let guest = build::guest(progress)?;
            let root = match root.join() {
                Ok(root) => root?,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            let initramfs = guest.folder.join("initramfs.cpio");
            let programs: Vec<PathBuf> = guest.programs.values().cloned().collect();
            initramfs::write(&initramfs, &[initramfs::archive(&root.kernel, &programs)?])?;
            let mut lab = Self { root, initramfs, kvm: false };
            lab.kvm = kvm::probe(&lab, progress)?.is_ok();
            Ok((lab, result))
        })
    }
}
