//! Control groups of workers and GPU processes, for limits of their memory and threads.
//!
//! The manager uses a cgroup (v2) only if one was delegated to it: the manager then runs in a group
//! [`OWN`] of it, and each worker and GPU process gets a group beside that one. This is the layout
//! of systemd's `Delegate=` and `DelegateSubgroup=`. The kernel applies limits below a group only
//! if the group itself has no process, so the manager never moves itself. Without such a group,
//! processes stay where they were started.

use std::cell::RefCell;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use mdev_core::gpu::ClientSpec;
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;
use mdev_core::untrusted::{TABLE, VALUE, read_text};

/// Name of the manager's own group.
const OWN: &str = "manager";

/// Controllers that enforce limits.
const CONTROLLERS: [&str; 2] = ["memory", "pids"];

/// Memory of a worker, besides memory that it shares with others.
const WORKER_MEMORY: u64 = 512 * MIB;

/// Limit of threads of a GPU process: one for each worker, and one for each eviction.
const GPU_THREADS: u64 = 4096;

/// Limit of threads of a context: its engine, its worker, its GPU process, interrupts, and those
/// that close descriptors.
const CONTEXT_THREADS: u64 = 64;

/// Process that has a group of its own.
#[derive(Clone, Copy, Debug)]
pub enum Member<'a> {
    /// Worker of a vGPU.
    Worker(VgpuId),
    /// Context of a vGPU.
    Context(VgpuId),
    /// GPU process of a parent.
    Gpu(&'a str),
}

impl fmt::Display for Member<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker(vgpu) => write!(f, "worker-{vgpu}"),
            Self::Context(vgpu) => write!(f, "context-{vgpu}"),
            Self::Gpu(parent) => write!(f, "gpu-{parent}"),
        }
    }
}

/// Limits of a group. The kernel charges a page of shared memory to the group that touches it
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Limit of threads.
    threads: u64,
    /// Limit of memory in bytes, and of swap.
    memory: Option<u64>,
}

impl Limits {
    /// Limits of a GPU process. It touches the memory of all guests, so its memory has no limit.
    pub const GPU_PROCESS: Self = Self { threads: GPU_THREADS, memory: None };

    /// Limits of a context. It touches its guest's memory, whose size the guest's process limits.
    pub const CONTEXT: Self = Self { threads: CONTEXT_THREADS, memory: None };

    /// Returns the limits of a worker. It may be the first to touch the partition of video memory,
    /// on behalf of a guest that does not map it. Without a GPU process, `pins` is set: the driver
    /// pins guest memory on behalf of the worker.
    pub fn worker(spec: &ClientSpec, threads: u64, pins: bool) -> Self {
        let pinned = if pins { spec.max_import_bytes } else { 0 };
        let shared = spec.vram_bytes.saturating_add(pinned);
        Self { threads, memory: Some(WORKER_MEMORY.saturating_add(shared)) }
    }

    fn write(self, group: &Path, controllers: &str) {
        let max =
            |limit: Option<u64>| limit.map_or_else(|| "max".into(), |limit| limit.to_string());
        let (threads, memory) = (max(Some(self.threads)), max(self.memory));
        let files = [("pids", "pids.max", threads), ("memory", "memory.max", memory.clone())];
        // A kernel without swap accounting has no file for swap.
        let swap = ("memory", "memory.swap.max", memory);
        let has_swap = group.join(swap.1).exists();
        for (controller, file, limit) in files.into_iter().chain(has_swap.then_some(swap)) {
            if !has(controllers, controller) {
                continue;
            }
            match fs::write(group.join(file), limit) {
                // The process has ended.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => log::warn!("{}: {error}", group.join(file).display()),
                Ok(()) => {}
            }
        }
    }
}

/// Groups of a manager's workers and GPU processes.
#[derive(Debug)]
pub struct Cgroups {
    /// The delegated group.
    root: Option<PathBuf>,
    /// Groups whose limits are not set yet.
    unlimited: RefCell<Vec<(PathBuf, Limits)>>,
}

impl Cgroups {
    /// Finds the group that is delegated to this process.
    pub fn find() -> Self {
        let found = own_group().and_then(|own| delegated(&own));
        let root = found
            .inspect_err(|reason| log::debug!("Workers have no cgroups of their own: {reason}"))
            .ok();
        Self { root, unlimited: RefCell::default() }
    }

    /// Moves a process into its group, which is created if there is none, and limits the group. A
    /// process that stays where it is works all the same.
    pub fn place(&self, member: Member<'_>, pid: u32, limits: Limits) {
        let Some(root) = &self.root else { return };
        let group = root.join(member.to_string());
        let created = match fs::create_dir(&group) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        };
        let moved = created.and_then(|()| fs::write(group.join("cgroup.procs"), pid.to_string()));
        if let Err(error) = moved {
            log::warn!("Process {pid} stays in the manager's cgroup, without limits: {error}");
            self.remove(member);
            return;
        }
        self.unlimited.borrow_mut().push((group, limits));
        self.limit(root);
    }

    /// Limits the groups that have no limits yet.
    fn limit(&self, root: &Path) {
        let controllers = match enable(root) {
            Ok(controllers) => controllers,
            // Processes of an earlier release run in the delegated group. They are adopted one
            // after the other, and leave it.
            Err(error) => return log::debug!("No limits yet in {}: {error}", root.display()),
        };
        for (group, limits) in self.unlimited.take() {
            limits.write(&group, &controllers);
        }
    }

    /// Removes the group of a process that has ended. A group with another process stays.
    pub fn remove(&self, member: Member<'_>) {
        if let Some(root) = &self.root {
            remove(&root.join(member.to_string()));
        }
    }

    /// Removes all groups without a process.
    pub fn remove_empty(&self) {
        let Some(root) = &self.root else { return };
        let entries = fs::read_dir(root).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if ["worker-", "context-", "gpu-"].iter().any(|prefix| name.starts_with(prefix)) {
                remove(&entry.path());
            }
        }
    }
}

fn remove(group: &Path) {
    if let Err(error) = fs::remove_dir(group)
        && error.kind() != io::ErrorKind::NotFound
    {
        log::debug!("{}: {error}", group.display());
    }
}

fn has(controllers: &str, controller: &str) -> bool {
    controllers.split_whitespace().any(|one| one == controller)
}

/// Enables the controllers below a group. Returns those that the group has.
fn enable(root: &Path) -> io::Result<String> {
    let available = read_text(&root.join("cgroup.controllers"), VALUE)?;
    let switch = root.join("cgroup.subtree_control");
    let enabled = read_text(&switch, VALUE)?;
    let missing = |one: &&&str| has(&available, one) && !has(&enabled, one);
    let wanted: Vec<_> = CONTROLLERS.iter().filter(missing).map(|one| format!("+{one}")).collect();
    if !wanted.is_empty() {
        fs::write(switch, wanted.join(" "))?;
    }
    Ok(available)
}

/// Returns the folder of this process' group.
fn own_group() -> Result<PathBuf, String> {
    let read =
        |path: &str| read_text(Path::new(path), TABLE).map_err(|error| format!("{path}: {error}"));
    let (groups, mounts) = (read("/proc/self/cgroup")?, read("/proc/self/mountinfo")?);
    group_in(&groups, &mounts).ok_or_else(|| "no cgroup v2 is mounted".into())
}

/// Returns the folder of a process' group, from its `/proc/PID/cgroup` and `/proc/PID/mountinfo`.
fn group_in(groups: &str, mounts: &str) -> Option<PathBuf> {
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, at) = (fields.next()?, fields.next()?);
        let below = Path::new(group).strip_prefix(root).ok()?;
        kind.starts_with("cgroup2 ").then(|| Path::new(at).join(below))
    })
}

/// Returns the group that is delegated to a process in the group `own`.
fn delegated(own: &Path) -> Result<PathBuf, String> {
    let root = own.parent().filter(|_| own.ends_with(OWN)).ok_or_else(|| {
        format!("{} is no group {OWN:?} in a group that is delegated to vgpud", own.display())
    })?;
    // The kernel's root group has no such file.
    if !root.join("cgroup.events").exists() {
        return Err(format!("{} is the root of all groups", root.display()));
    }
    let switch = root.join("cgroup.subtree_control");
    match fs::File::options().write(true).open(&switch) {
        Ok(_) => Ok(root.to_owned()),
        Err(error) => Err(format!("{}: {error}", switch.display())),
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// A folder that looks like a delegated group with a manager in it.
    fn fake(controllers: &str) -> (TempDir, Cgroups) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(OWN)).unwrap();
        let files = [
            ("cgroup.events", "populated 1\n"),
            ("cgroup.controllers", controllers),
            ("cgroup.subtree_control", ""),
        ];
        for (file, text) in files {
            fs::write(folder.path().join(file), text).unwrap();
        }
        let root = delegated(&folder.path().join(OWN)).unwrap();
        (folder, Cgroups { root: Some(root), unlimited: RefCell::default() })
    }

    fn spec() -> ClientSpec {
        ClientSpec {
            vgpu: VgpuId::random(),
            vram_bytes: 256 * MIB,
            framebuffer_bytes: 0,
            max_channels: 8,
            max_import_bytes: 1 << 40,
        }
    }

    #[test]
    fn a_worker_is_moved_and_limited() {
        let (folder, groups) = fake("cpu memory pids\n");
        let spec = spec();
        groups.place(Member::Worker(spec.vgpu), 77, Limits::worker(&spec, 64, false));
        let group = folder.path().join(format!("worker-{}", spec.vgpu));
        let read = |file| fs::read_to_string(group.join(file)).unwrap();
        assert_eq!(read("cgroup.procs"), "77");
        assert_eq!(read("pids.max"), "64");
        assert_eq!(read("memory.max"), (768 * MIB).to_string());
        assert!(!group.join("memory.swap.max").exists(), "a kernel without swap accounting");
        let switch = fs::read_to_string(folder.path().join("cgroup.subtree_control")).unwrap();
        assert_eq!(switch, "+memory +pids");
        groups.place(Member::Gpu("soft0"), 78, Limits::GPU_PROCESS);
        let group = folder.path().join("gpu-soft0");
        assert_eq!(fs::read_to_string(group.join("memory.max")).unwrap(), "max");
    }

    #[test]
    fn guest_memory_that_a_driver_pins_has_room() {
        let limits = Limits::worker(&spec(), 64, true);
        assert_eq!(limits.memory, Some((1 << 40) + 768 * MIB));
    }

    #[test]
    fn limits_follow_when_controllers_can_be_enabled() {
        let (folder, groups) = fake("pids");
        let switch = folder.path().join("cgroup.subtree_control");
        fs::remove_file(&switch).unwrap();
        let first = spec();
        groups.place(Member::Worker(first.vgpu), 77, Limits::worker(&first, 64, false));
        let group = folder.path().join(format!("worker-{}", first.vgpu));
        assert!(!group.join("pids.max").exists());
        fs::write(switch, "").unwrap();
        groups.place(Member::Gpu("soft0"), 78, Limits::GPU_PROCESS);
        assert_eq!(fs::read_to_string(group.join("pids.max")).unwrap(), "64");
        assert!(!group.join("memory.max").exists(), "there is no controller of memory");
    }

    #[test]
    fn only_empty_groups_of_members_are_removed() {
        let (folder, groups) = fake("");
        for name in ["worker-x", "gpu-y", "other"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        fs::write(folder.path().join("gpu-y/process"), "").unwrap();
        groups.remove_empty();
        let is_left = |name| folder.path().join(name).exists();
        assert_eq!(["worker-x", "gpu-y", "other", OWN].map(is_left), [false, true, true, true]);
    }

    #[test]
    fn a_group_that_is_not_delegated_is_left_alone() {
        let (folder, _groups) = fake("");
        assert!(delegated(folder.path()).unwrap_err().contains("no group \"manager\""));
        fs::remove_file(folder.path().join("cgroup.events")).unwrap();
        let refused = delegated(&folder.path().join(OWN)).unwrap_err();
        assert!(refused.ends_with("is the root of all groups"), "{refused}");
        let none = Cgroups { root: None, unlimited: RefCell::default() };
        none.place(Member::Gpu("soft0"), 1, Limits::GPU_PROCESS);
        none.remove_empty();
    }

    #[test]
    fn the_own_group_is_found_below_its_mount() {
        let groups = "8:pids:/\n0::/system.slice/vgpud.service/manager\n";
        let mount = |root: &str, at: &str, kind: &str| {
            format!("30 23 0:26 {root} {at} rw,nosuid - {kind} cgroup rw\n")
        };
        let found = |mounts: String| group_in(groups, &mounts);
        let v1 = mount("/", "/sys/fs/cgroup/pids", "cgroup");
        assert_eq!(found(v1.clone()), None);
        let whole = Some("/sys/fs/cgroup/system.slice/vgpud.service/manager".into());
        assert_eq!(found(v1 + &mount("/", "/sys/fs/cgroup", "cgroup2")), whole);
        let part = mount("/system.slice", "/mnt", "cgroup2");
        assert_eq!(found(part), Some("/mnt/vgpud.service/manager".into()));
    }
}
