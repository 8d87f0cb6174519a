//! Folder of this machine in a guest (9p).

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::kernel::Kernel;

/// Modules that a guest needs, in load order.
pub const MODULES: [&str; 4] = ["netfs", "9pnet", "9pnet_virtio", "9p"];

/// Folder of the modules in a guest without a root of its own.
const IN_GUEST: &str = "shared-folder";

/// Folder of this machine that a guest mounts as `root`.
#[derive(Clone, Debug)]
pub struct SharedFolder {
    path: PathBuf,
    read_only: bool,
}

impl SharedFolder {
    /// Returns a folder in which the guest's root can do what QEMU's user can.
    pub fn writable(path: &Path) -> Self {
        Self { path: path.to_owned(), read_only: false }
    }

    /// Returns a folder that the guest can read as far as QEMU's user can.
    pub fn read_only(path: &Path) -> Self {
        Self { path: path.to_owned(), read_only: true }
    }

    /// Returns QEMU's arguments.
    pub(crate) fn args(&self) -> [String; 4] {
        let options = if self.read_only {
            "security_model=none,readonly=on,multidevs=remap"
        } else {
            "security_model=passthrough"
        };
        let device = json!({ "driver": "virtio-9p-pci", "fsdev": "root", "mount_tag": "root" });
        [
            "-fsdev".to_owned(),
            format!("local,id=root,{options},path={}", self.path.display()),
            "-device".to_owned(),
            device.to_string(),
        ]
    }
}

/// Returns the modules as files of a guest's initramfs, by their paths in it.
pub fn files(kernel: &Kernel) -> Vec<(String, PathBuf)> {
    let file = |name: &&str| (format!("{IN_GUEST}/{name}.ko"), kernel.module(name));
    MODULES.iter().map(file).collect()
}

/// Returns a shell command that mounts this machine's root read-only at `at`, so that programs run
/// in it by `chroot`: with the guest's devices, and an empty folder for temporary files.
pub fn mount_root(at: &str) -> String {
    format!(
        "for m in {}; do insmod /{IN_GUEST}/$m.ko || exit 1; done; mkdir {at} && \
         mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=512000 root {at} && \
         mount -t proc none {at}/proc && mount -t sysfs none {at}/sys && \
         mount -o rbind /dev {at}/dev && mount -t tmpfs none {at}/tmp",
        MODULES.join(" ")
    )
}
