//! GPU process of a parent: start, adoption, loss and end.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use mdev_core::gpu::{Gpu, GpuError};
use mdev_core::partition::Partitions;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use vendor_backends::mediator::MediatedGpu;
use vendor_backends::seqpacket::{SeqPacket, SeqPacketListener};

use super::Parent;
use super::connection::Connection;
use crate::manager::environment::Environment;
use crate::manager::run_dir::{self, RunDir};
use crate::manager::sockets;
use crate::manager::watcher::{Generation, Watched};
use crate::spawn::{self, Limits, Process, ProcessRecord};
use vgpud_host::users::Account;

/// Limit of the time that a new GPU process takes to accept a connection. The reset of a device
/// takes most of it.
const START_TIMEOUT: Duration = Duration::from_secs(4);

/// Limit of the time that a GPU process takes to exit after it closed its connection.
const CLOSED_EXIT_TIMEOUT: Duration = Duration::from_millis(200);

/// Limit of the time that a GPU process takes to exit after SIGTERM.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Shortest pause before a failed start is repeated.
const MIN_START_PAUSE: Duration = Duration::from_millis(50);

/// Limit of the error message of a GPU process that fails to start, in bytes.
const MAX_STARTUP_ERROR: u64 = 4096;

/// Limit of open files of a GPU process: a few for each vGPU, and one for each range of guest
/// memory.
const MAX_FILES: u64 = 65_536;

/// Reason of the failure of vGPUs whose GPU is lost.
const GPU_LOST: &str = "Its GPU is lost; stop it and start it again";

/// Contents of `run.json` in the folder of a parent: what a later manager needs to adopt the GPU
/// process.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Record {
    process: ProcessRecord,
    vram_bytes: u64,
    /// Description of the GPU, for a manager that does not support the process' version.
    #[serde(default)]
    description: Option<serde_json::Value>,
}

/// Opened GPU with its GPU process, if the backend has one.
type Opened = (Option<Process>, Box<dyn Gpu>);

/// Text of a GPU's error without the words that precede every loss.
fn reason_of(error: GpuError) -> String {
    match error {
        GpuError::Lost(reason) => reason,
        other => other.to_string(),
    }
}

impl Parent {
    /// Takes over a running GPU, or else starts the GPU. Returns true if it was running.
    pub fn begin(&mut self, env: &Environment) -> bool {
        let was_running = self.adopt_gpu(&env.run_dir);
        if was_running {
            let generation = env.watcher.generation();
            self.watch(env, generation);
        } else {
            self.start(env);
        }
        was_running
    }

    /// Starts the GPU if that is due.
    pub fn start_if_due(&mut self, env: &Environment, now: Instant) {
        if self.connection.retry_at().is_some_and(|at| at <= now) {
            self.start(env);
        }
    }

    /// Opens the GPU. A failure is logged, and the start repeated after a pause.
    fn start(&mut self, env: &Environment) {
        let generation = env.watcher.generation();
        match self.open(&env.run_dir, env.worker_user) {
            Ok((process, gpu)) => {
                match &process {
                    Some(process) => {
                        log::info!("Parent {} runs in process {}", self.name(), process.pid());
                    }
                    None => log::info!("Parent {} is a {}", self.name(), gpu.describe().name),
                }
                self.connected(process, gpu);
                self.watch(env, generation);
            }
            Err(error) => {
                let pause = self.backoff.after_death(Duration::ZERO).max(MIN_START_PAUSE);
                let reason = reason_of(error);
                log::error!("Cannot start parent {}: {reason}", self.name());
                let retry_at = Some(Instant::now() + pause);
                self.connection = Connection::Closed { retry_at, reason: Some(reason) };
            }
        }
    }

    fn watch(&mut self, env: &Environment, generation: Generation) {
        self.generation = generation;
        if let Some(process) = self.connection.process() {
            env.watcher.watch(process, Watched::Gpu(self.name().to_owned(), generation));
        }
    }

    /// Opens the GPU, or starts its GPU process and connects to it.
    fn open(&self, run_dir: &RunDir, user: Account) -> Result<Opened, GpuError> {
        if let Some(opened) = self.config.open() {
            return Ok((None, opened?));
        }
        let name = self.name();
        let (process, startup_error) = self.spawn(run_dir, user)?;
        match connect(run_dir, name) {
            Ok(gpu) => {
                let record = Record {
                    process: process.record()?,
                    vram_bytes: self.config.vram_bytes(),
                    description: serde_json::to_value(gpu.describe()).ok(),
                };
                run_dir::write_record(&run_dir.parent(name), &record)?;
                Ok((Some(process), Box::new(gpu)))
            }
            Err(error) => {
                // The process' own message says most, its exit status more than the failed
                // connection.
                let status = process.end(CLOSED_EXIT_TIMEOUT).unwrap_or_default();
                if let Some(error) = read_startup_error(startup_error) {
                    return Err(GpuError::Lost(error));
                }
                Err(GpuError::Lost(format!("{} ({status})", reason_of(error))))
            }
        }
    }

    /// Starts the GPU process. Returns it with the file that receives its startup error.
    fn spawn(&self, run_dir: &RunDir, user: Account) -> io::Result<(Process, File)> {
        let name = self.name();
        sockets::create_private_dir(&run_dir.parent(name))?;
        let admin = SeqPacketListener::bind(&run_dir.admin_socket(name))?;
        let startup_error = File::from(memfd_create("startup-error", MFdFlags::MFD_CLOEXEC)?);
        let (args, starts_as) = self.config.gpu_process(user);
        let fds = [admin.as_fd(), startup_error.as_fd()];
        let limits = Limits {
            files: MAX_FILES,
            threads: None,
            may_lock_memory: true,
            // Its end takes the GPU from all vGPUs of the parent.
            is_oom_protected: true,
            user: starts_as,
        };
        let process = spawn::role(name, &args, &fds, limits)?;
        Ok((process, startup_error))
    }

    /// Takes over the GPU that an earlier manager started. Returns false if there is none; a
    /// process that does not answer is ended.
    fn adopt_gpu(&mut self, run_dir: &RunDir) -> bool {
        // A GPU without a GPU process is open to each manager.
        match self.config.open() {
            Some(Ok(gpu)) => {
                self.connected(None, gpu);
                return true;
            }
            Some(Err(_)) => return false,
            None => {}
        }
        let folder = run_dir.parent(self.name());
        let Some(record) = run_dir::read_record::<Record>(&folder) else { return false };
        let Some(process) = Process::find(record.process) else {
            run_dir::remove(&folder);
            return false;
        };
        match connect(run_dir, self.name()) {
            Ok(gpu) => {
                if record.vram_bytes != self.config.vram_bytes() {
                    log::warn!(
                        "Parent {} keeps its {} MiB of video memory until it is started again",
                        self.name(),
                        record.vram_bytes >> 20
                    );
                }
                log::info!("Adopted parent {}", self.name());
                self.connected(Some(process), Box::new(gpu));
                true
            }
            // VMs use the GPU, so the process is left running.
            Err(GpuError::Unsupported(what)) => {
                log::warn!(
                    "The GPU process of {} continues for its VMs: it has {what}",
                    self.name()
                );
                self.partitions = Partitions::new(record.vram_bytes);
                self.description =
                    record.description.and_then(|of| serde_json::from_value(of).ok());
                self.connection = Connection::Foreign { process, since: Instant::now() };
                true
            }
            Err(error) => {
                log::warn!("Replacing the GPU process of {}: {error}", self.name());
                process.end(Duration::ZERO);
                run_dir::remove(&folder);
                false
            }
        }
    }

    /// Begins to use a GPU that has been opened.
    fn connected(&mut self, process: Option<Process>, mut gpu: Box<dyn Gpu>) {
        self.screen.restore_rotation(&mut *gpu);
        let description = gpu.describe().clone();
        self.partitions = Partitions::new(description.vram_bytes);
        self.scheduling.reset(Some(&description));
        self.description = Some(description);
        self.connection = Connection::Ready { gpu, process, since: Instant::now() };
    }

    /// Handles the end of a GPU process.
    pub fn gpu_exited(&mut self, generation: Generation) {
        if self.generation == generation {
            self.lose("its process has ended");
        }
    }

    /// Ends a GPU process of an unsupported version once it has no vGPU left. The process is
    /// replaced when it has ended.
    pub fn replace_foreign(&self) {
        if let Connection::Foreign { process, .. } = &self.connection
            && self.vgpus.is_empty()
        {
            log::info!(
                "The process of {} is of another version and has no vGPU left; replacing it",
                self.name()
            );
            process.signal(Signal::SIGTERM);
        }
    }

    /// Handles the loss of the GPU: its vGPUs fail, and the GPU is started again.
    pub(super) fn lose(&mut self, reason: &str) {
        let connection = std::mem::take(&mut self.connection);
        let lifetime = connection.since().map_or(Duration::ZERO, |since| since.elapsed());
        let status = connection.into_process().and_then(|process| process.end(Duration::ZERO));
        let reason = match status {
            Some(status) => format!("{reason} ({status})"),
            None => reason.to_owned(),
        };
        log::error!("Parent {} is lost: {reason}", self.name());
        self.generation = 0;
        self.partitions = Partitions::new(self.partitions.total());
        self.scheduling.reset(None);
        self.screen.clear_status();
        let retry_at = Some(Instant::now() + self.backoff.after_death(lifetime));
        self.connection = Connection::Closed { retry_at, reason: Some(reason) };
        for vgpu in self.vgpus.values_mut() {
            vgpu.fail(GPU_LOST);
        }
    }

    /// Marks a vGPU as failed because its worker reports the loss of its GPU.
    pub(super) fn fail_for_lost_gpu(&mut self, vgpu: mdev_core::ids::VgpuId) {
        if let Some(vgpu) = self.vgpus.get_mut(&vgpu) {
            vgpu.fail(GPU_LOST);
        }
    }

    /// Closes the GPU and ends the GPU process.
    pub fn stop(&mut self, run_dir: &RunDir) {
        // The connection closes before the process is told to exit.
        if let Some(process) = std::mem::take(&mut self.connection).into_process() {
            process.signal(Signal::SIGTERM);
            process.end(EXIT_TIMEOUT);
        }
        run_dir::remove(&run_dir.parent(self.name()));
    }
}

/// Reads the message of a GPU process that failed to start.
fn read_startup_error(file: File) -> Option<String> {
    let mut file = file;
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(MAX_STARTUP_ERROR).read_to_string(&mut text).ok()?;
    Some(text).filter(|text| !text.is_empty())
}

fn connect(run_dir: &RunDir, name: &str) -> Result<MediatedGpu, GpuError> {
    let path = run_dir.admin_socket(name);
    let socket = SeqPacket::connect_with_timeout(&path, START_TIMEOUT).map_err(|error| {
        io::Error::new(error.kind(), format!("Cannot connect to {}: {error}", path.display()))
    })?;
    MediatedGpu::open(socket)
}

/// Ends the GPU process recorded in a folder, and removes the folder.
pub fn end_recorded(folder: &Path) {
    if let Some(process) =
        run_dir::read_record::<Record>(folder).and_then(|record| Process::find(record.process))
    {
        process.signal(Signal::SIGTERM);
        process.end(EXIT_TIMEOUT);
    }
    run_dir::remove(folder);
}
