//! Debian machine: a fresh system with libvirt and QEMU, for tests of an installation of Tessera.
//!
//! systemd boots a root filesystem, prepared once, in separate namespaces, so services start and
//! packages can be installed. Written files stay in memory and are discarded with the machine; its
//! network is isolated; all processes end with its first process. The kernel is the host's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use crate::cleanup::{Process, Scratch};
use crate::debs::{self, Debs};
use crate::guest::Output;
use crate::progress::Progress;
use crate::root::{cache_folder, lock};

/// Version of the prepared root's contents.
const LAYOUT: &str = "debian-1";
const START_LIMIT: Duration = Duration::from_secs(60);
/// Default timeout of a command.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);

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

/// Options of unshare: namespaces of a machine, whose processes end with their creator.
pub(crate) const NAMESPACES: [&str; 8] =
    ["--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child"];

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
    // Dropped before the folders, which the process uses.
    _process: Process,
    /// Host process id of the machine's first process.
    init: i32,
    _cgroup: Option<Cgroup>,
    _scratch: Scratch,
}

/// Folder for the machine's control groups, removed when dropped.
#[derive(Debug)]
struct Cgroup(PathBuf);

impl Cgroup {
    /// Creates a group below the group of this process. Returns none if the host has no cgroups.
    fn new() -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
        let mount = mounts.lines().find_map(|line| {
            let mut words = line.split(' ').skip(1);
            let (at, kind) = (words.next()?, words.next()?);
            (kind == "cgroup2").then(|| PathBuf::from(at))
        })?;
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let ours = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
        let folder = mount.join(ours).join(format!("tessera-lab-{}", std::process::id()));
        let folder = folder.with_extension(NUMBER.fetch_add(1, Ordering::Relaxed).to_string());
        fs::create_dir_all(&folder).ok()?;
        Some(Self(folder))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A group can be removed only shortly after its last process has ended.
        let deadline = Instant::now() + START_LIMIT;
        while remove_groups(&self.0).is_err() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Removes control groups from the leaves up. Their files disappear with them.
fn remove_groups(folder: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_groups(&entry.path())?;
        }
    }
    fs::remove_dir(folder)
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

    /// Starts a machine; the first start fetches and installs packages.
    pub fn start(progress: &Progress) -> Result<Self> {
        let root = prepared(progress)?;
        let scratch = Scratch::new()?;
        fs::create_dir(scratch.path().join("machine"))?;
        let errors = scratch.path().join("errors");
        let cgroup = Cgroup::new();
        let procs = cgroup.as_ref().map(|cgroup| cgroup.0.join("cgroup.procs"));
        // Joins the group first: the cgroup namespace is rooted at the group of its first process.
        let mut command = Command::new("sh");
        command.args(["-c", r#"echo $$ > "$0"; exec "$@""#]);
        command.arg(procs.unwrap_or_else(|| "/dev/null".into()));
        command.arg("unshare").args(NAMESPACES).args(["sh", "-c", BOOT, "sh"]);
        command.arg(&root).arg(scratch.path()).arg(FORBIDDEN);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&errors)?);
        let mut process = Process::spawn(command, Signal::SIGKILL)?;
        let deadline = Instant::now() + START_LIMIT;
        let init = loop {
            if let Ok(pid) = fs::read_to_string(scratch.path().join("pid")) {
                break pid.trim().parse()?;
            }
            if process.try_wait()?.is_some() || Instant::now() > deadline {
                let errors = fs::read_to_string(&errors).unwrap_or_default();
                bail!("The Debian machine did not start: {}", errors.trim());
            }
            thread::sleep(Duration::from_millis(5));
        };
        let machine = Self { _process: process, init, _cgroup: cgroup, _scratch: scratch };
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

    /// Returns the host's path of a file or socket in the machine.
    pub fn path(&self, inside: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{inside}", self.init))
    }

    /// Copies a file into the machine.
    pub fn install(&self, file: &Path, inside: &str) -> Result<()> {
        let target = self.path(inside);
        fs::create_dir_all(target.parent().unwrap_or(&target))?;
        fs::copy(file, &target)
            .with_context(|| format!("Cannot copy {} into the machine", file.display()))?;
        Ok(())
    }

    /// Writes a file in the machine.
    pub fn write(&self, inside: &str, text: &str) -> Result<()> {
        let target = self.path(inside);
        fs::create_dir_all(target.parent().unwrap_or(&target))?;
        fs::write(&target, text).with_context(|| format!("Cannot write {inside} of the machine"))
    }

    /// Reads a file in the machine; returns an empty text if the file does not exist.
    pub fn read(&self, inside: &str) -> String {
        let bytes = fs::read(self.path(inside)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Runs a shell script as the machine's root and returns any status. Background processes must
    /// not keep its output open.
    pub fn run(&self, script: &str) -> Result<Output> {
        self.run_within(script, COMMAND_LIMIT)
    }

    /// Runs a shell script with a given timeout.
    pub fn run_within(&self, script: &str, limit: Duration) -> Result<Output> {
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", self.init));
        command.args(["--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--root", "--wd"]);
        command.args(["timeout", "-k", "5", &limit.as_secs().to_string(), "sh", "-c", script]);
        command.env_clear().envs([
            ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
            ("HOME", "/root"),
            ("LC_ALL", "C.UTF-8"),
            ("DEBIAN_FRONTEND", "noninteractive"),
        ]);
        Ok(command.stdin(Stdio::null()).output().context("Cannot run nsenter")?.into())
    }

    /// Runs a shell script that must succeed and returns its output.
    pub fn sh(&self, script: &str) -> Result<String> {
        let Output { status, stdout, stderr } = self.run(script)?;
        if status != 0 {
            bail!("`{script}` failed with {status}: {}{}", stdout, stderr.trim());
        }
        Ok(stdout)
    }

    /// Returns the host process id of the machine's first process.
    pub fn init(&self) -> Pid {
        Pid::from_raw(self.init)
    }
}

/// Prepares the root filesystem of machines.
pub(crate) fn prepared(progress: &Progress) -> Result<PathBuf> {
    let cache = cache_folder()?;
    let folder = cache.join(LAYOUT);
    if folder.exists() {
        return Ok(folder);
    }
    let _lock = lock(&cache, progress)?;
    if folder.exists() {
        return Ok(folder);
    }
    let step = progress.step("Fetching a Debian with libvirt and QEMU");
    let fetched = cache.join("debian-fetched");
    let debs = Debs::open(&fetched)?;
    debs.fetch_chosen(&PACKAGES)?;
    step.done();
    let step = progress.step("Installing it");
    let partial = Scratch::at(cache.join("debian-partial"))?;
    debs::unpack(&debs.packages()?, partial.path())?;
    let mut install = Command::new("unshare");
    install.args(NAMESPACES).args(["sh", "-c", INSTALL, "sh"]);
    install.arg(partial.path()).arg(debs.archives());
    debs::run_quietly(install, &fetched.join("log/install"))
        .context("Cannot install the Debian machine's packages")?;
    partial.rename(&folder)?;
    let _ = fs::remove_dir_all(&fetched);
    step.done();
    Ok(folder)
}
