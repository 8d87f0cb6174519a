//! Debian in a VM, booted by systemd, with Tessera's package, an IOMMU and physical devices: an
//! operator's host, which can be rebooted.
//!
//! The root is a copy of the root of [`crate::machine`], writable by the VM over 9p.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::Lab;
use crate::cleanup::Scratch;
use crate::debs;
use crate::initramfs;
use crate::machine::{self, Machine};
use crate::namespaces::NAMESPACES;
use crate::progress::Progress;
use crate::qemu::{Vm, VmSpec};
use crate::shared_folder::{self, SharedFolder};
use crate::vfio;

const INIT: &str = include_str!("boot.sh");

/// Runs the host's commands in the booted system.
const AGENT: &str = "[Unit]
DefaultDependencies=no
After=basic.target
[Service]
ExecStart=/bin/sh /usr/local/sbin/lab-agent
Environment=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8
";

/// Script that copies a prepared root, installs a package, and disables slow parts that tests do
/// not need: libvirt, logins, housekeeping.
const INSTALL: &str = r#"
set -e
cp -a --reflink=auto "$1/." "$2"
rm -f "$2"/etc/systemd/system/*/*libvirt* "$2"/etc/systemd/system/*/virtlog* "$2"/etc/systemd/system/*/machines*
rm -rf "$2"/etc/systemd/system/timers.target.wants "$2"/etc/systemd/system/getty.target.wants
for unit in serial-getty@ttyS0.service systemd-pstore.service systemd-logind.service systemd-udevd.service \
    systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-udev-trigger.service \
    systemd-udev-load-credentials.service systemd-random-seed.service systemd-journal-flush.service \
    systemd-user-sessions.service systemd-binfmt.service systemd-sysctl.service modprobe@configfs.service \
    modprobe@drm.service modprobe@efi_pstore.service modprobe@fuse.service sys-kernel-debug.mount \
    sys-kernel-tracing.mount dev-mqueue.mount dev-hugepages.mount proc-sys-fs-binfmt_misc.automount \
    kmod-static-nodes.service systemd-tmpfiles-setup-dev.service systemd-tmpfiles-setup-dev-early.service; do
    ln -sf /dev/null "$2/etc/systemd/system/$unit"
done
rm -f "$2/usr/sbin/policy-rc.d"
echo tessera-host > "$2/etc/hostname"
cp "$3" "$2/tessera.deb"
mount -t proc proc "$2/proc"
mount --rbind /dev "$2/dev"
export PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive
chroot "$2" dpkg --force-unsafe-io --install /tessera.deb
rm "$2/tessera.deb"
"#;

/// Running host, removed when dropped.
#[derive(Debug)]
pub struct Booted {
    /// VM of the host.
    pub vm: Vm,
    // Dropped after the VM, which writes to the folder.
    _root: Scratch,
}

impl Booted {
    /// Returns the reason why this machine cannot run such a host, if any.
    pub fn impossible() -> Option<String> {
        Machine::impossible()
    }

    /// Boots a host with a package installed and `programs` in `/usr/local/bin`. `folder` holds the
    /// VM's files.
    pub fn start(
        lab: &Lab,
        spec: &VmSpec,
        package: &Path,
        programs: &[&Path],
        folder: &Path,
        progress: &Progress,
    ) -> Result<Self> {
        let kernel = vfio::kernel(progress)?;
        let prepared = machine::prepared(progress)?;
        let root = Scratch::new()?;
        let path = root.path();
        let mut install = Command::new("unshare");
        install
            .args(NAMESPACES)
            .args(["sh", "-c", INSTALL, "sh"])
            .arg(prepared)
            .arg(path)
            .arg(package);
        debs::run_quietly(install, &folder.join("install"))
            .context("Cannot install the package into a Debian")?;
        let kmod = path.join("usr/bin/kmod");
        fs::copy(vfio::kmod(&kernel), &kmod)?;
        fs::set_permissions(&kmod, fs::Permissions::from_mode(0o755))?;
        for name in ["usr/sbin/modprobe", "usr/bin/depmod"] {
            symlink("/usr/bin/kmod", path.join(name))?;
        }
        for program in programs {
            let name = program.file_name().context("A program without a name")?;
            fs::copy(program, path.join("usr/local/bin").join(name))?;
        }
        fs::write(path.join("usr/local/sbin/lab-agent"), initramfs::AGENT)?;
        let units = path.join("etc/systemd/system");
        fs::write(units.join("lab-agent.service"), AGENT)?;
        symlink("../lab-agent.service", units.join("multi-user.target.wants/lab-agent.service"))?;

        let mut files = vfio::modules(&kernel, &vfio::MODULES);
        let shared = |name: &&str| (format!("vfio/{name}.ko"), kernel.module(name));
        files.extend(shared_folder::MODULES.iter().map(shared));
        let order = folder.join("order");
        fs::write(&order, shared_folder::MODULES.join("\n") + "\n")?;
        files.push(("vfio/order".to_owned(), order));
        let initramfs = folder.join("booted.cpio");
        let archives = [initramfs::archive_with(INIT, &kernel, &[])?, initramfs::extra(&files)?];
        initramfs::write(&initramfs, &archives)?;
        let mut lab = Lab { initramfs, kvm: false, ..lab.clone() };
        lab.root.kernel = kernel;
        let spec = VmSpec { folder: Some(SharedFolder::writable(path)), ..spec.clone() };
        let vm = Vm::boot(&lab, &spec, &folder.join("vm"))?;
        Ok(Self { vm, _root: root })
    }
}
