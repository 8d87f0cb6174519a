//! The manager does not wait for a process that does not end although it was killed.
//!
//! A process that waits in the kernel, for a device or a file system, is such a process. Here a
//! tracer holds the process in its exit, which is as far as SIGKILL brings it.

// Clippy recognizes only functions marked as tests, not the functions that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::{Value, json};
use system_tests::{Vgpud, is_alive, kill_process, skipped, wait_for};

/// A process that does not end before this is dropped.
struct Held(Pid);

impl Held {
    /// Holds a process, or returns `None` where tracing is not permitted.
    fn new(pid: &Value) -> Result<Option<Self>> {
        let pid = Pid::from_raw(i32::try_from(pid.as_i64().context("The process has ended")?)?);
        match ptrace::seize(pid, Options::PTRACE_O_TRACEEXIT) {
            Ok(()) => Ok(Some(Self(pid))),
            Err(error) => {
                skipped(&format!("processes cannot be traced here: {error}"));
                Ok(None)
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // The process is stopped in its exit, or in the delivery of a signal, and continues to its
        // end.
        while is_alive(self.0.as_raw().cast_unsigned()) && ptrace::detach(self.0, None).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn worker_that_cannot_be_killed_costs_its_own_vgpu_only() -> Result<()> {
    let vgpud = Vgpud::start_with(&["--parent", "soft:soft0,vram=512M"])?;
    let request = json!({ "mdev_type": "SOFT-256MC", "run": true });
    let (stuck, other) = (vgpud.create(&request)?, vgpud.create(&request)?);
    ensure!(vgpud.refused("POST", "/v1/vgpus", Some(&request))?.0 == 409, "there is no room");
    let pid = vgpud.show(&stuck)?["pid"].clone();
    let Some(held) = Held::new(&pid)? else { return Ok(()) };
    let over = AtomicBool::new(false);
    let stop = || {
        vgpud.refused("POST", &format!("/v1/vgpus/{stuck}/stop"), Some(&json!({ "force": true })))
    };
    let (refusal, longest) = std::thread::scope(|scope| -> Result<_> {
        let asked = scope.spawn(|| -> Result<Duration> {
            let mut longest = Duration::ZERO;
            while !over.load(Ordering::Relaxed) {
                let begun = Instant::now();
                vgpud.get("/v1/schedulers")?;
                longest = longest.max(begun.elapsed());
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok(longest)
        });
        let refusal = stop();
        over.store(true, Ordering::Relaxed);
        Ok((refusal?, asked.join().expect("the thread has panicked")?))
    })?;
    ensure!(refusal.0 == 503 && refusal.2.contains("was killed and does not end"), "{refusal:?}");
    ensure!(longest < Duration::from_secs(2), "another request took {longest:?}");
    let shown = vgpud.show(&stuck)?;
    ensure!(shown["state"] == "failed" && shown["reason"].to_string().contains("does not end"));
    let start = format!("/v1/vgpus/{stuck}/start");
    let again = vgpud.refused("POST", &start, Some(&json!({})))?;
    ensure!(again.0 == 409 && again.2.contains("cannot be started yet: "), "{again:?}");
    // Its place has come back, and a repetition is answered at once.
    vgpud.create(&request).context("The place of the vGPU")?;
    ensure!(stop()?.0 == 503);
    ensure!(is_alive(u32::try_from(pid.as_u64().context("no worker")?)?), "the test holds it");
    drop(held);
    wait_for("the vGPU is removed", || vgpud.show(&stuck).is_err())?;
    ensure!(vgpud.show(&other)?["state"] == "running");
    Ok(())
}

#[test]
fn manager_ends_although_a_worker_cannot_be_killed() -> Result<()> {
    let mut vgpud = Vgpud::start()?;
    let stuck = vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }))?;
    let Some(_held) = Held::new(&vgpud.show(&stuck)?["pid"])? else { return Ok(()) };
    vgpud.end(Signal::SIGTERM).context("The manager waits for its worker")?;
    Ok(())
}

#[test]
fn gpu_process_that_cannot_be_killed_is_replaced() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let request = json!({ "mdev_type": "SOFT-256MC", "run": true });
    vgpud.create(&request)?;
    let gpu = vgpud.get("/v1/parents")?[0]["pid"].clone();
    let Some(_held) = Held::new(&gpu)? else { return Ok(()) };
    kill_process(u32::try_from(gpu.as_u64().context("no GPU process")?)?, Signal::SIGKILL)?;
    wait_for("another GPU process", || {
        vgpud
            .get("/v1/parents")
            .is_ok_and(|parents| parents[0]["state"] == "ready" && parents[0]["pid"] != gpu)
    })?;
    vgpud.create(&request).context("A vGPU on the new GPU")?;
    Ok(())
}
