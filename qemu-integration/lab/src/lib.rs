//! The lab: real QEMU and a real Linux guest on any machine, with or without KVM.
//!
//! In reading order:
//!
//! * [`root`]: which QEMU, which kernel; [`debs`] and [`kernel`] fetch and unpack them
//! * [`initramfs`]: the guest's root, with the init script `init.sh`
//! * [`qemu`]: virtual machines; [`qmp`] and [`guest`] speak to QEMU and to the guest
//! * [`build`]: our own programs, by cargo
//! * [`cleanup`], [`progress`]: nothing is left behind; people see what goes on

use std::path::PathBuf;

use anyhow::Result;

use crate::progress::Progress;
use crate::root::Root;

pub mod build;
pub mod cleanup;
pub mod debs;
pub mod guest;
pub mod initramfs;
pub mod kernel;
pub mod progress;
pub mod qemu;
pub mod qmp;
pub mod root;

/// All that a VM is made of.
#[derive(Clone, Debug)]
pub struct Lab {
    /// QEMU and the guest's kernel.
    pub root: Root,
    /// The guest's root.
    pub initramfs: PathBuf,
}

impl Lab {
    /// Finds or prepares it: the first time this fetches packages and builds the guest's programs.
    pub fn open(progress: &Progress) -> Result<Self> {
        std::thread::scope(|scope| {
            let root = scope.spawn(|| Root::open(progress));
            let guest = build::guest(progress)?;
            let root = match root.join() {
                Ok(root) => root?,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            let initramfs = guest.folder.join("initramfs.cpio");
            initramfs::write(&initramfs, &root.kernel, &guest.programs)?;
            Ok(Self { root, initramfs })
        })
    }
}
