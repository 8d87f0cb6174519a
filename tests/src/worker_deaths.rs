//! Deaths of workers.

use std::fs;

use anyhow::{Context, Result, ensure};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use vgpud::worker_client;

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
/// Looks at the anchor's children: questions to the manager would take time of the CPUs from VMs.
///
/// # Errors
///
/// Fails if there is no other worker in time.
pub fn replace(vgpud: &Vgpud, uuid: &str) -> Result<()> {
    let anchor = vgpud.anchor(uuid)?;
    let before = child(anchor)?.context("A worker")?;
    kill_process(before, Signal::SIGKILL)?;
    wait_for("another worker runs", || {
        child(anchor).is_ok_and(|pid| pid.is_some_and(|pid| pid != before && is_alive(pid)))
    })
}

/// Waits until the worker of a vGPU answers: it has adopted what the one before has left.
///
/// An anchor gives up after several workers in a row that die before they work. Where workers are
/// killed all the time, most of them have to get there, however busy the host is.
///
/// # Errors
///
/// Fails if the worker does not answer in time.
pub fn wait_until_it_works(vgpud: &Vgpud, uuid: &str) -> Result<()> {
    let control = vgpud.vgpu_dir(uuid).join("control.sock");
    worker_client::patient_status(&control).map(drop).context("The worker does not answer")
}

/// Kills the worker of a vGPU, the `number`th one, and waits for the next. Of four, three get to
/// work, and one can be killed while it adopts.
///
/// # Errors
///
/// Fails if there is no other worker in time.
pub fn replace_again(vgpud: &Vgpud, uuid: &str, number: u32) -> Result<()> {
    replace(vgpud, uuid)?;
    if number.is_multiple_of(4) { Ok(()) } else { wait_until_it_works(vgpud, uuid) }
}

/// Returns the only child of a process with one thread, if any.
fn child(parent: u32) -> Result<Option<u32>> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"))?;
    Ok(children.split_whitespace().next().map(str::parse).transpose()?)
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

/// Returns whether a traced thread is at a call that receives, and does not peek.
fn removes(thread: Pid) -> Result<bool> {
    let registers = ptrace::getregs(thread)?;
    let flags = registers.rdx as libc::c_int;
    Ok(registers.orig_rax == libc::SYS_recvmsg as u64 && flags & libc::MSG_PEEK == 0)
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
            while !removes(process)? {
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
