//! Actions as another Unix user. They need root.

use std::fs;

use anyhow::{Context, Result, anyhow, ensure};

/// A Unix user.
#[derive(Clone, Copy, Debug)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: &'static [u32],
}

impl User {
    /// Returns the user that a process runs as.
    pub fn of(pid: u32) -> Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let first = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next());
            number
                .and_then(|number| number.parse().ok())
                .context("The process has no user or group")
        };
        Ok(Self { uid: first("Uid:")?, gid: first("Gid:")?, groups: &[] })
    }

    /// Runs `body` as this user, on a separate thread because the kernel's credentials are per
    /// thread.
    pub fn run<T: Send>(self, body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| self.assume().and_then(|()| body()));
            thread.join().map_err(|_| anyhow!("The thread panicked"))?
        })
    }

    fn assume(self) -> Result<()> {
        let done = |result: libc::c_long| {
            ensure!(result == 0, std::io::Error::last_os_error());
            Ok(())
        };
        let Self { uid, gid, groups } = self;
        if nix::unistd::geteuid().is_root() {
            // SAFETY: the kernel reads `groups.len()` groups. The raw system call affects this
            // thread only, unlike the C library's.
            done(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) })?;
        }
        // SAFETY: no memory is involved.
        done(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
        // SAFETY: as above.
        done(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) })
    }
}
