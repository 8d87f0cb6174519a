//! A process by its pidfd: signals, bounded waits, and its end without a wait.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use mdev_core::untrusted::{TABLE, VALUE, read_text};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

/// Limit of the time that a killed process takes to end. One that waits in the kernel for a device
/// or a file system takes longer, and is left.
pub const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// Process, identified by its pidfd: a signal never reaches another process that reused its number.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: OwnedFd,
    child: Option<Child>,
}

/// Record of a process for the next manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// Process ID.
    pub pid: u32,
    /// Start time in clock ticks since boot. Tells the process from a later one with the same
    /// number.
    pub start_ticks: u64,
}

impl Process {
    /// Takes a child of this process.
    pub fn of_child(child: Child) -> io::Result<Self> {
        let pid = child.id();
        Ok(Self { pid, pidfd: open_pidfd(pid)?, child: Some(child) })
    }

    /// Returns another handle of the process, without its exit status.
    pub fn another(&self) -> io::Result<Self> {
        Ok(Self { pid: self.pid, pidfd: self.pidfd.try_clone()?, child: None })
    }

    /// Takes a running process.
    pub fn find_running(pid: u32) -> io::Result<Self> {
        Ok(Self { pid, pidfd: open_pidfd(pid)?, child: None })
    }

    /// Finds a recorded process. Returns `None` if it has ended.
    pub fn find(record: ProcessRecord) -> Option<Self> {
        let pidfd = open_pidfd(record.pid).ok()?;
        // The start time is read after the pidfd is open, so that both are of one process.
        let found = Self { pid: record.pid, pidfd, child: None };
        (found.record().ok()? == record && !found.has_ended()).then_some(found)
    }

    /// Returns the record by which [`Process::find`] finds the process.
    pub fn record(&self) -> io::Result<ProcessRecord> {
        let stat = read_text(Path::new(&format!("/proc/{}/stat", self.pid)), VALUE)?;
        // The second field is the name in brackets and may hold anything, so fields are counted
        // from its end.
        let start_ticks = stat
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.split_whitespace().nth(19))
            .and_then(|field| field.parse().ok())
            .ok_or_else(|| io::Error::other("Unexpected format of /proc/PID/stat"))?;
        Ok(ProcessRecord { pid: self.pid, start_ticks })
    }

    /// Returns the process ID.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Opens the kernel's count of the delays of the main thread.
    ///
    /// # Errors
    ///
    /// Fails if the process has ended, or the kernel does not count.
    pub fn schedstat(&self) -> io::Result<OwnedFd> {
        let file = File::open(format!("/proc/{}/schedstat", self.pid))?;
        // A process that still runs has this number, and has had it before.
        if self.has_ended() {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(file.into())
    }

    /// Returns the child process that the process has started last.
    pub fn child(&self) -> Option<u32> {
        let path = format!("/proc/{0}/task/{0}/children", self.pid);
        let children = read_text(Path::new(&path), TABLE).ok()?;
        children.split_whitespace().next_back()?.parse().ok()
    }

    /// Returns a descriptor that becomes readable when the process ends.
    pub fn watch(&self) -> io::Result<OwnedFd> {
        self.pidfd.try_clone()
    }

    /// Sends a signal. A process that has ended is no error.
    pub fn signal(&self, signal: Signal) {
        // SAFETY: plain system call with a null pointer, which it accepts.
        let done = Errno::result(unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.pidfd.as_raw_fd(),
                signal as libc::c_int,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        });
        if let Err(error) = done
            && error != Errno::ESRCH
        {
            log::warn!("Cannot send {signal} to process {}: {error}", self.pid);
        }
    }

    /// Returns true once the process has ended.
    pub fn has_ended(&self) -> bool {
        self.wait(Duration::ZERO)
    }

    /// Waits for the end of the process. Returns false after `limit`.
    pub fn wait(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)], timeout) {
                Ok(0) if left.is_zero() => return false,
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return true,
                Err(_) => return false,
            }
        }
    }

    /// Waits for the end of the process, kills it after `timeout`, and leaves it after
    /// [`KILL_TIMEOUT`]. Returns the exit status of a child of this process, if it has ended.
    pub fn end(mut self, timeout: Duration) -> Option<String> {
        if !self.wait(timeout) {
            self.signal(Signal::SIGKILL);
            if !self.wait(KILL_TIMEOUT) {
                self.report_unkillable();
            }
        }
        let status = self.status();
        self.leave();
        status
    }

    /// Kills the process without waiting for its end.
    pub fn kill(self) {
        self.signal(Signal::SIGKILL);
        self.leave();
    }

    /// Logs that the process was killed and does not end.
    pub fn report_unkillable(&self) {
        log::error!("Process {} was killed and does not end; it waits in the kernel", self.pid);
    }

    /// Returns the exit status of a child of this process as text, if the child has ended. Never
    /// waits.
    pub fn status(&mut self) -> Option<String> {
        self.child.as_mut()?.try_wait().ok()?.map(|status| status.to_string())
    }

    /// Returns the exit status of a child of this process that has ended.
    pub fn exit_status(mut self) -> io::Result<ExitStatus> {
        let ended = match &mut self.child {
            Some(child) => child.try_wait()?,
            None => None,
        };
        self.leave();
        ended.ok_or_else(|| io::Error::other("its exit status is unknown"))
    }

    /// Waits for a child of this process and returns its exit status.
    pub fn reap(mut self) -> io::Result<ExitStatus> {
        let child = self.child.take();
        child.ok_or_else(|| io::Error::other("its exit status is unknown"))?.wait()
    }

    /// Leaves a process to its end, whenever that is. A thread waits for a child that still runs,
    /// so that no zombie remains.
    pub fn leave(mut self) {
        let Some(mut child) = self.child.take() else { return };
        if let Ok(None) = child.try_wait()
            && let Err(error) = super::thread("reaper", move || child.wait())
        {
            log::warn!("Process {} may remain as a zombie: {error}", self.pid);
        }
    }
}

fn open_pidfd(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: plain system call without pointers.
    let fd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid.cast_signed(), 0) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn process_is_found_by_its_record_until_it_ends() {
        let child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        let mut process = Process::of_child(child).unwrap();
        let record = process.record().unwrap();
        let found = Process::find(record).unwrap();
        let another = ProcessRecord { start_ticks: record.start_ticks + 1, ..record };
        assert!(Process::find(another).is_none(), "a later process with the same number");
        assert!(!found.has_ended());
        found.signal(Signal::SIGKILL);
        assert!(found.wait(Duration::from_secs(5)));
        assert!(Process::find(record).is_none(), "it has ended and is not reaped");
        assert!(process.status().unwrap().contains("signal: 9"));
    }

    #[test]
    fn process_that_does_not_end_is_killed() {
        let child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        let started = Instant::now();
        let status = Process::of_child(child).unwrap().end(Duration::from_millis(20));
        assert!(status.unwrap().contains("signal: 9"));
        assert!(started.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn process_that_is_left_is_reaped_when_it_ends() {
        let child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        let mut process = Process::of_child(child).unwrap();
        let stat = format!("/proc/{}/stat", process.pid());
        assert_eq!(process.status(), None);
        let begun = Instant::now();
        process.kill();
        assert!(begun.elapsed() < Duration::from_secs(1), "it is not awaited");
        while std::path::Path::new(&stat).exists() {
            assert!(begun.elapsed() < Duration::from_secs(10), "a zombie remains");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
