//! `run`: a CUDA program on a vGPU.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use hyper::Method;
use mdev_core::ids::VgpuId;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{AccessFlags, Pid, access, geteuid};
use tokio::signal::unix::{SignalKind, signal};
use vgpud_api::{CreateVgpu, StopVgpu, Vgpu};

use super::write::attributes;
use crate::cli::Run;
use crate::client::{Client, vgpu_path};
use crate::failure::Failure;

/// File name of the preload library.
const LIBRARY: &str = "libtessera_cuda.so";

/// Runs `run`. Does not return after the program has run.
pub async fn run(client: &Client, args: Run) -> Result<Vec<u8>, Failure> {
    let library = library()?;
    if let Some(uuid) = args.uuid {
        let vgpu = client.vgpu(uuid, None).await?;
        let mut command = command(&args.program, &library, &program_socket(&vgpu)?);
        return Err(cannot_run(&args.program, &command.exec()));
    }
    // From here on, signals end the program and not this process.
    let signals = Signals::catch().map_err(Failure::start)?;
    let vgpu = create(client, &args).await?;
    let status = run_on(&vgpu, &args.program, &library, signals).await;
    let stopped = stop(client, vgpu.uuid).await;
    let status = status?;
    if let Err(failure) = stopped {
        eprintln!("vgpuctl: vGPU {} still runs: {failure}", vgpu.uuid);
    }
    // As shells report a program that a signal ended.
    let signal = status.signal().map(|signal| 128 + signal);
    std::process::exit(status.code().or(signal).unwrap_or(1))
}

/// Starts a transient vGPU for this user.
async fn create(client: &Client, args: &Run) -> Result<Vgpu, Failure> {
    let mut attrs = args.attr.clone();
    let user = geteuid();
    let named = |attrs: &[(String, String)], name| attrs.iter().any(|(own, _)| own == name);
    if let Some(core) = args.core {
        attrs.push(("core".to_owned(), core.to_string()));
    }
    if !user.is_root() && !named(&attrs, "owner") {
        attrs.push(("owner".to_owned(), user.to_string()));
    }
    let request = CreateVgpu {
        parent: args.parent.clone(),
        mdev_type: args.mdev_type.clone(),
        attrs: attributes(attrs.iter().map(|(name, value)| (name.as_str(), value.as_str()))),
        run: true,
        ..CreateVgpu::default()
    };
    client.post("/v1/vgpus", &request).await
}

/// Stops a transient vGPU, unless it is gone.
async fn stop(client: &Client, id: VgpuId) -> Result<(), Failure> {
    let path = format!("{}/stop", vgpu_path(id));
    match client.request(Method::POST, &path, &StopVgpu { force: true }).await {
        Err(failure) if failure.exit_status() == 4 => Ok(()),
        other => other,
    }
}

/// Runs a program on a vGPU and returns its status.
async fn run_on(
    vgpu: &Vgpu,
    program: &[OsString],
    library: &Path,
    mut signals: Signals,
) -> Result<ExitStatus, Failure> {
    let command = command(program, library, &program_socket(vgpu)?);
    let mut child = tokio::process::Command::from(command)
        .spawn()
        .map_err(|error| cannot_run(program, &error))?;
    let pid = child.id();
    loop {
        tokio::select! {
            status = child.wait() => return status.map_err(Failure::start),
            signal = signals.next() => {
                if let Some(pid) = pid {
                    // The program may have ended just now.
                    let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
                }
            }
        }
    }
}

/// Signals that end a program.
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

    /// Waits for a signal that the program has to be sent. A terminal sends Ctrl-C and Ctrl-\ to the
    /// program, too.
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

/// Returns the socket for programs of a running vGPU.
fn program_socket(vgpu: &Vgpu) -> Result<PathBuf, Failure> {
    let id = vgpu.uuid;
    let Some(vm_socket) = &vgpu.socket else {
        let message = format!("vGPU {id} is not running; start it: vgpuctl start -u {id}");
        return Err(Failure::NotNow(message));
    };
    let socket = Path::new(vm_socket).with_file_name("cuda.sock");
    match access(&socket, AccessFlags::W_OK) {
        Ok(()) => Ok(socket),
        Err(Errno::EACCES) => {
            let own = geteuid();
            let message = format!(
                "vGPU {id} belongs to another user; stop it, then: vgpuctl start -u {id} --owner {own}"
            );
            Err(Failure::NotNow(message))
        }
        Err(_) => {
            let message = format!(
                "vGPU {id} of type {} serves no programs: there is no {}; use a vGPU of a CUDA type",
                vgpu.mdev_type,
                socket.display()
            );
            Err(Failure::NotNow(message))
        }
    }
}

/// Returns the path of the preload library.
fn library() -> Result<PathBuf, Failure> {
    let path = match std::env::var_os("TESSERA_CUDA_LIBRARY") {
        Some(path) => {
            let path = std::path::absolute(path).map_err(Failure::start)?;
            if !path.is_file() {
                let path = path.display();
                let message = format!("There is no library {path}; correct TESSERA_CUDA_LIBRARY");
                return Err(Failure::Local(message));
            }
            path
        }
        None => installed_library().ok_or_else(|| {
            let message = format!(
                "Cannot find {LIBRARY} beside vgpuctl, in ../lib/tessera or in /usr/lib/tessera; name \
                 its path in TESSERA_CUDA_LIBRARY"
            );
            Failure::Local(message)
        })?,
    };
    // LD_PRELOAD is a list without quoting.
    if path.as_os_str().as_encoded_bytes().iter().any(|byte| b" :".contains(byte)) {
        let path = path.display();
        let message = format!(
            "The loader cannot load {path}: the path has a space or a colon; move the library"
        );
        return Err(Failure::Local(message));
    }
    Ok(path)
}

fn installed_library() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let folder = own.parent()?;
    [folder.to_owned(), folder.parent()?.join("lib/tessera"), "/usr/lib/tessera".into()]
        .into_iter()
        .map(|folder| folder.join(LIBRARY))
        .find(|path| path.is_file())
}

/// Returns the command of a program with a vGPU.
fn command(program: &[OsString], library: &Path, socket: &Path) -> Command {
    let (name, args) = program
        .split_first()
        .map_or((OsStr::new(""), program), |(name, args)| (name.as_os_str(), args));
    let mut preload = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let mut command = Command::new(name);
    command.args(args).env("LD_PRELOAD", preload).env("TESSERA_CUDA_SOCKET", socket);
    command
}

fn cannot_run(program: &[OsString], error: &io::Error) -> Failure {
    let name = program.first().map(|name| name.to_string_lossy()).unwrap_or_default();
    Failure::Local(format!("Cannot run {name}: {error}"))
}
