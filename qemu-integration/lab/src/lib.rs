//! The lab: real QEMU and a real Linux guest on any machine, with or without KVM.
//!
//! In reading order:
//!
//! * [`root`]: which QEMU, which kernel; [`debs`] and [`kernel`] fetch and unpack them
//! * [`initramfs`]: the guest's root, with the init script `init.sh`
//! * [`qemu`]: virtual machines; [`qmp`] and [`guest`] speak to QEMU and to the guest
//! * [`kvm`]: whether KVM is of use here
//! * [`build`]: our own programs, by cargo; [`host`]: `vgpud`, and `vgpuctl` to tell it what to do
//! * [`picture`]: what is on a screen
//! * [`demo`], [`test`], [`bench`], [`simulate`]: what `cargo lab` does
//! * [`cleanup`], [`progress`]: nothing is left behind; people see what goes on

use std::path::PathBuf;

use anyhow::Result;

use crate::build::Programs;
use crate::progress::Progress;
use crate::root::Root;

pub mod bench;
pub mod build;
pub mod cleanup;
pub mod debs;
pub mod demo;
pub mod guest;
pub mod host;
pub mod initramfs;
pub mod kernel;
pub mod kvm;
pub mod picture;
pub mod progress;
pub mod qemu;
pub mod qmp;
pub mod root;
pub mod simulate;
pub mod test;

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
        Self::open_beside(progress, || build::host(progress))
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
            initramfs::write(&initramfs, &root.kernel, &guest.programs)?;
            let mut lab = Self { root, initramfs, kvm: false };
            lab.kvm = kvm::probe(&lab, progress)?.is_ok();
            Ok((lab, result))
        })
    }
}
