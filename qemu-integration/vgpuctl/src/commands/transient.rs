//! Transient vGPU for the lifetime of one process: a CUDA program, or the QEMU of a VM.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

use hyper::Method;
use mdev_core::ids::VgpuId;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use tokio::signal::unix::{SignalKind, signal};
use vgpud_api::{CreateVgpu, StopVgpu, Vgpu};

use super::write::attributes;
use crate::failure::{Failure, say};
use vgpud_client::{Client, vgpu_path};

/// Transient vGPU to start.
#[derive(Debug)]
pub struct Transient {
    /// Parent; if absent, the first that offers the type and has room.
    pub parent: Option<String>,
    /// Type.
    pub mdev_type: Option<String>,
    /// Attributes.
    pub attrs: Vec<(String, String)>,
}

impl Transient {
    /// Starts the vGPU, runs a process on it, and stops the vGPU. Does not return after the process
    /// has run: this process ends with its exit status.
    pub async fn run(
        self,
        client: &Client,
        command: impl AsyncFnOnce(&Vgpu) -> Result<Command, Failure>,
    ) -> Result<Vec<u8>, Failure> {
        // From here on, signals end the process and not this one.
        let signals = Signals::catch().map_err(Failure::start)?;
        let vgpu = self.start(client).await?;
        let status = match command(&vgpu).await {
            Ok(command) => wait(command, signals).await,
            Err(failure) => Err(failure),
        };
        let stopped = stop(client, vgpu.uuid).await;
        let status = status?;
        if let Err(failure) = stopped {
            say(format_args!("vGPU {} still runs: {failure}", vgpu.uuid));
        }
        // As shells report a program that a signal ended.
        let signal = status.signal().map(|signal| 128 + signal);
        std::process::exit(status.code().or(signal).unwrap_or(1))
    }

    /// Starts the vGPU for this user.
    async fn start(self, client: &Client) -> Result<Vgpu, Failure> {
        let Self { parent, mdev_type, mut attrs } = self;
        let user = geteuid();
        if !user.is_root() && attrs.iter().all(|(name, _)| name != "owner") {
            attrs.push(("owner".to_owned(), user.to_string()));
        }
        let request = CreateVgpu {
            parent,
            mdev_type,
            attrs: attributes(attrs.iter().map(|(name, value)| (name.as_str(), value.as_str()))),
            run: true,
            ..CreateVgpu::default()
        };
        Ok(client.post("/v1/vgpus", &request).await?)
    }
}

/// Stops a transient vGPU, unless it is gone.
async fn stop(client: &Client, id: VgpuId) -> Result<(), Failure> {
    let path = format!("{}/stop", vgpu_path(id));
    match client.request(Method::POST, &path, &StopVgpu { force: true }).await {
        Err(error) if error.is_not_found() => Ok(()),
        other => Ok(other?),
    }
}

/// Runs a process and returns its status.
async fn wait(command: Command, mut signals: Signals) -> Result<ExitStatus, Failure> {
    let name = command.get_program().to_owned();
    let mut child = tokio::process::Command::from(command)
        .spawn()
        .map_err(|error| cannot_run(&name.to_string_lossy(), &error))?;
    let pid = child.id();
    loop {
        tokio::select! {
            status = child.wait() => return status.map_err(Failure::start),
            signal = signals.next() => {
                if let Some(pid) = pid {
                    // The process may have ended just now.
                    let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
                }
            }
        }
    }
}

/// Signals that end a process.
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    quit: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    fn catch() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            hangup: signal(SignalKind::hangup())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// Waits for a signal that the process has to be sent. A terminal sends Ctrl-C and Ctrl-\ to
    /// the process, too.
    async fn next(&mut self) -> Signal {
        loop {
            tokio::select! {
                _ = self.interrupt.recv() => {}
                _ = self.quit.recv() => {}
                _ = self.hangup.recv() => return Signal::SIGHUP,
                _ = self.terminate.recv() => return Signal::SIGTERM,
            }
        }
    }
}

/// Returns the failure to start a program.
pub fn cannot_run(name: &str, error: &io::Error) -> Failure {
    Failure::Local(format!("Cannot run {name}: {error}"))
}
