//! Node of a cluster: a Debian in namespaces and control groups of its own.

use std::ops::Deref;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::debs::Debs;
use crate::guest::last_lines;
use crate::namespaces::{Cgroups, Namespaces};

const BOOT: &str = include_str!("node.sh");

/// Controllers of control groups that kubelet and runc need.
const CONTROLLERS: [&str; 7] = ["cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "pids"];

/// Joins the node's control groups. `nsenter` leaves a process in the lab's.
const JOIN: &str = "for group in /sys/fs/cgroup/*/cgroup.procs; do echo 0 > $group; done";

/// Folder of the services' process ids.
const PIDS: &str = "/run/lab";

const LIMIT: Duration = Duration::from_secs(30);

/// Running node, removed when dropped.
#[derive(Debug)]
pub struct Node {
    namespaces: Namespaces,
}

impl Deref for Node {
    type Target = Namespaces;

    fn deref(&self) -> &Namespaces {
        &self.namespaces
    }
}

/// Returns the reason why this host cannot run a node, if any.
pub fn impossible() -> Option<String> {
    if !cfg!(target_arch = "x86_64") {
        return Some("the node is an x86-64 Debian, but this host has another architecture".into());
    }
    if !nix::unistd::geteuid().is_root() {
        return Some("the node needs root, for namespaces and mounts".into());
    }
    if !Debs::possible() {
        return Some("the node needs apt-get, dpkg-deb and tar to unpack Debian packages".into());
    }
    // Kubernetes 1.20 with runc 1.1 would run with cgroup v2 too; nothing here has tried it.
    Cgroups::of_controllers(&CONTROLLERS).err().map(|missing| format!("the node needs {missing}"))
}

impl Node {
    /// Starts a node without services.
    pub fn start(root: &Path) -> Result<Self> {
        let groups = match Cgroups::of_controllers(&CONTROLLERS) {
            Ok(groups) => groups,
            Err(missing) => bail!("The node needs {missing}"),
        };
        let namespaces = Namespaces::start(BOOT, root, &CONTROLLERS, groups)?;
        namespaces.sh(&format!("mkdir {PIDS}"))?;
        Ok(Self { namespaces })
    }

    /// Starts a command in the background. Its output goes to `/var/log/NAME.log`.
    pub fn start_service(&self, name: &str, command: &str) -> Result<()> {
        self.sh(&format!(
            "{JOIN}\n\
             setsid {command} < /dev/null >> /var/log/{name}.log 2>&1 &\n\
             echo $! > {PIDS}/{name}"
        ))
        .map(drop)
    }

    /// Kills a service by SIGKILL and waits until the process is gone.
    pub fn kill_service(&self, name: &str) -> Result<()> {
        let pid = self.service(name)?;
        self.sh(&format!("kill -9 {pid}"))?;
        self.wait_for(&format!("{name} ends"), || Ok(!self.is_running(pid)))
    }

    /// Returns the process id of a service, as seen in the node.
    pub fn service(&self, name: &str) -> Result<u32> {
        let text = self.read(&format!("{PIDS}/{name}"));
        match text.trim().parse() {
            Ok(pid) => Ok(pid),
            Err(_) => bail!("{name} was not started"),
        }
    }

    /// Returns true while a process of the node runs. A zombie has ended.
    pub fn is_running(&self, pid: u32) -> bool {
        let stat = self.read(&format!("/proc/{pid}/stat"));
        stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
    }

    /// Returns the last lines of a service's log.
    pub fn log(&self, name: &str) -> String {
        last_lines(&self.read(&format!("/var/log/{name}.log")), 20)
    }

    /// Waits until `ready` returns true.
    pub fn wait_for(&self, what: &str, mut ready: impl FnMut() -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        while !ready()? {
            ensure!(Instant::now() < deadline, "{what}: not within {} s", LIMIT.as_secs());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}
