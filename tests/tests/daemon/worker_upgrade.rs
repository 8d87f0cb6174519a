//! Workers that are replaced by workers of another program, under VMs that do not notice.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ipc::seqpacket::SeqPacket;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::raw_client::RawClient;
use system_tests::vcpu::Vcpu;
use system_tests::vgpuctl::vgpuctl_json;
use system_tests::worker_deaths::worker;
use system_tests::{Vgpud, is_alive, kill_process, wait_for};
use vgpud::service::upgrading::program_in_memory;
use vgpud::worker::journal::descriptors::{Key, Message};
use vgpud::worker_client::pass_program;

use crate::replacement::{wake, wake_until};

/// Upgrades while the VM makes accesses.
const UPGRADES: u32 = 100;

pub(super) fn start(vgpud: &Vgpud) -> Result<String> {
    vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }))
}

/// Returns whether a process runs a program that a manager has passed. Only root may see that; for
/// other users, the answer is `expected`.
pub(super) fn is_passed(pid: u32, expected: bool) -> Result<bool> {
    match fs::read_link(format!("/proc/{pid}/exe")) {
        Ok(path) => Ok(path.to_string_lossy().starts_with("/memfd:vgpud")),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(expected),
        Err(error) => Err(error.into()),
    }
}

pub(super) fn upgrade(vgpud: &Vgpud, vgpu: Option<&str>) -> Result<Value> {
    let command = format!("upgrade {} --output json", vgpu.unwrap_or_default());
    vgpuctl_json(vgpud, &command.replace("  ", " "))
}

/// Upgrades a vGPU's worker, [`UPGRADES`] times.
fn upgrade_often(vgpud: &Vgpud, uuid: &str) -> Result<()> {
    for number in 0..UPGRADES {
        thread::sleep(Duration::from_millis(u64::from(number * 7 % 20)));
        let before = worker(vgpud, uuid)?;
        let upgraded = &upgrade(vgpud, Some(uuid).filter(|_| number > 0))?[0];
        let after = worker(vgpud, uuid)?;
        ensure!(upgraded["pid_before"] == before && upgraded["pid"] == after, "{upgraded}");
        ensure!(before != after && !is_alive(before) && is_alive(after), "{upgraded}");
    }
    Ok(())
}

#[test]
fn a_vm_does_not_notice_that_its_worker_is_upgraded() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud)?;
    let first = worker(&vgpud, &uuid)?;
    let mut vcpu = Vcpu::new(RawClient::attach(&vgpud.vfio_socket(&uuid)));
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let guest = scope.spawn(|| wake_until(&mut vcpu, &stop));
        let upgraded = upgrade_often(&vgpud, &uuid);
        stop.store(true, Ordering::Relaxed);
        guest.join().ok().context("The VM saw a wrong effect")?;
        upgraded
    })?;
    assert!(!is_passed(vgpud.anchor(&uuid)?, false)?);
    let last = worker(&vgpud, &uuid)?;
    assert!(first != last && is_passed(last, true)?);
    // A worker that dies later is followed by one of the new program.
    let counted = wake(&mut vcpu);
    kill_process(last, Signal::SIGKILL)?;
    assert_eq!(wake(&mut vcpu), counted + 1);
    wait_for("another worker of the new program", || {
        worker(&vgpud, &uuid)
            .is_ok_and(|pid| pid != last && is_passed(pid, true).is_ok_and(|passed| passed))
    })
}

#[test]
fn a_program_that_cannot_continue_leaves_the_vm_with_the_one_before() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud)?;
    let mut vcpu = Vcpu::new(RawClient::attach(&vgpud.vfio_socket(&uuid)));
    let socket = vgpud.vfio_socket(&uuid).with_file_name("upgrade.sock");
    let no_program = tempfile::tempfile()?;
    for (number, broken) in
        [program_in_memory(Path::new("/bin/false"))?, no_program.into()].into_iter().enumerate()
    {
        let taken = pass_program(&socket, broken.as_fd())?;
        let before = worker(&vgpud, &uuid)?;
        kill_process(before, Signal::SIGKILL)?;
        assert!(!taken.works()?, "program {number}");
        assert_eq!(wake(&mut vcpu), u32::try_from(number)? + 1);
        assert!(!is_passed(worker(&vgpud, &uuid)?, false)?);
    }
    // A packet without a program is no program.
    let packet = Message::Keep(Key::SESSION).encode();
    let connection = SeqPacket::connect(&socket)?;
    connection.send(&packet, &[tempfile::tempfile()?.as_fd()])?;
    assert!(connection.recv(&mut [0; 64])?.is_none());
    assert_eq!(upgrade(&vgpud, Some(&uuid))?[0]["vgpu"], uuid.as_str());
    assert_eq!(wake(&mut vcpu), 3);
    Ok(())
}
