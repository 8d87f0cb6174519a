//! Whole-system tests: what they share.
//!
//! * [`vgpud`]: the path of a `vgpud` that is built from this tree
//! * [`Vgpud`]: one that runs, in folders of its own
//! * [`ram`]: guest RAM without a guest
//! * [`parent`]: a software GPU of one's own, in this process
//! * [`in_process`], [`stranger`]: the guest runtime's platforms on the host, straight through the device model and as
//!   another process over a vfio-user socket
//! * [`load`]: VMs at work, and the shares that they get
//! * [`vgpuctl`]: the operator's command
//! * [`user`]: being somebody else
//! * [`monitor`]: the QEMU monitor of a VM that is a test
//! * [`vmm`]: a VM of one CPU that runs a few hundred bytes of code under KVM
//! * [`outcome`]: how a benchmark says what it measured

pub mod in_process;
pub mod load;
pub mod monitor;
pub mod outcome;
pub mod parent;
pub mod ram;
pub mod stranger;
pub mod user;
pub mod vgpuctl;
pub mod vmm;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

/// How long anything may take before a test gives up.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Says that a test does not run here, in words that `cargo lab test` counts it by.
pub fn skipped(reason: &str) {
    // Past the test's own output, which nobody sees where it passes.
    let _ = writeln!(std::io::stderr(), "skipped: {reason}");
}

/// Where the workspace's programs are built: the folder above the one that this test runs from.
fn target_dir() -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    let dir =
        test.parent().and_then(Path::parent).context("A test runs from target/<profile>/deps")?;
    Ok(dir.to_owned())
}

/// Builds one of the workspace's programs in this test's profile, and says where it is.
///
/// Cargo names a program's path only to tests of its own package, and builds it only for those.
pub fn program(package: &str, name: &str) -> Result<PathBuf> {
    let dir = target_dir()?;
    let mut build = Command::new(option_env!("CARGO").unwrap_or("cargo"));
    build.args(["build", "--quiet", "--package", package, "--bin", name]);
    build.current_dir(env!("CARGO_MANIFEST_DIR"));
    match dir.file_name().and_then(|profile| profile.to_str()) {
        Some("debug") | None => {}
        Some(profile) => drop(build.args(["--profile", profile])),
    }
    ensure!(build.status()?.success(), "Cannot build {name}");
    Ok(dir.join(name))
}

/// The path of `vgpud`: the one beside this program, in a bundle, or else built once per test program.
pub fn vgpud() -> Result<&'static Path> {
    static PATH: OnceLock<std::result::Result<PathBuf, String>> = OnceLock::new();
    let path = PATH.get_or_init(|| {
        let this = std::env::current_exe().ok();
        let beside = this.map(|this| this.with_file_name("vgpud")).filter(|path| path.is_file());
        match beside {
            Some(path) => Ok(path),
            None => program("vfio-user-server", "vgpud").map_err(|error| format!("{error:#}")),
        }
    });
    path.as_deref().map_err(|error| anyhow::anyhow!("{error}"))
}

/// Waits until `ready` says yes.
pub fn wait_for(what: &str, mut ready: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !ready() {
        ensure!(Instant::now() < deadline, "{what}: not within {} s", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// A manager that runs in folders of its own. Dropping it ends it and all that it started.
#[derive(Debug)]
pub struct Vgpud {
    dir: TempDir,
    args: Vec<String>,
    child: Option<Child>,
}

impl Vgpud {
    /// Starts one with the default parent, `soft0`.
    pub fn start() -> Result<Self> {
        Self::start_with(&[])
    }

    /// Starts one with more arguments for `vgpud run`.
    pub fn start_with(args: &[&str]) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("vgpud").tempdir()?;
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        let mut vgpud = Self { dir, args, child: None };
        vgpud.start_again()?;
        Ok(vgpud)
    }

    /// Starts a manager in the same folders, after the one before has gone.
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

    /// The command that starts a manager in these folders.
    pub fn command(&self) -> Result<Command> {
        let mut command = Command::new(vgpud()?);
        command.arg("run").arg("--run-dir").arg(self.run_dir());
        command.arg("--config-dir").arg(self.config_dir()).args(&self.args);
        command.stdin(Stdio::null());
        Ok(command)
    }

    /// Sockets and locks.
    pub fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Definitions.
    pub fn config_dir(&self) -> PathBuf {
        self.dir.path().join("config")
    }

    /// The control API's socket.
    pub fn api_socket(&self) -> PathBuf {
        self.run_dir().join("control.sock")
    }

    /// A vGPU's folder.
    pub fn vgpu_dir(&self, uuid: &str) -> PathBuf {
        self.run_dir().join("vgpus").join(uuid)
    }

    /// Where QEMU attaches to a vGPU.
    pub fn vfio_socket(&self, uuid: &str) -> PathBuf {
        self.vgpu_dir(uuid).join("vfio.sock")
    }

    /// The manager's process.
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

    /// A request; the status and the body of the answer.
    pub fn request(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(u16, Vec<u8>)> {
        let mut socket = UnixStream::connect(self.api_socket())?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let body = body.map(Value::to_string).unwrap_or_default();
        write!(
            socket,
            "{method} {path} HTTP/1.1\r\nHost: vgpud\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer)?;
        let end = answer.windows(4).position(|window| window == b"\r\n\r\n");
        let body = answer.split_off(end.context("The answer has no end of its head")? + 4);
        let head = String::from_utf8(answer)?;
        let status = head.split(' ').nth(1).context("The answer has no status")?.parse()?;
        Ok((status, body))
    }

    /// A request that is to succeed; its answer, `null` where it has no body.
    pub fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let (status, answer) = self.request(method, path, body)?;
        ensure!(
            (200..300).contains(&status),
            "{method} {path}: {status} {}",
            String::from_utf8_lossy(&answer)
        );
        if answer.is_empty() { Ok(Value::Null) } else { Ok(serde_json::from_slice(&answer)?) }
    }

    /// A request that is to be refused; the status, code and message.
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

    /// `GET` of a path.
    pub fn get(&self, path: &str) -> Result<Value> {
        self.call("GET", path, None)
    }

    /// Defines a vGPU, or starts a transient one: see `CreateVgpu`. The answer's uuid.
    pub fn create(&self, request: &Value) -> Result<String> {
        let vgpu = self.call("POST", "/v1/vgpus", Some(request))?;
        Ok(vgpu["uuid"].as_str().context("The answer has no uuid")?.to_owned())
    }

    /// What the manager knows of a vGPU.
    pub fn show(&self, uuid: &str) -> Result<Value> {
        self.get(&format!("/v1/vgpus/{uuid}"))
    }

    /// Processes that this manager or an earlier one in these folders wrote down: workers and software GPUs.
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

/// True while there is a process that has not ended (one that nobody has waited for yet has ended).
pub fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
}
