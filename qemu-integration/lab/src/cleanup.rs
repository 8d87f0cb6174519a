//! Nothing that a run creates outlives it: child processes and scratch folders are registered here, and are gone when
//! their owner is dropped, when Ctrl-C or SIGTERM arrives, and (processes) when this process is killed.

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

/// How long a process may take to end in an orderly way before it is killed.
const GRACE: Duration = Duration::from_secs(5);

/// What an interrupt has to end and remove, oldest first.
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

/// A child process in a group of its own, ended when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    end: Signal,
}

impl Process {
    /// Starts `command`; `end` is the signal that asks it to go.
    pub fn spawn(command: Command, end: Signal) -> Result<Self> {
        handle_interrupts();
        let name = command.get_program().to_string_lossy().into_owned();
        let child =
            spawn_from_lasting_thread(command).with_context(|| format!("Cannot start {name}"))?;
        let process = Self { child, end };
        registry().processes.push((process.pid(), end));
        Ok(process)
    }

    /// Its process id.
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(self.pid(), signal).with_context(|| format!("Cannot signal process {}", self.pid()))
    }

    /// Its exit status, if it has ended.
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("Cannot wait for a child")
    }

    /// Waits for its end.
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

    /// Ends it at once, and its group with it.
    pub fn kill(&mut self) {
        // Either may be gone already, which is what is wanted.
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

/// A folder for sockets and logs, removed when dropped.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// A new folder. Its path is short, since a socket's path may have only 107 bytes.
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

    /// A folder at `path`, which may exist already; it is emptied first.
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

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves it to `target`, where it stays.
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

/// Ends all processes, the youngest first, and removes all folders. The registry stays locked: nothing new may start.
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

/// True while the process exists and is no zombie.
pub fn is_running(pid: Pid) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
    })
}

/// Starts a child that dies with this process.
///
/// The kernel's parent-death signal is tied to the *thread* that started the child, so one thread that lives as long as
/// the process starts them all.
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
    // SAFETY: between fork and exec the closure makes one system call and touches no memory of ours.
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
