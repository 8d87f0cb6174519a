//! What a client makes its worker log is limited.

// Clippy recognizes only functions marked as tests, not the functions that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use anyhow::{Result, ensure};
use mdev_core::abi::control::reg;
use mdev_core::abi::mailbox::{Header, MapGuest, Opcode, PAYLOAD, Scatter, VA_START};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::json;
use system_tests::raw_client::{DMA_MAP, RawClient};
use system_tests::{Vgpud, bytes};
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
