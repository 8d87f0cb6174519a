//! Processes in namespaces and control groups of their own, with a root folder of their own, as a
//! [`crate::machine`] has them.
//!
//! All processes end with the first one. Scratch files and control groups are removed when the
//! value is dropped.

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
use crate::guest::Output;

/// Options of unshare: namespaces whose processes end with their creator.
pub(crate) const NAMESPACES: [&str; 8] =
    ["--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child"];

const START_LIMIT: Duration = Duration::from_secs(60);
/// Default timeout of a command.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);

/// Joins the control groups that the first arguments name, as many as `$1` says, and executes the
/// other arguments. The cgroup namespace is rooted at the groups of its first process.
const JOIN: &str = r#"
n=$1
shift
while [ "$n" -gt 0 ]; do
    echo $$ > "$1/cgroup.procs"
    shift
    n=$((n - 1))
done
exec "$@"
"#;

/// Control groups, removed when dropped.
#[derive(Debug, Default)]
pub struct Cgroups(Vec<PathBuf>);

impl Cgroups {
    /// Creates a group below this process's group in the unified hierarchy, if the host has one.
    pub fn unified() -> Self {
        let mut groups = Self::default();
        if let Some(parent) = parent("cgroup2", str::is_empty) {
            groups.add(&parent);
        }
        groups
    }

    /// Creates a group in the hierarchy of each controller (cgroup v1). Returns the missing
    /// controller as an error.
    pub fn of_controllers(controllers: &[&str]) -> std::result::Result<Self, String> {
        let mut groups = Self::default();
        for controller in controllers {
            let parent = parent("cgroup", |names| names.split(',').any(|name| name == *controller));
            let folder = parent.and_then(|parent| groups.add(&parent));
            let Some(folder) = folder else {
                return Err(format!("cgroup v1 with the controller {controller}"));
            };
            if *controller == "cpuset" {
                inherit_cpus(&folder).map_err(|error| format!("a group of CPUs: {error}"))?;
            }
        }
        Ok(groups)
    }

    fn add(&mut self, parent: &Path) -> Option<PathBuf> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let folder = parent.join(format!("tessera-lab-{}", std::process::id()));
        let folder = folder.with_extension(NUMBER.fetch_add(1, Ordering::Relaxed).to_string());
        fs::create_dir_all(&folder).ok()?;
        self.0.push(folder.clone());
        Some(folder)
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        // A group can be removed only shortly after its last process has ended.
        let deadline = Instant::now() + START_LIMIT;
        for folder in &self.0 {
            while remove_groups(folder).is_err() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Returns the folder of this process's group in the hierarchy of a file system type, selected by
/// its controllers.
fn parent(kind: &str, selected: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    // "4:memory:/some/group", and "0::/" of the unified hierarchy.
    let (controllers, ours) = groups.lines().find_map(|line| {
        let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
        selected(controllers).then(|| (controllers, group.trim_start_matches('/')))
    })?;
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mount = mounts.lines().find_map(|line| {
        let words: Vec<_> = line.split(' ').collect();
        let [_, at, found, options, ..] = words[..] else { return None };
        let has = |name: &str| options.split(',').any(|option| option == name);
        let controlled = controllers.split(',').filter(|name| !name.is_empty()).all(has);
        (found == kind && controlled).then(|| PathBuf::from(at))
    })?;
    Some(mount.join(ours))
}

/// Allows a new group of the controller `cpuset` what its parent may use: a group without CPUs
/// takes no process.
fn inherit_cpus(folder: &Path) -> std::io::Result<()> {
    for name in ["cpuset.cpus", "cpuset.mems"] {
        let parent = folder.parent().unwrap_or(folder).join(name);
        fs::write(folder.join(name), fs::read(parent)?)?;
    }
    fs::write(folder.join("cgroup.clone_children"), "1")
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

/// Running processes in namespaces of their own.
#[derive(Debug)]
pub struct Namespaces {
    // Dropped before groups and folders, which the processes use.
    _process: Process,
    /// Host process id of the first process.
    init: i32,
    _groups: Cgroups,
    _scratch: Scratch,
}

impl Namespaces {
    /// Runs a shell script that becomes the first process.
    ///
    /// The script gets the prepared root, a scratch folder with an empty folder `machine`, and
    /// `args`. It writes its process id on the host to the scratch folder's file `pid` before it
    /// changes its root.
    pub fn start(script: &str, root: &Path, args: &[&str], groups: Cgroups) -> Result<Self> {
        let scratch = Scratch::new()?;
        fs::create_dir(scratch.path().join("machine"))?;
        let errors = scratch.path().join("errors");
        let mut command = Command::new("sh");
        command.args(["-c", JOIN, "sh", &groups.0.len().to_string()]).args(&groups.0);
        command.arg("unshare").args(NAMESPACES).args(["sh", "-c", script, "sh"]);
        command.arg(root).arg(scratch.path()).args(args);
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
        Ok(Self { _process: process, init, _groups: groups, _scratch: scratch })
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
        let limit = limit.as_secs().to_string();
        let mut command = self.command(&["timeout", "-k", "5", &limit, "sh", "-c", script]);
        Ok(command.stdin(Stdio::null()).output().context("Cannot run nsenter")?.into())
    }

    /// Returns a command that runs a program of the root in the namespaces.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", self.init));
        command.args(["--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--root", "--wd"]);
        command.args(args).env_clear().envs([
            ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
            ("HOME", "/root"),
            ("LC_ALL", "C.UTF-8"),
            ("DEBIAN_FRONTEND", "noninteractive"),
        ]);
        command
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
