//! Helpers of the system tests.
//!
//! * [`vgpud()`], [`cuda_library`]: paths of what is built from this tree
//! * [`Vgpud`]: a running manager in its own folders
//! * [`raw_client`]: a vfio-user client that writes raw bytes
//! * [`driver_api`]: NVIDIA's libcuda; [`checkpoint_tool`]: its checkpoints
//! * [`fuse`]: a file system in user space that stops answering
//! * [`ram`]: guest RAM without a guest
//! * [`parent`]: a software GPU in this process
//! * [`in_process`], [`vfio_user_guest`]: platforms of the guest runtime, on the device model and
//!   over a vfio-user socket
//! * [`moved_guest`]: a platform that moves from one vGPU to another
//! * [`calibration`]: kernels of a known length
//! * [`load`]: guests under load, and their measured shares
//! * [`vgpuctl`]: runs of `vgpuctl`
//! * [`captured`]: a running process that makes the system calls of a test
//! * [`user`]: actions as another Unix user
//! * [`guest_vm`]: a VM with the guest's Linux module
//! * [`monitor`]: a QEMU monitor in the test's process
//! * [`vmm`]: a VM with one CPU that runs a few hundred bytes of code under KVM
//! * [`outcome`]: results of benchmarks

pub mod calibration;
pub mod captured;
pub mod checkpoint_tool;
pub mod driver_api;
pub mod fuse;
pub mod guest_vm;
pub mod in_process;
pub mod load;
pub mod monitor;
pub mod moved_guest;
pub mod outcome;
pub mod parent;
pub mod ram;
pub mod raw_client;
pub mod user;
pub mod vcpu;
pub mod vfio_user_guest;
pub mod vgpuctl;
pub mod vmm;
pub mod worker_deaths;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use lab::build::{self, Profile, Programs};
use lab::progress::Progress;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

/// Timeout of every wait in a test.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// Reports that a test is skipped, in the form that `cargo lab test` counts.
pub fn skipped(reason: &str) {
    // Bypasses libtest's capture, which hides the output of tests that pass.
    let _ = writeln!(std::io::stderr(), "skipped: {reason}");
}

/// Returns `vgpud` and `vgpuctl`, built once per test program in the profile of the tests.
fn programs() -> Result<&'static Programs> {
    static PROGRAMS: OnceLock<std::result::Result<Programs, String>> = OnceLock::new();
    let programs = PROGRAMS.get_or_init(|| {
        build::host_with(profile(), &Progress::new()).map_err(|error| format!("{error:#}"))
    });
    programs.as_ref().map_err(|error| anyhow!("{error}"))
}

/// Returns the path of the preload library for CUDA programs, built once per test program. A
/// library beside the test takes precedence, as in a bundle.
pub fn cuda_library() -> Result<&'static Path> {
    static LIBRARY: OnceLock<std::result::Result<PathBuf, String>> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        if let Some(beside) = beside(build::CUDA_LIBRARY) {
            return Ok(beside);
        }
        build::cuda_library(profile(), &Progress::new()).map_err(|error| format!("{error:#}"))
    });
    library.as_deref().map_err(|error| anyhow!("{error}"))
}

/// Returns the file with this name beside the test, if there is one.
fn beside(name: &str) -> Option<PathBuf> {
    let test = std::env::current_exe().ok()?;
    Some(test.with_file_name(name)).filter(|path| path.is_file())
}

/// Returns the profile of the tests.
fn profile() -> Profile {
    // target/release/deps/shares-0123456789abcdef
    let test = std::env::current_exe().unwrap_or_default();
    let released = test.components().any(|part| part.as_os_str() == "release");
    if released { Profile::Release } else { Profile::Dev }
}

/// Returns the path of `vgpud`.
///
/// A program beside the test takes precedence, as in a bundle or in a VM.
pub fn vgpud() -> Result<&'static Path> {
    static BESIDE: OnceLock<Option<PathBuf>> = OnceLock::new();
    match BESIDE.get_or_init(|| beside("vgpud")) {
        Some(path) => Ok(path),
        None => programs()?.find("vgpud"),
    }
}

/// Waits until `ready` returns true.
pub fn wait_for(what: &str, mut ready: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while !ready() {
        ensure!(Instant::now() < deadline, "{what}: not within {} s", TIMEOUT.as_secs());
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// A manager with its own folders. Dropping it ends the manager and all processes that it started.
#[derive(Debug)]
pub struct Vgpud {
    /// Program of another release.
    program: Option<PathBuf>,
    dir: TempDir,
    args: Vec<String>,
    log: Option<PathBuf>,
    cgroup: Option<PathBuf>,
    child: Option<Child>,
}

impl Vgpud {
    /// Starts a manager with the default parent, `soft0`.
    pub fn start() -> Result<Self> {
        Self::start_with(&[])
    }

    /// Starts a manager with further arguments for `vgpud run`.
    pub fn start_with(args: &[&str]) -> Result<Self> {
        Self::start_logging(args, None, None)
    }

    /// Starts a manager of another release.
    pub fn start_of(program: &Path) -> Result<Self> {
        let mut vgpud = Self::stopped(&[])?;
        vgpud.program = Some(program.to_owned());
        vgpud.start_again()?;
        Ok(vgpud)
    }

    /// Uses the program of this release for the next manager.
    pub fn use_this_release(&mut self) {
        self.program = None;
    }

    /// Starts a manager in a control group.
    pub fn start_in_cgroup(group: &Path) -> Result<Self> {
        Self::start_logging(&[], None, Some(group.to_owned()))
    }

    /// Starts a manager with further arguments. It and its processes log to a file.
    pub fn start_with_log(args: &[&str], log: &Path) -> Result<Self> {
        Self::start_logging(args, Some(log.to_owned()), None)
    }

    fn start_logging(args: &[&str], log: Option<PathBuf>, cgroup: Option<PathBuf>) -> Result<Self> {
        let mut vgpud = Self::stopped(args)?;
        (vgpud.log, vgpud.cgroup) = (log, cgroup);
        vgpud.start_again()?;
        Ok(vgpud)
    }

    fn stopped(args: &[&str]) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("vgpud").tempdir()?;
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Ok(Self { program: None, dir, args, log: None, cgroup: None, child: None })
    }

    /// Starts a manager in the same folders after the previous one has ended.
    pub fn start_again(&mut self) -> Result<()> {
        let mut child = self.command()?.spawn().context("Cannot start vgpud")?;
        let answered = wait_for("vgpud answers", || {
            child.try_wait().is_ok_and(|ended| ended.is_some())
                || UnixStream::connect(self.api_socket()).is_ok()
        });
        if let Some(status) = child.try_wait()? {
            bail!("vgpud has ended: {status}");
        }
        self.child = Some(child);
        answered
    }

    /// Returns the command that starts a manager in these folders.
    pub fn command(&self) -> Result<Command> {
        let program = match &self.program {
            Some(program) => program,
            None => vgpud()?,
        };
        let mut command = match &self.cgroup {
            None => Command::new(program),
            Some(group) => {
                let mut command = Command::new("sh");
                command.args(["-c", r#"echo $$ > "$0" && exec "$@""#]);
                command.arg(group.join("cgroup.procs")).arg(program);
                command
            }
        };
        command.arg("run").arg("--run-dir").arg(self.run_dir());
        command.arg("--config-dir").arg(self.config_dir()).args(&self.args);
        command.stdin(Stdio::null());
        if let Some(log) = &self.log {
            command.stderr(fs::File::options().create(true).append(true).open(log)?);
        }
        Ok(command)
    }

    /// Returns the folder of sockets and locks.
    pub fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Returns the folder of definitions.
    pub fn config_dir(&self) -> PathBuf {
        self.dir.path().join("config")
    }

    /// Returns the path of the control API's socket.
    pub fn api_socket(&self) -> PathBuf {
        self.run_dir().join("control.sock")
    }

    /// Returns a vGPU's folder.
    pub fn vgpu_dir(&self, uuid: &str) -> PathBuf {
        self.run_dir().join("vgpus").join(uuid)
    }

    /// Returns the path of the socket that QEMU connects to.
    pub fn vfio_socket(&self, uuid: &str) -> PathBuf {
        self.vgpu_dir(uuid).join("vfio.sock")
    }

    /// Returns the manager's process id.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Sends the manager a signal and waits for its end.
    pub fn end(&mut self, signal: Signal) -> Result<ExitStatus> {
        let mut child = self.child.take().context("There is no manager")?;
        kill_process(child.id(), signal)?;
        let mut status = None;
        wait_for("vgpud ends", || {
            status = child.try_wait().ok().flatten();
            status.is_some()
        })?;
        status.context("vgpud has not ended")
    }

    /// Sends a request and returns status and body of the answer.
    pub fn request(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(u16, Vec<u8>)> {
        let mut socket = UnixStream::connect(self.api_socket())?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        let body = body.map(Value::to_string).unwrap_or_default();
        write!(
            socket,
            "{method} {path} HTTP/1.1\r\nHost: vgpud\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer)?;
        let end = answer.windows(4).position(|window| window == b"\r\n\r\n");
        let body = answer.split_off(end.context("The answer has no end of headers")? + 4);
        let head = String::from_utf8(answer)?;
        let status = head.split(' ').nth(1).context("The answer has no status")?.parse()?;
        Ok((status, body))
    }

    /// Sends a request that must succeed and returns the answer, `null` if it has no body.
    pub fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let (status, answer) = self.request(method, path, body)?;
        ensure!(
            (200..300).contains(&status),
            "{method} {path}: {status} {}",
            String::from_utf8_lossy(&answer)
        );
        if answer.is_empty() { Ok(Value::Null) } else { Ok(serde_json::from_slice(&answer)?) }
    }

    /// Sends a request that must be refused and returns status, code and message.
    pub fn refused(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(u16, String, String)> {
        let (status, answer) = self.request(method, path, body)?;
        ensure!(status >= 400, "{method} {path} was not refused: {status}");
        let answer: Value = serde_json::from_slice(&answer)?;
        let text = |name: &str| answer["error"][name].as_str().unwrap_or_default().to_owned();
        Ok((status, text("code"), text("message")))
    }

    /// Sends a `GET` request that must succeed.
    pub fn get(&self, path: &str) -> Result<Value> {
        self.call("GET", path, None)
    }

    /// Defines a vGPU or starts a transient one (see `CreateVgpu`) and returns its uuid.
    pub fn create(&self, request: &Value) -> Result<String> {
        let vgpu = self.call("POST", "/v1/vgpus", Some(request))?;
        Ok(vgpu["uuid"].as_str().context("The answer has no uuid")?.to_owned())
    }

    /// Returns the manager's description of a vGPU.
    pub fn show(&self, uuid: &str) -> Result<Value> {
        self.get(&format!("/v1/vgpus/{uuid}"))
    }

    /// Returns the GPU process of the first parent.
    pub fn gpu_process(&self) -> Result<u32> {
        let pid = self.get("/v1/parents")?[0]["pid"].as_u64().context("A GPU process")?;
        Ok(u32::try_from(pid)?)
    }

    /// Returns the process with a vGPU's memory and engine.
    pub fn context(&self, uuid: &str) -> Result<u32> {
        let pid = self.show(uuid)?["context_pid"].as_u64().context("A context")?;
        Ok(u32::try_from(pid)?)
    }

    /// Returns the process that holds a vGPU's descriptors and starts its workers.
    pub fn anchor(&self, uuid: &str) -> Result<u32> {
        let run: Value = serde_json::from_slice(&fs::read(self.vgpu_dir(uuid).join("run.json"))?)?;
        let pid = run["process"]["pid"].as_u64().context("A process ID")?;
        Ok(u32::try_from(pid)?)
    }

    /// Returns the processes recorded in these folders: workers and software GPUs.
    pub fn roles(&self) -> Vec<u32> {
        let folders = ["vgpus", "parents"].into_iter().flat_map(|kind| {
            fs::read_dir(self.run_dir().join(kind)).into_iter().flatten().flatten()
        });
        let runs = folders.filter_map(|folder| fs::read(folder.path().join("run.json")).ok());
        runs.filter_map(|run| {
            let run: Value = serde_json::from_slice(&run).ok()?;
            u32::try_from(run["process"]["pid"].as_u64()?).ok()
        })
        .collect()
    }
}

impl Drop for Vgpud {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = kill_process(child.id(), Signal::SIGTERM);
            if wait_for("vgpud ends", || child.try_wait().is_ok_and(|ended| ended.is_some()))
                .is_err()
            {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        for pid in self.roles() {
            let _ = kill_process(pid, Signal::SIGKILL);
        }
    }
}

/// Sends a signal to a process.
pub fn kill_process(pid: u32, signal: Signal) -> Result<()> {
    Ok(kill(Pid::from_raw(pid.cast_signed()), signal)?)
}

/// Returns true while a process runs. A zombie has ended.
pub fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
}
