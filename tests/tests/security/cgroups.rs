//! Control groups of workers and GPU processes. The test needs a cgroup v2 in which it may make
//! groups; it is skipped otherwise.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::json;
use system_tests::{Vgpud, kill_process, skipped, wait_for};

/// Group that is delegated to a manager, as systemd does it. Removed when dropped.
struct Delegated(PathBuf);

impl Delegated {
    fn new() -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let of_v2 = |line: &str| {
            let mut fields = line.split(' ').skip(1);
            let (at, kind) = (fields.next()?, fields.next()?);
            (kind == "cgroup2").then(|| PathBuf::from(at))
        };
        let mount = mounts.lines().find_map(of_v2).context("there is no cgroup v2")?;
        let folder = mount.join(group(std::process::id())?.trim_start_matches('/'));
        let folder = folder.join(format!("tessera-test-{}", std::process::id()));
        fs::create_dir_all(folder.join("manager")).context(folder.display().to_string())?;
        Ok(Self(folder))
    }

    /// Returns the names of the groups.
    fn groups(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.0)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                names.push(entry.file_name().to_string_lossy().into_owned());
            }
        }
        names.sort();
        Ok(names)
    }
}

impl Drop for Delegated {
    fn drop(&mut self) {
        let removed = wait_for("the groups are removed", || {
            for name in self.groups().unwrap_or_default() {
                let _ = fs::remove_dir(self.0.join(name));
            }
            fs::remove_dir(&self.0).is_ok()
        });
        if let Err(error) = removed {
            eprintln!("{}: {error}", self.0.display());
        }
    }
}

/// Returns the group of a process, as in `/proc/PID/cgroup`.
fn group(pid: u32) -> Result<String> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"));
    Ok(group.context("it has no cgroup v2")?.to_owned())
}

fn name_of_group(pid: u64) -> Result<String> {
    let group = group(u32::try_from(pid)?)?;
    Ok(Path::new(&group).file_name().context("No group")?.to_string_lossy().into_owned())
}

fn worker(vgpud: &Vgpud, uuid: &str) -> Result<u64> {
    vgpud.show(uuid)?["pid"].as_u64().context("No worker")
}

#[test]
fn each_worker_and_gpu_process_has_a_group_of_its_own() -> Result<()> {
    let delegated = match Delegated::new() {
        Ok(delegated) => delegated,
        Err(reason) => {
            skipped(&format!("no control group can be made: {reason:#}"));
            return Ok(());
        }
    };
    let mut vgpud = Vgpud::start_in_cgroup(&delegated.0.join("manager"))?;
    let request = json!({ "mdev_type": "SOFT-256MQ", "run": true });
    let (first, second) = (vgpud.create(&request)?, vgpud.create(&request)?);
    let name = |uuid: &str| format!("worker-{uuid}");
    let context = |uuid: &str| format!("context-{uuid}");
    for uuid in [&first, &second] {
        assert_eq!(name_of_group(worker(&vgpud, uuid)?)?, name(uuid));
        assert_eq!(name_of_group(vgpud.context(uuid)?.into())?, context(uuid));
    }
    let mut all = vec!["gpu-soft0".to_owned(), "manager".into()];
    all.extend([&first, &second].into_iter().flat_map(|uuid| [name(uuid), context(uuid)]));
    all.sort();
    assert_eq!(delegated.groups()?, all);
    for pid in vgpud.roles() {
        assert_ne!(name_of_group(pid.into())?, "manager");
    }
    let controllers = fs::read_to_string(delegated.0.join("cgroup.controllers"))?;
    for (controller, file, limit) in [("pids", "pids.max", 64), ("memory", "memory.max", 768 << 20)]
    {
        if !controllers.split_whitespace().any(|one| one == controller) {
            skipped(&format!("this cgroup v2 has no controller {controller:?}"));
            continue;
        }
        let set = fs::read_to_string(delegated.0.join(name(&first)).join(file))?;
        assert_eq!(set.trim(), limit.to_string(), "{file}");
    }

    // A worker that is started again is in the group of its vGPU.
    let before = worker(&vgpud, &first)?;
    kill_process(u32::try_from(before)?, Signal::SIGKILL)?;
    wait_for("another worker", || worker(&vgpud, &first).is_ok_and(|pid| pid != before))?;
    let again = worker(&vgpud, &first)?;
    wait_for("its group", || name_of_group(again).is_ok_and(|group| group == name(&first)))?;

    // A vGPU that ends while there is no manager, and one that is stopped.
    vgpud.end(Signal::SIGUSR1)?;
    vgpud.start_again()?;
    assert_eq!(delegated.groups()?, all, "adopted");
    vgpud.call("POST", &format!("/v1/vgpus/{second}/stop"), None)?;
    all.retain(|group| !group.ends_with(&second));
    wait_for("the group of a stopped vGPU is removed", || {
        delegated.groups().is_ok_and(|groups| groups == all)
    })?;
    vgpud.end(Signal::SIGTERM)?;
    assert_eq!(delegated.groups()?, ["manager"]);
    Ok(())
}
