//! Lab: real QEMU and a real Linux guest on any machine, with or without KVM.
//!
//! In reading order:
//!
//! * [`root`]: choice of QEMU and kernel; [`debs`] and [`kernel`] fetch and unpack both,
//!   [`vmlinux`] decompresses the kernel
//! * [`cache`]: folders that are prepared once
//! * [`ovmf`]: UEFI firmware
//! * [`initramfs`]: the guest's root, with the init script `init.sh`
//! * [`qemu`]: virtual machines; [`guest`]: connections to the guest; [`shared_folder`]: this
//!   machine's files in a guest
//! * [`kvm`]: check of KVM; [`mdevctl`]: the real mdevctl
//! * [`vfio`]: a VM that is a host with an IOMMU; [`iommufd`]: its kernel with iommufd
//! * [`booted`]: such a host with a Debian booted by systemd and Tessera's package
//! * [`guest_driver`]: the guest's Linux module, compiled for Debian's kernels; [`debug_kernel`]:
//!   kernels that look for its faults
//! * [`machine`]: a fresh Debian machine with libvirt; [`namespaces`]: what it runs in
//! * [`checkers`]: Debian's package checkers
//! * [`kube`]: a Kubernetes cluster of one node
//! * [`place`]: a workspace, or a [`bundle`] with all files
//! * [`build`]: Tessera's programs, built by cargo; [`nvcc`]: machine code for GPUs; [`host`]:
//!   `vgpud`, controlled by `vgpuctl`
//! * [`picture`]: checks of screens; [`viewers`]: a browser and a VNC client for consoles
//! * [`demo`], [`mod@test`], [`mod@bench`], [`attack`], [`simulate`]: commands of `cargo lab`
//! * [`cleanup`]: cleanup of resources; [`whole_file`]: files that appear at once; [`progress`],
//!   [`heartbeat`]: progress output

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::build::Programs;
use crate::place::{Bundle, layout};
use crate::progress::Progress;
use crate::root::Root;

pub mod attack;
pub mod bench;
pub mod booted;
pub mod build;
pub mod bundle;
pub mod cache;
pub mod checkers;
pub mod cleanup;
pub mod cuda_libraries;
pub mod deb;
pub mod debs;
pub mod debug_kernel;
pub mod demo;
pub mod guest;
pub mod guest_driver;
pub mod heartbeat;
pub mod host;
pub mod initramfs;
pub mod iommufd;
pub mod kernel;
pub mod kube;
pub mod kvm;
pub mod machine;
pub mod mdevctl;
pub mod namespaces;
pub mod nvcc;
pub mod ovmf;
pub mod picture;
pub mod place;
pub mod progress;
pub mod qemu;
pub mod root;
pub mod shared_folder;
pub mod simulate;
pub mod successor;
pub mod test;
pub mod vfio;
pub mod viewers;
pub mod vmlinux;
pub mod whole_file;

/// Parts of a VM.
#[derive(Clone, Debug)]
pub struct Lab {
    /// QEMU and the guest's kernel.
    pub root: Root,
    /// Initramfs of the guest.
    pub initramfs: PathBuf,
    /// Whether VMs should run under KVM.
    pub kvm: bool,
}

impl Lab {
    /// Finds or prepares the lab. The first run fetches packages and builds the guest's programs.
    pub fn open(progress: &Progress) -> Result<Self> {
        Self::open_beside(progress, || Ok(())).map(|(lab, ())| lab)
    }

    /// Finds or prepares the lab and builds the host's programs.
    pub fn open_with_host(progress: &Progress) -> Result<(Self, Programs)> {
        if let Some(bundle) = Bundle::find() {
            let initramfs = bundle.path(layout::INITRAMFS);
            let mut lab = Self { root: bundle.root()?, initramfs, kvm: false };
            lab.kvm = kvm::probe(&lab, progress)?.is_ok();
            return Ok((lab, bundle.programs()?));
        }
        Self::open_beside(progress, || build::host(progress))
    }

    /// Adds machine code for `vgpu-guest` to the lab; `folder` holds the created files.
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
