//! The service manager's side (systemd, or whatever speaks its protocols): the socket that it has opened for us, that we
//! are ready, how we are, and that we are alive.

use std::env;
use std::io;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::socket::{getsockopt, sockopt};
use sd_notify::NotifyState;

use crate::spawn;

/// The control socket, where it was opened for us (`LISTEN_FDS`).
pub fn listener() -> anyhow::Result<Option<tokio::net::UnixListener>> {
    let mut fds = sd_notify::listen_fds().context("Cannot read LISTEN_FDS and LISTEN_PID")?;
    let Some(fd) = fds.next() else { return Ok(None) };
    if fds.len() > 0 {
        bail!(
            "The service manager passes {} sockets; pass the control socket alone",
            fds.len() + 1
        );
    }
    let take = || {
        let fd = spawn::inherited(fd)?;
        if !getsockopt(&fd, sockopt::AcceptConn)? {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let listener = UnixListener::from(fd);
        listener.set_nonblocking(true)?;
        // For its family: what listens may be of another.
        listener.local_addr()?;
        tokio::net::UnixListener::from_std(listener)
    };
    let what = "The service manager's socket is no UNIX socket to listen on (see ListenStream=)";
    take().context(what).map(Some)
}

/// What is said to the service manager, where there is one, from the loop that must not stand still.
#[derive(Debug)]
pub struct Service {
    every: Option<Duration>,
    next: Option<Instant>,
    said: Option<usize>,
}

impl Service {
    /// Reads from the environment what is asked for.
    pub fn new() -> Self {
        // Twice as often as it must be, as its documentation asks for.
        let every = sd_notify::watchdog_enabled().map(|limit| limit / 2);
        let every = every.filter(|every| !every.is_zero());
        Self { every, next: every.map(|_| Instant::now()), said: None }
    }

    /// When the next sign of life is due.
    pub fn deadline(&self) -> Option<Instant> {
        self.next
    }

    /// To be called once in each turn of the loop: signs of life, and how many vGPUs run where that has changed.
    pub fn turn(&mut self, now: Instant, running: usize) {
        if self.next.is_some_and(|at| at <= now) {
            say(&[NotifyState::Watchdog]);
            self.next = self.every.map(|every| now + every);
        }
        if self.said != Some(running) {
            self.said = Some(running);
            let plural = if running == 1 { "vGPU runs" } else { "vGPUs run" };
            say(&[NotifyState::Status(&format!("{running} {plural}"))]);
        }
    }
}

/// Says that requests are answered from now on.
pub fn ready() {
    say(&[NotifyState::Ready]);
}

/// Says that we leave.
pub fn stopping() {
    say(&[NotifyState::Stopping]);
}

fn say(what: &[NotifyState<'_>]) {
    if env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    if let Err(error) = sd_notify::notify(what) {
        // Once it is full or gone there is nothing to be done but to say so.
        if error.kind() != io::ErrorKind::WouldBlock {
            log::warn!("Cannot tell the service manager {what:?}: {error}");
        }
    }
}
