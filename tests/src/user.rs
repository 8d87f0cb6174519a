//! Being somebody else for a while. It takes root.

use std::fs;

use anyhow::{Context, Result, anyhow, ensure};

/// Somebody.
#[derive(Clone, Copy, Debug)]
pub struct User {
    /// Its number.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its groups besides.
    pub groups: &'static [u32],
}

impl User {
    /// Whom a process runs as.
    pub fn of(pid: u32) -> Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let first = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next());
            number.and_then(|number| number.parse().ok()).context("It has a user and a group")
        };
        Ok(Self { uid: first("Uid:")?, gid: first("Gid:")?, groups: &[] })
    }

    /// Does something as that user: on a thread of its own, since to the kernel users are threads'.
    pub fn does<T: Send>(self, body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| self.become_it().and_then(|()| body()));
            thread.join().map_err(|_| anyhow!("The thread panicked"))?
        })
    }

    fn become_it(self) -> Result<()> {
        let done = |result: libc::c_long| {
            ensure!(result == 0, std::io::Error::last_os_error());
            Ok(())
        };
        let Self { uid, gid, groups } = self;
        if nix::unistd::geteuid().is_root() {
            // SAFETY: the kernel reads as many groups as there are; the call is this thread's alone, since it is not
            // made by the C library.
            done(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) })?;
        }
        // SAFETY: no memory is involved.
        done(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
        // SAFETY: as above.
        done(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) })
    }
}
