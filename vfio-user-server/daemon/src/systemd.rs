//! Service manager protocols (systemd): socket activation, readiness, status and watchdog.

use std::env;
use std::io;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::socket::{getsockopt, sockopt};
use sd_notify::NotifyState;

use crate::spawn;

/// Returns the control socket that the service manager passes (`LISTEN_FDS`), if any.
pub fn listener() -> anyhow::Result<Option<UnixListener>> {
    let mut fds = sd_notify::listen_fds().context("Cannot read LISTEN_FDS and LISTEN_PID")?;
    let Some(fd) = fds.next() else { return Ok(None) };
    if fds.len() > 0 {
        bail!(
            "The service manager passes {} sockets; pass the control socket alone",
            fds.len() + 1
        );
    }
    let take = || -> io::Result<UnixListener> {
        let fd = spawn::inherited(fd)?;
        if !getsockopt(&fd, sockopt::AcceptConn)? {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let listener = UnixListener::from(fd);
        // Fails for a listening socket of another address family.
        listener.local_addr()?;
        Ok(listener)
    };
    let what = "The service manager's socket is no UNIX socket to listen on (see ListenStream=)";
    take().context(what).map(Some)
}

/// Returns whether this process is the service of `vgpud.service`, under the unit's restrictions.
pub fn is_service() -> bool {
    env::var_os("NOTIFY_SOCKET").is_some()
}

/// Notifications to the service manager from the manager's loop: watchdog keep-alives and the
/// number of vGPUs.
#[derive(Debug)]
pub struct Notifier {
    keep_alive_interval: Option<Duration>,
    next_keep_alive: Option<Instant>,
    reported: Option<usize>,
}

impl Notifier {
    /// Creates a notifier with the watchdog timeout that the environment gives.
    pub fn from_env() -> Self {
        // sd_watchdog_enabled(3) recommends half of the timeout.
        let interval = sd_notify::watchdog_enabled().map(|limit| limit / 2);
        let interval = interval.filter(|interval| !interval.is_zero());
        let next_keep_alive = interval.map(|_| Instant::now());
        Self { keep_alive_interval: interval, next_keep_alive, reported: None }
    }

    /// Returns when the next keep-alive is due.
    pub fn deadline(&self) -> Option<Instant> {
        self.next_keep_alive
    }

    /// Sends a keep-alive if one is due, and the number of running vGPUs if it has changed. Called
    /// in each iteration of the manager's loop.
    pub fn update(&mut self, now: Instant, running: usize) {
        if self.next_keep_alive.is_some_and(|at| at <= now) {
            notify(&[NotifyState::Watchdog]);
            self.next_keep_alive = self.keep_alive_interval.map(|interval| now + interval);
        }
        if self.reported != Some(running) {
            self.reported = Some(running);
            let plural = if running == 1 { "vGPU runs" } else { "vGPUs run" };
            notify(&[NotifyState::Status(&format!("{running} {plural}"))]);
        }
    }
}

/// Reports that the control socket accepts requests.
pub fn ready() {
    notify(&[NotifyState::Ready]);
}

/// Reports that the manager is ending.
pub fn stopping() {
    notify(&[NotifyState::Stopping]);
}

fn notify(states: &[NotifyState<'_>]) {
    if env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    if let Err(error) = sd_notify::notify(states) {
        // A full socket is no error worth a line.
        if error.kind() != io::ErrorKind::WouldBlock {
            log::warn!("Cannot tell the service manager {states:?}: {error}");
        }
    }
}
