//! A Debian machine of one's own: a fresh system with libvirt and QEMU, in which whoever installs Tessera can be played.
//!
//! It is a root filesystem, prepared once, which systemd boots in namespaces of its own: services start, packages can be
//! installed. What is written goes to memory and is gone with the machine; its network reaches nobody; when its first
//! process ends, all of them do. The kernel is the host's.

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

/// Changes when what is in the prepared root does.
const LAYOUT: &str = "debian-1";
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long a command may take that nobody gave more.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);

/// What is installed. QEMU is that of backports, as the documentation asks for; all else is the release's.
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

/// The namespaces of a machine, and that its processes end with the one that made them.
pub(crate) const NAMESPACES: [&str; 8] =
    ["--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child"];

/// What nobody in a machine may do, root or not: it would be the host's modules, clock and memory.
const FORBIDDEN: &str = "-sys_module,-sys_time,-sys_rawio,-mac_admin,-mac_override";

/// Installs the packages into a root that they have been unpacked into: their scripts find all they need.
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

/// Makes a machine of a prepared root: what is written lies above it, in memory. Devices are those that every process
/// may have, and what the kernel shares with all machines can be read only.
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

/// A machine that runs, gone when dropped.
#[derive(Debug)]
pub struct Machine {
    // Before its folders, which are then no longer in use.
    _process: Process,
    /// Its first process, as the host numbers it.
    init: i32,
    _cgroup: Option<Cgroup>,
    _scratch: Scratch,
}

/// A folder for the groups of processes that a machine makes, removed when dropped.
#[derive(Debug)]
struct Cgroup(PathBuf);

impl Cgroup {
    /// One below that of this process; none where the host shows no such groups.
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
        // A group can be removed a moment after its last process has gone.
        let deadline = Instant::now() + START_LIMIT;
        while remove_groups(&self.0).is_err() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Removes groups of processes from the leaves up. The files in them go with them.
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
    /// Why there can be none here, if so.
    pub fn impossible() -> Option<String> {
        if !cfg!(target_arch = "x86_64") {
            return Some("it is an x86-64 Debian, and this is another architecture".to_owned());
        }
        if !nix::unistd::geteuid().is_root() {
            return Some("it needs root, for namespaces and mounts".to_owned());
        }
        if !Debs::possible() {
            return Some("it is made of Debian packages by apt-get, dpkg-deb and tar".to_owned());
        }
        let mut probe = Command::new("unshare");
        probe.args(NAMESPACES).args(["mount", "-t", "cgroup2", "cgroup2", "/mnt"]);
        match probe.stdin(Stdio::null()).output() {
            Ok(output) if output.status.success() => None,
            Ok(output) => {
                let complaint = String::from_utf8_lossy(&output.stderr);
                Some(format!("it needs namespaces of its own: {}", complaint.trim()))
            }
            Err(error) => Some(format!("it needs util-linux's unshare: {error}")),
        }
    }

    /// Starts one: the first time this fetches and installs its packages.
    pub fn start(progress: &Progress) -> Result<Self> {
        let root = prepared(progress)?;
        let scratch = Scratch::new()?;
        fs::create_dir(scratch.path().join("machine"))?;
        let errors = scratch.path().join("errors");
        let cgroup = Cgroup::new();
        let procs = cgroup.as_ref().map(|cgroup| cgroup.0.join("cgroup.procs"));
        // Into its group first: the namespace begins where its first process is.
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
                bail!("The Debian machine's systemd is not up within {} s", START_LIMIT.as_secs());
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(machine)
    }

    /// True once all services have been started. One that failed is in nobody's way who does not need it.
    fn is_up(&self) -> Result<bool> {
        let state = self.run("systemctl is-system-running --wait")?;
        Ok(matches!(state.stdout.trim(), "running" | "degraded"))
    }

    /// A file or socket of the machine, as the host reaches it.
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

    /// Writes a file of the machine.
    pub fn write(&self, inside: &str, text: &str) -> Result<()> {
        let target = self.path(inside);
        fs::create_dir_all(target.parent().unwrap_or(&target))?;
        fs::write(&target, text).with_context(|| format!("Cannot write {inside} of the machine"))
    }

    /// Reads a file of the machine; empty where there is none.
    pub fn read(&self, inside: &str) -> String {
        let bytes = fs::read(self.path(inside)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Runs a shell script as the machine's root, whatever comes of it. What it leaves running must not hold its output.
    pub fn run(&self, script: &str) -> Result<Output> {
        self.run_within(script, COMMAND_LIMIT)
    }

    /// The same, with a limit of its own.
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

    /// Runs a shell script that is to succeed; what it printed.
    pub fn sh(&self, script: &str) -> Result<String> {
        let Output { status, stdout, stderr } = self.run(script)?;
        if status != 0 {
            bail!("`{script}` failed with {status}: {}{}", stdout, stderr.trim());
        }
        Ok(stdout)
    }

    /// Its first process, as the host numbers it.
    pub fn init(&self) -> Pid {
        Pid::from_raw(self.init)
    }
}

/// The root that machines are made of.
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
