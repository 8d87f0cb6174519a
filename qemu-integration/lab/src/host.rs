//! Host side of a run: a separate `vgpud`, controlled by the real `vgpuctl`.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::build::Programs;
use crate::cleanup::{Process, Scratch, is_running};

const START_LIMIT: Duration = Duration::from_secs(10);
/// Environment variable that marks the daemon's processes, so that none remains after a test kills
/// the manager.
const MARK: &str = "TESSERA_LAB";

/// Running `vgpud` with one software GPU, ended when dropped.
#[derive(Debug)]
pub struct Host {
    daemon: Option<Process>,
    programs: Programs,
    scratch: Scratch,
    parents: Vec<String>,
}

/// Kind of GPU to create vGPUs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Parent {
    /// The software GPU.
    Soft,
    /// NVIDIA GPU of this machine.
    Nvidia,
}

impl Parent {
    /// Returns the value for `vgpud --parent`.
    pub const fn argument(self) -> &'static str {
        match self {
            Self::Soft => "soft:soft0",
            Self::Nvidia => "nvidia",
        }
    }
}

/// vGPU type of a parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MdevType {
    /// Name of the parent.
    pub parent: String,
    /// Name of the type, such as `SOFT-1Q`.
    pub name: String,
    /// Whether the type has a display head.
    pub head: bool,
}

impl Host {
    /// Starts a daemon with parents such as `soft:soft0`.
    pub fn start(programs: &Programs, parents: &[&str]) -> Result<Self> {
        let mut host = Self {
            daemon: None,
            programs: programs.clone(),
            scratch: Scratch::new()?,
            parents: parents.iter().map(|parent| (*parent).to_owned()).collect(),
        };
        host.start_daemon()?;
        Ok(host)
    }

    /// Starts the manager, initially or after [`Host::kill_daemon`].
    pub fn start_daemon(&mut self) -> Result<()> {
        let mut command = Command::new(self.programs.find("vgpud")?);
        command.arg("run").arg("--run-dir").arg(self.run_dir());
        command.arg("--config-dir").arg(self.scratch.path().join("config"));
        for parent in &self.parents {
            command.args(["--parent", parent]);
        }
        let log = fs::File::options().create(true).append(true).open(self.log_path())?;
        command.env(MARK, self.scratch.path());
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut daemon = Process::spawn(command, Signal::SIGTERM)?;
        let deadline = Instant::now() + START_LIMIT;
        while UnixStream::connect(self.api_socket()).is_err() {
            if daemon.try_wait()?.is_some() || Instant::now() > deadline {
                bail!("vgpud did not start: {}", self.log());
            }
            thread::sleep(Duration::from_millis(5));
        }
        self.daemon = Some(daemon);
        Ok(())
    }

    /// Kills the manager by SIGKILL. Its workers continue to run.
    pub fn kill_daemon(&mut self) -> Result<()> {
        let daemon = self.daemon.take().context("The manager is not running")?;
        kill(daemon.pid(), Signal::SIGKILL)?;
        Ok(())
    }

    /// Returns a folder that is removed with the host.
    pub fn folder(&self) -> &Path {
        self.scratch.path()
    }

    /// Returns the manager's folder.
    pub fn run_dir(&self) -> PathBuf {
        self.scratch.path().join("run")
    }

    fn api_socket(&self) -> PathBuf {
        self.run_dir().join("control.sock")
    }

    fn log_path(&self) -> PathBuf {
        self.scratch.path().join("vgpud.log")
    }

    /// Returns the daemon's log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Returns the path of a vGPU's socket.
    pub fn vgpu_socket(&self, uuid: &str) -> PathBuf {
        self.run_dir().join("vgpus").join(uuid).join("vfio.sock")
    }

    /// Returns a command that runs `vgpuctl` for this daemon.
    pub fn command(&self, args: &[&str]) -> Result<Command> {
        let mut command = Command::new(self.programs.find("vgpuctl")?);
        command.arg("--socket").arg(self.api_socket()).args(args).stdin(Stdio::null());
        Ok(command)
    }

    /// Runs `vgpuctl` and returns its output.
    pub fn vgpuctl(&self, args: &[&str]) -> Result<String> {
        let output = self.command(args)?.output().context("Cannot run vgpuctl")?;
        if !output.status.success() {
            let complaint = String::from_utf8_lossy(&output.stderr);
            bail!("`vgpuctl {}` failed: {}", args.join(" "), complaint.trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a `vgpuctl` command that prints JSON and parses the output.
    pub fn vgpuctl_json(&self, args: &[&str]) -> Result<Value> {
        let text = self.vgpuctl(args)?;
        serde_json::from_str(&text)
            .with_context(|| format!("`vgpuctl {}` printed no JSON: {text}", args.join(" ")))
    }

    /// Returns the types that the parents offer.
    pub fn types(&self) -> Result<Vec<MdevType>> {
        let parents = self.vgpuctl_json(&["types", "--output", "json"])?;
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let offered = |parent: Value| {
            let name = text(&parent["parent"]);
            list(&parent["types"]).into_iter().map(move |one| MdevType {
                parent: name.clone(),
                name: text(&one["name"]),
                head: one["heads"].as_u64().is_some_and(|heads| heads > 0),
            })
        };
        Ok(list(&parents).into_iter().flat_map(offered).collect())
    }

    /// Returns a type with this much video memory (`1` is 1 GiB), preferably with a display head.
    pub fn type_of_size(&self, size: &str) -> Result<MdevType> {
        let types = self.types()?;
        let suffixes = [format!("-{size}Q"), format!("-{size}C")];
        let mut found = suffixes.iter().flat_map(|suffix| {
            types.iter().filter(move |offered| offered.name.ends_with(suffix.as_str()))
        });
        let found = found.next().with_context(|| format!("No GPU here offers {size} GiB"))?;
        Ok(found.clone())
    }

    /// Returns the type with this much video memory and no display: the guest's module leaves a
    /// vGPU with a display to the display driver.
    pub fn type_without_display(&self, size: &str) -> Result<MdevType> {
        let suffix = format!("-{size}C");
        let found = self.types()?.into_iter().find(|offered| offered.name.ends_with(&suffix));
        found.with_context(|| format!("No GPU here offers {size} GiB without a display"))
    }

    /// Defines and starts a vGPU with a share of the GPU in percent.
    pub fn start_vgpu(&self, uuid: &str, mdev_type: &str, core: Option<u8>) -> Result<PathBuf> {
        let types = self.types()?;
        let found = types.iter().find(|offered| offered.name == mdev_type);
        let found = found.with_context(|| {
            let names: Vec<_> = types.iter().map(|offered| offered.name.as_str()).collect();
            format!("No type {mdev_type}; available types: {}", names.join(", "))
        })?;
        self.vgpuctl(&["define", "-u", uuid, "-p", &found.parent, "-t", mdev_type])?;
        if let Some(core) = core {
            let core = core.to_string();
            self.vgpuctl(&["modify", "-u", uuid, "--addattr", "core", "--value", &core])?;
        }
        self.vgpuctl(&["start", "-u", uuid])?;
        Ok(self.vgpu_socket(uuid))
    }

    /// Returns the counters of a running vGPU.
    pub fn stats(&self, uuid: &str) -> Result<Value> {
        let stats = self.vgpuctl_json(&["stats", "--output", "json"])?;
        let all = stats["vgpus"].as_array().into_iter().flatten();
        let found = all.into_iter().find(|vgpu| vgpu["uuid"] == uuid);
        Ok(found
            .with_context(|| format!("No statistics of {uuid}: the vGPU is not running"))?
            .clone())
    }

    /// Returns the engine time that a running vGPU has used, in nanoseconds.
    pub fn engine_ns(&self, uuid: &str) -> Result<u64> {
        self.stats(uuid)?["engine_ns"].as_u64().context("The statistics have no engine_ns")
    }

    /// Returns the manager's data about a vGPU.
    pub fn vgpu(&self, uuid: &str) -> Result<Value> {
        let list = self.vgpuctl_json(&["list", "--output", "json"])?;
        let found = list.as_array().into_iter().flatten().find(|vgpu| vgpu["uuid"] == uuid);
        Ok(found.with_context(|| format!("No vGPU {uuid}"))?.clone())
    }

    /// Saves the screen of a vGPU.
    pub fn screenshot(&self, uuid: &str, file: &Path) -> Result<()> {
        self.vgpuctl(&["screenshot", "-u", uuid, "--file", &file.to_string_lossy()]).map(drop)
    }

    /// Returns all processes of this daemon.
    pub fn processes(&self) -> Vec<Pid> {
        let mark = format!("{MARK}={}", self.scratch.path().display());
        let marked = |pid: &i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes())
        };
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        pids.filter(marked).map(Pid::from_raw).filter(|pid| is_running(*pid)).collect()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Orderly first, then any remaining processes, for example after the manager was killed.
        drop(self.daemon.take());
        for pid in self.processes() {
            let _ = kill(pid, Signal::SIGKILL);
        }
    }
}
