//! What a client makes its worker and the manager log is limited, and what a worker that was taken
//! over writes.

// Clippy recognizes only functions marked as tests, not the functions that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Instant;

use anyhow::{Result, ensure};
use mdev_core::abi::control::reg;
use mdev_core::abi::mailbox::{Header, MapGuest, Opcode, PAYLOAD, Scatter, VA_START};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::json;
use system_tests::raw_client::{DMA_MAP, RawClient};
use system_tests::{Vgpud, bytes, wait_for};
use zerocopy::IntoBytes;

const CONTROL: u32 = 3;
const CONFIG: u32 = 7;
const PAGE: u64 = 4096;
const SEALED: u64 = 1 << 33;

/// Requests that fail, and lines that the log may have of them.
const REQUESTS: usize = 500;
const MAX_LINES: usize = 60;

fn memory() -> Result<(File, OwnedFd)> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let fd = memfd_create(c"guest", flags)?;
    let file = File::from(fd.try_clone()?);
    file.set_len(PAGE)?;
    Ok((file, fd))
}

fn map(address: u64) -> Vec<u8> {
    bytes![32_u32, 3_u32, 0_u64, address, PAGE]
}

#[test]
fn requests_that_fail_on_the_host_do_not_flood_the_log() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let log = folder.path().join("log");
    let vgpud = Vgpud::start_with_log(&[], &log)?;
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }))?;
    let mut client = RawClient::attach(&vgpud.vfio_socket(&uuid));
    let ((page, ram), (_, sealed)) = (memory()?, memory()?);
    client.ok_with(DMA_MAP, &map(0), &[&ram]);
    client.ok_with(DMA_MAP, &map(SEALED), &[&sealed]);
    // The GPU can no longer map this memory for writing.
    fcntl(&sealed, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_FUTURE_WRITE))?;
    client.write(CONFIG, 4, &[6, 0]);
    client.write(CONTROL, reg::MAILBOX_LO, &[0; 4]);
    let list = MapGuest { va: VA_START, flags: 0, count: 1 };
    let payload = [list.as_bytes(), Scatter { address: SEALED, length: PAGE }.as_bytes()].concat();
    let request_bytes = payload.len() as u32;
    let header = Header { opcode: Opcode::MapGuest as u32, request_bytes, ..Header::default() };
    for _ in 0..REQUESTS {
        page.write_all_at(header.as_bytes(), 0)?;
        page.write_all_at(&payload, PAYLOAD as u64)?;
        client.write(CONTROL, reg::MAILBOX_DOORBELL, &[1, 0, 0, 0]);
    }
    let lines = fs::read_to_string(&log)?.lines().count();
    ensure!(lines <= MAX_LINES, "{lines} lines of {REQUESTS} requests");
    Ok(())
}

/// No process that a tenant may take over has the log, or what another one writes to.
#[test]
fn no_process_has_the_log_of_another() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let log = folder.path().join("log");
    let vgpud = Vgpud::start_with_log(&[], &log)?;
    let create = || vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }));
    let uuids = [create()?, create()?];
    let (mut errors, mut expected) = (vec![log], 1);
    let mut add = |pid: u32| {
        let error = fs::read_link(format!("/proc/{pid}/fd/2"));
        match error {
            Ok(error) => errors.push(error),
            Err(_) => eprintln!("skipped: only root sees the files of process {pid}"),
        }
    };
    add(vgpud.gpu_process()?);
    for uuid in &uuids {
        add(vgpud.context(uuid)?);
        add(vgpud.anchor(uuid)?);
    }
    expected += errors.len() - 1;
    errors.sort();
    errors.dedup();
    assert_eq!(errors.len(), expected, "{errors:?}");
    Ok(())
}

/// A process that was taken over writes anything, as fast as it can.
#[test]
fn a_process_can_neither_forge_nor_flood_the_log() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let log = folder.path().join("log");
    let vgpud = Vgpud::start_with_log(&[], &log)?;
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }))?;
    let mut flags = OpenOptions::new();
    let fifo = vgpud.vgpu_dir(&uuid).join("worker.log");
    let mut process = flags.write(true).custom_flags(libc::O_NONBLOCK).open(fifo)?;
    process.write_all(b"INFO vgpud::api::access User 0: \x1b[2J\"POST /v1/stop\"\n")?;
    let text = || fs::read_to_string(&log).unwrap_or_default();
    let expected = format!("worker of vGPU {uuid}: User 0: ");
    wait_for("the line is logged", || text().contains(&expected))?;
    assert!(!text().contains('\u{1b}'));
    // More than the manager reads, until the process is told so.
    let line = [b"ERROR a::b ", &[b'x'; 1000][..], b"\n"].concat();
    let (mut written, mut refused) = (0, 0);
    while written < 500 {
        // A line shorter than PIPE_BUF is written whole, or not at all.
        if process.write_all(&line).is_ok() {
            written += 1;
        } else {
            refused += 1;
            vgpud.get("/v1/version")?;
        }
    }
    assert!(refused > 0, "it is told to wait");
    wait_for("lines are suppressed", || text().matches(" xxx").count() >= 150)?;
    drop(process);
    let lines = text().lines().count();
    ensure!(lines < 300, "{lines} lines");
    Ok(())
}

#[test]
fn a_client_that_comes_and_goes_does_not_flood_the_manager_s_log() -> Result<()> {
    const TIMES: usize = 200;
    let folder = tempfile::tempdir()?;
    let log = folder.path().join("log");
    let vgpud = Vgpud::start_with_log(&[], &log)?;
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }))?;
    let begun = Instant::now();
    let is_used = |used| vgpud.show(&uuid).is_ok_and(|vgpu| vgpu["vm"].is_null() != used);
    for _ in 0..TIMES {
        let client = RawClient::attach(&vgpud.vfio_socket(&uuid));
        wait_for("the manager sees the client", || is_used(true))?;
        drop(client);
        wait_for("the manager sees that it has left", || is_used(false))?;
    }
    let text = fs::read_to_string(&log)?;
    let lines = text.lines().filter(|line| line.contains(" use ")).count();
    // Ten lines in ten seconds, of the 2 lines for each time.
    let most = 10 * (2 + begun.elapsed().as_secs() as usize / 10);
    ensure!(most < 2 * TIMES, "too slow a machine to tell");
    ensure!(lines <= most && lines > 1, "{lines} lines instead of {most}");
    Ok(())
}
