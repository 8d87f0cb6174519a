//! QEMU's own stream of a VM, by a pipe.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use mdev_core::stream::{MAX_CHUNK, Part};
use serde_json::{Value, json};

use super::monitor::{Monitor, failed};
use crate::commands::saving;
use crate::failure::Failure;

/// Name of the pipe that QEMU reads or writes.
const PIPE: &str = "vgpuctl-vm";
/// Longest time for QEMU to save or restore a VM, after the last byte.
const LIMIT: Duration = Duration::from_secs(60);
/// Status of a transfer that has succeeded, and of all that have ended (QMP's `MigrationStatus`).
const COMPLETED: &str = "completed";
pub const ENDS: [&str; 3] = [COMPLETED, "failed", "cancelled"];
/// Interval of questions.
const INTERVAL: Duration = Duration::from_millis(5);

/// Lets QEMU write the VM, and calls `write` with its bytes.
pub fn send_machine(
    monitor: &mut Monitor,
    write: impl FnMut(&[u8]) -> io::Result<()>,
) -> Result<(), Failure> {
    let from = begin_send(monitor)?;
    let copied = copy(from, write);
    let completed = wait_completed(monitor);
    // QEMU then only knows that the pipe broke.
    copied.map_err(|error| failed(&error)).and(completed)
}

/// Lets QEMU begin to write the VM, and returns where.
pub fn begin_send(monitor: &mut Monitor) -> Result<PipeReader, Failure> {
    let (from, into) = pipe()?;
    monitor.pass_descriptor(PIPE, into.into())?;
    monitor.execute("migrate", &json!({ "uri": format!("fd:{PIPE}") }))?;
    Ok(from)
}

/// Lets QEMU begin to read a VM, and returns where.
pub fn begin_receive(monitor: &mut Monitor) -> Result<PipeWriter, Failure> {
    let (from, into) = pipe()?;
    monitor.pass_descriptor(PIPE, from.into())?;
    // Otherwise QEMU would end at an error, and its reason would be lost.
    let from = json!({ "uri": format!("fd:{PIPE}"), "exit-on-error": false });
    monitor.execute("migrate-incoming", &from)?;
    Ok(into)
}

/// Lets QEMU read the VM in a file.
pub fn receive_machine(monitor: &mut Monitor, file: &Path) -> Result<(), Failure> {
    let mut into = begin_receive(monitor)?;
    let file = file.to_owned();
    let writer = thread::spawn(move || -> Result<(), Failure> {
        let (mut stream, _) = saving::open(&file)?;
        loop {
            match stream.next_part().map_err(|error| failed(&error))? {
                Part::Machine(data) => into.write_all(data).map_err(|error| failed(&error))?,
                Part::End => return Ok(()),
                Part::State(_)
                | Part::Guest { .. }
                | Part::Memory { .. }
                | Part::Next(_)
                | Part::Domain(_) => {}
            }
        }
    });
    let completed = wait_completed(monitor);
    let written = writer.join().unwrap_or_else(|_| Err(failed(&"The file was not read")));
    // QEMU's reason says more than that the pipe broke.
    completed.and(written)
}

fn pipe() -> Result<(PipeReader, PipeWriter), Failure> {
    io::pipe().map_err(|error| Failure::Local(format!("Cannot make a pipe: {error}")))
}

/// Calls `write` with all that comes out of a pipe.
pub fn copy(
    mut from: PipeReader,
    mut write: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut buffer = vec![0; MAX_CHUNK];
    let mut filled = 0;
    loop {
        let read = from.read(&mut buffer[filled..])?;
        filled += read;
        if filled == buffer.len() || read == 0 {
            if filled > 0 {
                write(&buffer[..filled])?;
            }
            filled = 0;
        }
        if read == 0 {
            return Ok(());
        }
    }
}

/// Waits until QEMU has saved or restored the VM.
pub fn wait_completed(monitor: &mut Monitor) -> Result<(), Failure> {
    check_completed(wait_transfer(monitor, LIMIT, is_end)?)
}

/// Waits until QEMU has restored a VM that arrives at any speed. `has_arrived` tells when its last
/// byte has.
pub fn wait_received(monitor: &mut Monitor, has_arrived: impl Fn() -> bool) -> Result<(), Failure> {
    while !has_arrived() {
        let state = wait_transfer(monitor, INTERVAL * 20, is_end)?;
        if state.is_some() {
            return check_completed(state);
        }
    }
    wait_completed(monitor)
}

fn is_end(status: Option<&str>) -> bool {
    status.is_some_and(|it| ENDS.contains(&it))
}

/// Returns the failure of a transfer that has ended, if it has not succeeded.
fn check_completed(state: Option<Value>) -> Result<(), Failure> {
    let Some(state) = state else {
        return Err(Failure::Local("QEMU did not finish in time".to_owned()));
    };
    if state["status"] == COMPLETED {
        return Ok(());
    }
    let reason = state["error-desc"].as_str().unwrap_or("no reason is known");
    Err(Failure::Local(format!("QEMU failed: {reason}")))
}

/// Waits for a status of QEMU's transfer, which is `None` before the first one. Returns its state,
/// or `None` after `limit`.
pub fn wait_transfer(
    monitor: &mut Monitor,
    limit: Duration,
    mut is_awaited: impl FnMut(Option<&str>) -> bool,
) -> Result<Option<Value>, Failure> {
    let deadline = Instant::now() + limit;
    loop {
        let state = monitor.execute("query-migrate", &json!({}))?;
        if is_awaited(state["status"].as_str()) {
            return Ok(Some(state));
        }
        if Instant::now() > deadline {
            return Ok(None);
        }
        thread::sleep(INTERVAL);
    }
}
