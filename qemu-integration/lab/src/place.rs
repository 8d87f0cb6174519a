//! Where the lab runs: in its workspace, where cargo builds what it needs, or in a bundle that has all of it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::unistd::{Gid, Uid};

use crate::build::Programs;
use crate::root::Root;

/// Files and folders of a bundle, from its top.
pub mod layout {
    /// The lab itself.
    pub const RUN: &str = "run";
    /// `vgpud`, `vgpuctl`, the benchmarks.
    pub const PROGRAMS: &str = "bin";
    /// QEMU and the guest's kernel, as [`crate::root`] prepares them.
    pub const ROOT: &str = "vm";
    /// The guest's root.
    pub const INITRAMFS: &str = "vm/initramfs.cpio";
    /// The kernels' source, for GPUs that run machine code.
    pub const KERNELS: &str = "kernels.cu";
    /// The source of the program that kernels' speed is set against.
    pub const CUDA: &str = "cuda.c";
}

/// Who the lab becomes where it is started as root: `nobody`, wherever there is one.
const UNPRIVILEGED: u32 = 65534;

/// An unpacked bundle.
#[derive(Clone, Debug)]
pub struct Bundle(PathBuf);

impl Bundle {
    /// The bundle that this program is the `run` of, if it is one.
    pub fn find() -> Option<Self> {
        let top = std::env::current_exe().ok()?.parent()?.to_path_buf();
        let bundle = Self(top);
        bundle.path(layout::INITRAMFS).exists().then_some(bundle)
    }

    /// Where something of [`layout`] is.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// QEMU and the guest's kernel.
    pub fn root(&self) -> Result<Root> {
        let folder = self.path(layout::ROOT);
        Root::in_folder(&folder)
            .with_context(|| format!("The QEMU in {} does not run here", folder.display()))
    }

    /// The programs of the host.
    pub fn programs(&self) -> Result<Programs> {
        let folder = self.path(layout::PROGRAMS);
        let entries = std::fs::read_dir(&folder)
            .with_context(|| format!("Cannot read {}", folder.display()))?;
        let named = |path: PathBuf| Some((path.file_name()?.to_str()?.to_owned(), path));
        let programs = entries.filter_map(|entry| named(entry.ok()?.path())).collect();
        Ok(Programs { programs, folder })
    }

    /// Gives up root's rights for good, so that all that is shown is done without any. `out` is for what is written.
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
                "User {UNPRIVILEGED} cannot read {}: unpack the bundle where all may, such as /tmp",
                self.0.display()
            )
        })?;
        Ok(())
    }
}
