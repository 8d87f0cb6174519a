//! Location of the lab's files: a workspace, where cargo builds the programs, or a bundle.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::unistd::{Gid, Uid};

use crate::build::Programs;
use crate::root::Root;

/// Paths of files and folders in a bundle.
pub mod layout {
    /// Program of the lab.
    pub const RUN: &str = "run";
    /// Folder of `vgpud`, `vgpuctl` and the benchmarks.
    pub const PROGRAMS: &str = "bin";
    /// Folder of QEMU and the guest's kernel, as prepared by [`crate::root`].
    pub const ROOT: &str = "vm";
    /// Root of the guest.
    pub const INITRAMFS: &str = "vm/initramfs.cpio";
    /// Source of the kernels, for GPUs that execute machine code.
    pub const KERNELS: &str = "kernels.cu";
    /// Source of the CUDA reference program.
    pub const CUDA: &str = "cuda.c";
    /// Program that asks libcuda for checkpoints in a VM.
    pub const CHECKPOINT: &str = "bin/vgpu-checkpoint";
    /// Guest's Linux module for the guest's kernel.
    pub const MODULE: &str = "vm/tessera_guest.ko";
    /// Folder of the module's source and licence.
    pub const MODULE_SOURCE: &str = "guest-driver";
    /// Source of the CUDA programs of the benchmark and of VMs.
    pub const PROGRAMS_SOURCE: &str = "programs.cu";
    /// Source of the program that tries CUDA's features.
    pub const FEATURES: &str = "features.cu";
}

/// User id that the lab switches to if started as root.
const UNPRIVILEGED: u32 = 65534;

/// Unpacked bundle.
#[derive(Clone, Debug)]
pub struct Bundle(PathBuf);

impl Bundle {
    /// Returns the bundle that contains this program as `run`, if any.
    pub fn find() -> Option<Self> {
        let top = std::env::current_exe().ok()?.parent()?.to_path_buf();
        let bundle = Self(top);
        bundle.path(layout::INITRAMFS).exists().then_some(bundle)
    }

    /// Returns the path of an item of [`layout`].
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Finds QEMU and the guest's kernel.
    pub fn root(&self) -> Result<Root> {
        let folder = self.path(layout::ROOT);
        Root::in_folder(&folder)
            .with_context(|| format!("The QEMU in {} does not run here", folder.display()))
    }

    /// Finds the host's programs.
    pub fn programs(&self) -> Result<Programs> {
        let folder = self.path(layout::PROGRAMS);
        let entries = std::fs::read_dir(&folder)
            .with_context(|| format!("Cannot read {}", folder.display()))?;
        let named = |path: PathBuf| Some((path.file_name()?.to_str()?.to_owned(), path));
        let programs = entries.filter_map(|entry| named(entry.ok()?.path())).collect();
        Ok(Programs { programs, folder })
    }

    /// Drops root's rights permanently, to show that the demo runs unprivileged. `out` is the
    /// output folder.
    pub fn drop_privileges(&self, out: &Path) -> Result<()> {
        if !nix::unistd::geteuid().is_root() {
            return Ok(());
        }
        let (user, group) = (Uid::from_raw(UNPRIVILEGED), Gid::from_raw(UNPRIVILEGED));
        std::fs::create_dir_all(out)
            .with_context(|| format!("Cannot make the folder {}", out.display()))?;
        nix::unistd::chown(out, Some(user), Some(group))?;
        nix::unistd::setgroups(&[]).context("Cannot give up groups")?;
        nix::unistd::setresgid(group, group, group).context("Cannot give up the group")?;
        nix::unistd::setresuid(user, user, user).context("Cannot give up root's rights")?;
        nix::sys::prctl::set_no_new_privs()?;
        std::fs::File::open(self.path(layout::INITRAMFS)).with_context(|| {
            format!(
                "User {UNPRIVILEGED} cannot read {}: unpack the bundle in a readable folder such as /tmp",
                self.0.display()
            )
        })?;
        Ok(())
    }
}
