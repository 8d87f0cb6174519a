//! Deaths of workers.

use anyhow::{Context, Result, ensure};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::{Vgpud, is_alive, kill_process, wait_for};

/// Returns the process of a running vGPU's worker.
///
/// # Errors
///
/// Fails if the vGPU does not run.
pub fn worker(vgpud: &Vgpud, uuid: &str) -> Result<u32> {
    let vgpu = vgpud.show(uuid)?;
    ensure!(vgpu["state"] == "running", "{vgpu}");
    Ok(u32::try_from(vgpu["pid"].as_u64().context("A worker")?)?)
}

/// Kills the worker of a vGPU and waits for the next.
///
/// # Errors
///
/// Fails if there is no other worker in time.
pub fn replace(vgpud: &Vgpud, uuid: &str) -> Result<()> {
    let before = worker(vgpud, uuid)?;
    kill_process(before, Signal::SIGKILL)?;
    let anchor = vgpud.anchor(uuid)?;
    wait_for("another worker runs", || {
        worker(vgpud, uuid).is_ok_and(|pid| pid != before && pid != anchor && is_alive(pid))
    })
}

/// Where a worker dies.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// At a stop: before or after one of its next system calls.
    Stop(u32),
    /// Before or after it removes finished messages from the socket.
    Removal {
        /// After it.
        after: bool,
    },
}

/// Kills a process at a place of one of its threads, which this thread traces (`PTRACE_SEIZE`).
///
/// # Errors
///
/// Fails if the thread cannot be traced.
pub fn kill_at(pid: u32, thread: u32, place: Place) -> Result<()> {
    let process = Pid::from_raw(thread.cast_signed());
    let wait = || waitpid(process, Some(WaitPidFlag::__WALL));
    // Returns false if the process has ended.
    let next = || -> Result<bool> {
        ptrace::syscall(process, None)?;
        Ok(!matches!(wait()?, WaitStatus::Exited(..) | WaitStatus::Signaled(..)))
    };
    ptrace::interrupt(process)?;
    wait()?;
    match place {
        Place::Stop(stop) => {
            for _ in 0..stop {
                if !next()? {
                    return Ok(());
                }
            }
        }
        Place::Removal { after } => {
            // The first stop at a call is before it.
            while ptrace::getregs(process)?.orig_rax != libc::SYS_recvfrom as u64 {
                ensure!(next()?, "the worker has died early");
            }
            if after {
                next()?;
            }
        }
    }
    kill_process(pid, Signal::SIGKILL)?;
    while !matches!(wait(), Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)) | Err(_)) {}
    Ok(())
}
