//! Users and limits of workers. The tests need root; they are skipped otherwise.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::json;
use system_tests::user::User;
use system_tests::{Vgpud, skipped};
use vgpud_host::uid_range::UidRange;

fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        skipped("only root can start workers as other users");
    }
    root
}

/// Starts a vGPU and returns its worker.
fn worker(vgpud: &Vgpud) -> Result<u32> {
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))?;
    let pid = vgpud.show(&uuid)?["pid"].as_u64().context("No worker")?;
    Ok(u32::try_from(pid)?)
}

/// Returns the soft and the hard limit of a process.
fn limit(pid: u32, name: &str) -> Result<(String, String)> {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let line = limits.lines().find_map(|line| line.strip_prefix(name)).context("No limit")?;
    let mut fields = line.split_whitespace().map(str::to_owned);
    Ok((fields.next().unwrap_or_default(), fields.next().unwrap_or_default()))
}

#[test]
fn each_worker_has_a_user_of_its_own_across_managers() -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    let mut vgpud = Vgpud::start_with(&["--worker-user", "62030:62031"])?;
    let mut workers = vec![worker(&vgpud)?, worker(&vgpud)?];
    // Workers that another manager has started are left their users.
    vgpud.end(Signal::SIGKILL)?;
    vgpud.start_again()?;
    workers.extend([worker(&vgpud)?, worker(&vgpud)?]);
    let users = workers.iter().map(|pid| User::of(*pid)).collect::<Result<Vec<_>>>()?;
    let different: BTreeSet<u32> = users.iter().map(|user| user.uid).collect();
    assert_eq!(different.len(), workers.len(), "{users:?}");
    for user in users {
        assert!(UidRange::WORKERS.contains(user.uid), "{user:?}");
        assert_eq!(user.gid, 62_031, "devices may be open to the group");
    }
    Ok(())
}

#[test]
fn a_range_of_users_can_be_chosen_and_used_up() -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    let vgpud = Vgpud::start_with(&["--worker-uids", "2099999990-2099999991"])?;
    let users = [worker(&vgpud)?, worker(&vgpud)?].map(User::of);
    let users = users.into_iter().map(|user| Ok(user?.uid)).collect::<Result<BTreeSet<_>>>()?;
    assert_eq!(users, BTreeSet::from([2_099_999_990, 2_099_999_991]));
    let third = json!({ "mdev_type": "SOFT-256MQ", "run": true });
    let (status, _, message) = vgpud.refused("POST", "/v1/vgpus", Some(&third))?;
    assert_eq!(status, 500);
    let remedy = "give vgpud a longer range by --worker-uids";
    assert!(message.contains(remedy), "{message}");
    Ok(())
}

#[test]
fn workers_can_share_a_user_where_the_operator_says_so() -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    let args = ["--worker-uids", "shared", "--worker-user", "62040:62041"];
    let vgpud = Vgpud::start_with(&args)?;
    for pid in [worker(&vgpud)?, worker(&vgpud)?] {
        let user = User::of(pid)?;
        assert_eq!((user.uid, user.gid), (62_040, 62_041));
    }
    Ok(())
}

#[test]
fn workers_have_limits_and_not_the_managers_protection() -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    let vgpud = Vgpud::start()?;
    let manager = vgpud.pid().context("No manager")?;
    let protection = format!("/proc/{manager}/oom_score_adj");
    if fs::write(protection, "-500").is_err() {
        skipped("this container does not permit a negative oom_score_adj");
    }
    let worker = worker(&vgpud)?;
    let protection = fs::read_to_string(format!("/proc/{worker}/oom_score_adj"))?;
    assert_eq!(protection.trim(), "0", "it is killed before the manager when memory runs out");
    let both = |limit: &str| (limit.to_owned(), limit.to_owned());
    assert_eq!(limit(worker, "Max processes")?, both("64"));
    assert_eq!(limit(worker, "Max locked memory")?, both("0"));
    assert_eq!(limit(worker, "Max core file size")?, both("0"));
    Ok(())
}
