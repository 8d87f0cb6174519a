//! A lack of resources of the manager refuses a start. The GPU of the running VMs is not taken for
//! lost.

// Clippy recognizes only functions marked as tests, not the functions that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use serde_json::json;
use system_tests::{Vgpud, is_alive};

/// Limits the descriptors of another process.
fn limit_descriptors(pid: u32, limit: u64) -> Result<()> {
    let limit = libc::rlimit { rlim_cur: limit, rlim_max: 4096 };
    // SAFETY: the kernel reads one limit, and writes nothing.
    Errno::result(unsafe {
        libc::prlimit(
            pid.cast_signed(),
            libc::RLIMIT_NOFILE,
            &raw const limit,
            std::ptr::null_mut(),
        )
    })?;
    Ok(())
}

/// Sends a request on an open connection, and returns the status of the answer.
fn post(connection: &mut UnixStream, path: &str, body: &str) -> Result<u16> {
    write!(
        connection,
        "POST {path} HTTP/1.1\r\nHost: vgpud\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = Vec::new();
    let mut byte = [0];
    while !answer.ends_with(b"\r\n\r\n") {
        connection.read_exact(&mut byte)?;
        answer.push(byte[0]);
    }
    let head = String::from_utf8(answer)?.to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length: usize = length.context("The answer has no length")?.trim().parse()?;
    connection.read_exact(&mut vec![0; length])?;
    Ok(head.split(' ').nth(1).context("The answer has no status")?.parse()?)
}

#[test]
fn manager_without_descriptors_refuses_a_start_and_keeps_the_gpu() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let request = json!({ "mdev_type": "SOFT-256MC", "run": true });
    let running = vgpud.create(&request)?;
    let worker = vgpud.show(&running)?["pid"].clone();
    let gpu = vgpud.get("/v1/parents")?[0]["pid"].clone();
    let manager = vgpud.pid().context("The manager has ended")?;
    let mut connection = UnixStream::connect(vgpud.api_socket())?;
    connection.set_read_timeout(Some(Duration::from_secs(20)))?;
    ensure!(post(&mut connection, "/v1/web", "{}")? == 409, "the connection is open");
    let mut refused = 0;
    // With each number of free descriptors, another step of a start lacks one.
    for free in 0..8 {
        // The descriptors of earlier requests are closed meanwhile.
        thread::sleep(Duration::from_millis(100));
        let open = fs::read_dir(format!("/proc/{manager}/fd"))?;
        let numbers = open.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let open: BTreeSet<u64> = numbers.collect();
        // The limit is one of numbers, and some below the last descriptor are free.
        let limit = (0..).filter(|number| !open.contains(number)).nth(free);
        limit_descriptors(manager, limit.context("No number is free")?)?;
        let status = post(&mut connection, "/v1/vgpus", &request.to_string())?;
        ensure!(matches!(status, 201 | 500 | 503), "{free} free: {status}");
        refused += u32::from(status != 201);
    }
    limit_descriptors(manager, 4096)?;
    ensure!(refused > 0, "no start was refused");
    ensure!(vgpud.get("/v1/parents")?[0]["pid"] == gpu, "the GPU was started again");
    ensure!(is_alive(gpu.as_u64().context("no GPU process")? as u32));
    ensure!(vgpud.show(&running)?["pid"] == worker && vgpud.show(&running)?["state"] == "running");
    vgpud.create(&request).context("A start after the shortage")?;
    Ok(())
}
