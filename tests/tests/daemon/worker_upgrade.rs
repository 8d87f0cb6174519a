//! Workers that are replaced by workers of another program, under VMs that do not notice.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mdev_core::abi::control::reg;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::raw_client::{REGION_READ, REGION_WRITE, RawClient};
use system_tests::vcpu::Vcpu;
use system_tests::vgpuctl::vgpuctl_json;
use system_tests::{Vgpud, bytes, is_alive, kill_process, wait_for};
use vendor_backends::seqpacket::SeqPacket;
use vgpud::worker::journal::kept::{Key, Message};
use vgpud::worker_client::pass_program;

/// Upgrades while the VM makes accesses.
const UPGRADES: u32 = 100;
/// Control registers.
const CONTROL: u32 = 3;

fn start(vgpud: &Vgpud) -> Result<String> {
    vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }))
}

fn worker(vgpud: &Vgpud, uuid: &str) -> Result<u32> {
    Ok(u32::try_from(vgpud.show(uuid)?["pid"].as_u64().context("A worker")?)?)
}

/// Returns whether a process runs a program that a manager has passed. Only root may see that; for
/// other users, the answer is `expected`.
fn is_passed(pid: u32, expected: bool) -> Result<bool> {
    match fs::read_link(format!("/proc/{pid}/exe")) {
        Ok(path) => Ok(path.to_string_lossy().starts_with("/memfd:vgpud")),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(expected),
        Err(error) => Err(error.into()),
    }
}

fn upgrade(vgpud: &Vgpud, vgpu: Option<&str>) -> Result<Value> {
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

/// Counts an access and returns the number of accesses that the device has counted.
fn count(vcpu: &mut Vcpu) -> u32 {
    vcpu.access(REGION_WRITE, &bytes![reg::WAKE, CONTROL, 4_u32, 0_u32]);
    let data = vcpu.access(REGION_READ, &bytes![reg::TRAPPED_DOORBELLS, CONTROL, 4_u32]);
    u32::from_ne_bytes(data[16..20].try_into().unwrap())
}

/// Returns a file in memory with a program.
fn in_memory(path: &str) -> Result<File> {
    let mut copy = File::from(memfd_create("program", MFdFlags::MFD_CLOEXEC)?);
    io::copy(&mut File::open(path)?, &mut copy)?;
    // A program that is open for writing cannot be run.
    Ok(File::open(format!("/proc/self/fd/{}", copy.as_raw_fd()))?)
}

#[test]
fn a_vm_does_not_notice_that_its_worker_is_upgraded() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud)?;
    let first = worker(&vgpud, &uuid)?;
    let mut vcpu = Vcpu::new(RawClient::attach(&vgpud.vfio_socket(&uuid)));
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let guest = scope.spawn(|| {
            for expected in 1.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                assert_eq!(count(&mut vcpu), expected, "accesses that were counted");
            }
        });
        let upgraded = upgrade_often(&vgpud, &uuid);
        stop.store(true, Ordering::Relaxed);
        guest.join().ok().context("The VM saw a wrong effect")?;
        upgraded
    })?;
    assert!(!is_passed(vgpud.anchor(&uuid)?, false)?);
    let last = worker(&vgpud, &uuid)?;
    assert!(first != last && is_passed(last, true)?);
    // A worker that dies later is followed by one of the new program.
    let counted = count(&mut vcpu);
    kill_process(last, Signal::SIGKILL)?;
    assert_eq!(count(&mut vcpu), counted + 1);
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
    for (number, broken) in [in_memory("/bin/false")?, no_program].into_iter().enumerate() {
        let taken = pass_program(&socket, broken.as_fd())?;
        let before = worker(&vgpud, &uuid)?;
        kill_process(before, Signal::SIGKILL)?;
        assert!(!taken.works()?, "program {number}");
        assert_eq!(count(&mut vcpu), u32::try_from(number)? + 1);
        assert!(!is_passed(worker(&vgpud, &uuid)?, false)?);
    }
    // A packet without a program is no program.
    let packet = Message::Keep(Key::SESSION).encode();
    let connection = SeqPacket::connect(&socket)?;
    connection.send(&packet, &[tempfile::tempfile()?.as_fd()])?;
    assert!(connection.recv(&mut [0; 64])?.is_none());
    assert_eq!(upgrade(&vgpud, Some(&uuid))?[0]["vgpu"], uuid.as_str());
    assert_eq!(count(&mut vcpu), 3);
    Ok(())
}
