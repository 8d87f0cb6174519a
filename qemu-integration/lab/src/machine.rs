//! Debian machine: a fresh system with libvirt and QEMU, for tests of an installation of Tessera.
//!
//! systemd boots a root filesystem, prepared once, in separate namespaces, so services start and
//! packages can be installed. Written files stay in memory and are discarded with the machine; its
//! network is isolated; all processes end with its first process. The kernel is the host's.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::cache::{self, Unavailable, cache_folder};
use crate::debs::{self, Debs};
use crate::namespaces::{Cgroups, NAMESPACES, Namespaces};
use crate::progress::Progress;

/// Version of the prepared root's contents.
const LAYOUT: &str = "debian-1";
const START_LIMIT: Duration = Duration::from_secs(60);

/// Installed packages. QEMU is from backports, as the documentation recommends; the rest is from
/// the release.
const PACKAGES: [&str; 15] = [
    "?essential",
    "apt",
    "debian-archive-keyring",
    "iproute2",
    "procps",
    "systemd-sysv",
    "dbus",
    "libxml2-utils",
    "qemu-system-x86/trixie-backports",
    "qemu-system-common/trixie-backports",
    "qemu-system-data/trixie-backports",
    "seabios/trixie-backports",
    "libvirt-daemon-driver-qemu",
    "libvirt-daemon-system",
    "libvirt-clients",
];

/// Capabilities dropped in a machine, because modules, clock and memory are the host's.
const FORBIDDEN: &str = "-sys_module,-sys_time,-sys_rawio,-mac_admin,-mac_override";

/// Script that installs the packages in the root that they were unpacked into.
const INSTALL: &str = r#"
set -e
mkdir -p "$1/proc" "$1/dev" "$1/sys" "$1/packages" "$1/var/lib/dpkg/info"
touch "$1/var/lib/dpkg/status"
printf '#!/bin/sh\nexit 101\n' > "$1/usr/sbin/policy-rc.d"
chmod 755 "$1/usr/sbin/policy-rc.d"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount --bind "$2" "$1/packages"
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
chroot "$1" sh -c 'dpkg --force-depends --force-unsafe-io --install /packages/*.deb'
umount "$1/packages"
rmdir "$1/packages"
"#;

/// Script that starts a machine on a prepared root with an overlay in memory. Only basic devices
/// are available, and kernel interfaces shared with the host are read-only.
const BOOT: &str = r#"
set -e
read -r pid rest < /proc/self/stat
mount -t tmpfs -o mode=755 tmpfs "$2/machine"
cd "$2/machine"
mkdir upper work root
mount -t overlay overlay -o "lowerdir=$1,upperdir=upper,workdir=work" root
cd root
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom tty kvm; do
    if [ -e "/dev/$device" ]; then
        touch "dev/$device"
        mount --bind "/dev/$device" "dev/$device"
    fi
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin
ln -s fd/1 dev/stdout
ln -s fd/2 dev/stderr
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
rm -f usr/sbin/policy-rc.d
echo tessera-lab > etc/hostname
echo "$pid" > "$2/pid.new"
mv "$2/pid.new" "$2/pid"
exec env -i container=lab PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    setpriv --bounding-set "$3" chroot . /usr/lib/systemd/systemd --log-target=journal
"#;

/// Running machine, removed when dropped.
#[derive(Debug)]
pub struct Machine {
    namespaces: Namespaces,
}

impl Deref for Machine {
    type Target = Namespaces;

    fn deref(&self) -> &Namespaces {
        &self.namespaces
    }
}

impl Machine {
    /// Returns the reason why this host cannot run a machine, if any.
    pub fn impossible() -> Option<String> {
        if !cfg!(target_arch = "x86_64") {
            return Some(
                "the machine is an x86-64 Debian, but this host has another architecture"
                    .to_owned(),
            );
        }
        if !nix::unistd::geteuid().is_root() {
            return Some("the machine needs root, for namespaces and mounts".to_owned());
        }
        if !Debs::possible() {
            return Some(
                "the machine needs apt-get, dpkg-deb and tar to unpack Debian packages".to_owned(),
            );
        }
        let mut probe = Command::new("unshare");
        probe.args(NAMESPACES).args(["mount", "-t", "cgroup2", "cgroup2", "/mnt"]);
        match probe.stdin(Stdio::null()).output() {
            Ok(output) if output.status.success() => None,
            Ok(output) => {
                let complaint = String::from_utf8_lossy(&output.stderr);
                Some(format!("the machine needs namespaces: {}", complaint.trim()))
            }
            Err(error) => Some(format!("the machine needs util-linux's unshare: {error}")),
        }
    }

    /// Fails with the reason why this host cannot run a machine, if any.
    pub(crate) fn require() -> Result<()> {
        Self::impossible().map_or(Ok(()), |reason| Err(Unavailable(reason).into()))
    }

    /// Starts a machine; the first start fetches and installs packages.
    pub fn start(progress: &Progress) -> Result<Self> {
        let root = prepared(progress)?;
        let deadline = Instant::now() + START_LIMIT;
        let namespaces = Namespaces::start(BOOT, &root, &[FORBIDDEN], Cgroups::unified())?;
        let machine = Self { namespaces };
        while !machine.is_up()? {
            if Instant::now() > deadline {
                bail!(
                    "The Debian machine's systemd did not start within {} s",
                    START_LIMIT.as_secs()
                );
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(machine)
    }

    /// Returns true once all services have started. Tolerates failed services.
    fn is_up(&self) -> Result<bool> {
        let state = self.run("systemctl is-system-running --wait")?;
        Ok(matches!(state.stdout.trim(), "running" | "degraded"))
    }
}

/// Prepares the root filesystem of machines.
pub(crate) fn prepared(progress: &Progress) -> Result<PathBuf> {
    let found = |folder: &Path| folder.exists().then(|| folder.to_owned());
    cache::find_or_prepare(&cache_folder()?, LAYOUT, progress, found, |folder, fetched| {
        let step = progress.step("Fetching a Debian with libvirt and QEMU");
        let debs = Debs::open(fetched)?;
        debs.fetch_chosen(&PACKAGES)?;
        step.done();
        let step = progress.step("Installing it");
        debs::unpack(&debs.packages()?, folder)?;
        let mut install = Command::new("unshare");
        install.args(NAMESPACES).args(["sh", "-c", INSTALL, "sh"]);
        install.arg(folder).arg(debs.archives());
        debs::run_quietly(install, &fetched.join("log/install"))
            .context("Cannot install the Debian machine's packages")?;
        step.done();
        Ok(())
    })
}
