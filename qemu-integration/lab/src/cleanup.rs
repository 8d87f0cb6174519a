//! Cleanup of child processes and scratch folders. Registered resources are removed when their
//! owner is dropped and on SIGINT or SIGTERM. Processes also end when this process is killed.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::prctl;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

/// Time for an orderly end of a process before SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

/// Resources to remove on an interrupt, oldest first.
#[derive(Debug, Default)]
struct Registry {
    processes: Vec<(Pid, Signal)>,
    folders: Vec<PathBuf>,
}

fn registry() -> MutexGuard<'static, Registry> {
    static REGISTRY: Mutex<Registry> =
        Mutex::new(Registry { processes: Vec::new(), folders: Vec::new() });
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Child process in a separate process group, ended when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    end: Signal,
}

impl Process {
    /// Starts `command`; `end` is the signal that requests its end.
    pub fn spawn(command: Command, end: Signal) -> Result<Self> {
        handle_interrupts();
        let name = command.get_program().to_string_lossy().into_owned();
        let child =
            spawn_from_lasting_thread(command).with_context(|| format!("Cannot start {name}"))?;
        let process = Self { child, end };
        registry().processes.push((process.pid(), end));
        Ok(process)
    }

    /// Returns the process id.
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Sends a signal to the process.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(self.pid(), signal).with_context(|| format!("Cannot signal process {}", self.pid()))
    }

    /// Returns the exit status, if the process has ended.
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("Cannot wait for a child")
    }

    /// Waits until the process ends.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("Process {} did not end within {} s", self.pid(), timeout.as_secs());
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills the process and its group.
    pub fn kill(&mut self) {
        // An error means that the process or the group is already gone.
        let _ = killpg(self.pid(), Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = kill(self.pid(), self.end);
            let _ = self.wait(GRACE);
        }
        self.kill();
        let pid = self.pid();
        registry().processes.retain(|(other, _)| *other != pid);
    }
}

/// Folder for sockets and logs, removed when dropped.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Creates a folder with a short path, because a socket's path is limited to 107 bytes.
    pub fn new() -> Result<Self> {
        handle_interrupts();
        let base = Some(std::env::temp_dir()).filter(|dir| dir.as_os_str().len() <= 32);
        let base = base.unwrap_or_else(|| PathBuf::from("/tmp"));
        let path = tempfile::Builder::new()
            .prefix("tessera-")
            .tempdir_in(&base)
            .with_context(|| format!("Cannot make a folder in {}", base.display()))?
            .keep();
        registry().folders.push(path.clone());
        Ok(Self { path })
    }

    /// Creates an empty folder at `path`, or empties an existing one.
    pub fn at(path: PathBuf) -> Result<Self> {
        handle_interrupts();
        if path.exists() {
            std::fs::remove_dir_all(&path)
                .with_context(|| format!("Cannot empty {}", path.display()))?;
        }
        std::fs::create_dir_all(&path)
            .with_context(|| format!("Cannot make the folder {}", path.display()))?;
        registry().folders.push(path.clone());
        Ok(Self { path })
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves the folder to `target` and keeps it.
    pub fn rename(self, target: &Path) -> Result<()> {
        std::fs::rename(&self.path, target)
            .with_context(|| format!("Cannot rename {}", self.path.display()))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
        registry().folders.retain(|path| path != &self.path);
    }
}

/// Starts the thread that cleans up on SIGINT and SIGTERM, once per process.
fn handle_interrupts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        let Ok(mut signals) = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]) else {
            return;
        };
        thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                end_everything();
                std::process::exit(128 + signal);
            }
        });
    });
}

/// Ends all processes, youngest first, and removes all folders. Keeps the registry locked, so that
/// no new resource is registered.
fn end_everything() {
    let registry = registry();
    for (pid, end) in registry.processes.iter().rev() {
        let _ = kill(*pid, *end);
        let deadline = Instant::now() + GRACE;
        while is_running(*pid) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        let _ = killpg(*pid, Signal::SIGKILL);
    }
    for folder in &registry.folders {
        let _ = std::fs::remove_dir_all(folder);
    }
}

/// Returns true while the process exists and is not a zombie.
pub fn is_running(pid: Pid) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
    })
}

/// Starts a child that dies with this process.
///
/// The kernel's parent-death signal is tied to the thread that started the child, so one thread
/// that lives as long as the process starts all children.
fn spawn_from_lasting_thread(mut command: Command) -> std::io::Result<Child> {
    type Job = (Command, mpsc::Sender<std::io::Result<Child>>);
    static SPAWNER: OnceLock<Mutex<mpsc::Sender<Job>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, jobs) = mpsc::channel::<Job>();
        thread::spawn(move || {
            for (mut command, answer) in jobs {
                let _ = answer.send(command.spawn());
            }
        });
        Mutex::new(sender)
    });
    command.process_group(0);
    // SAFETY: between fork and exec the closure makes one system call and accesses no memory of
    // this process.
    unsafe {
        command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?));
    }
    let (answer, child) = mpsc::channel();
    let gone = || std::io::Error::other(anyhow!("The thread that starts processes has ended"));
    spawner
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .send((command, answer))
        .map_err(|_| gone())?;
    child.recv().map_err(|_| gone())?
}
