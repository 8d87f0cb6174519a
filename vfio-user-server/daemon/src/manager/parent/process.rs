//! GPU process of a parent: start, adoption, loss and end.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use ipc::seqpacket::{SeqPacket, SeqPacketListener};
use mdev_core::gpu::{Gpu, GpuError};
use mdev_core::ids::VgpuId;
use mdev_core::partition::Partitions;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use vendor_backends::mediator::MediatedGpu;

use super::Parent;
use super::connection::Connection;
use crate::backend::ParentConfig;
use crate::child_logs;
use crate::manager::cgroups::{self, Member};
use crate::manager::environment::Environment;
use crate::manager::run_dir::{self, RunDir};
use crate::manager::sockets;
use crate::manager::watcher::{Generation, Watched};
use crate::spawn::{self, KILL_TIMEOUT, Limits, Process, ProcessRecord};
use mdev_core::untrusted::one_line;
use vgpud_host::users::Account;

/// Limit of the time that a new GPU process takes to accept a connection. The reset of a device
/// takes most of it.
const START_TIMEOUT: Duration = Duration::from_secs(4);

/// Limit of the time that a GPU process takes to exit after it closed its connection.
const CLOSED_EXIT_TIMEOUT: Duration = Duration::from_millis(200);

/// Limit of the time in which a closed connection to the GPU is followed by the exit status of its
/// process.
const STATUS_TIMEOUT: Duration = Duration::from_millis(20);

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

/// Reason of the failure of a vGPU whose context is lost.
const CONTEXT_LOST: &str = "The process with its memory has ended; stop it and start it again";

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
pub type Opened = (Option<Process>, Box<dyn Gpu>);

/// Result of opening a GPU.
pub type OpenResult = Result<Opened, GpuError>;

/// GPU process of a lost GPU, which was killed and has not ended yet.
#[derive(Debug)]
pub struct EndingProcess {
    process: Process,
    generation: Generation,
    /// When the GPU is opened again, if the process has ended.
    start_at: Instant,
}

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
        if self.connection.retry_at().is_none_or(|at| at > now) {
            return;
        }
        if let Some(old) = self.ending.take() {
            log::error!(
                "Process {} of lost parent {} was killed and does not end; starting another beside it",
                old.process.pid(),
                self.name()
            );
            old.process.leave();
        }
        let generation = env.watcher.generation();
        self.generation = generation;
        // A new GPU process takes time, in which the manager serves its other parents.
        let reason = self.connection.take_reason();
        self.connection = Connection::Closed { retry_at: None, reason };
        let (config, run_dir, user) = (self.config.clone(), env.run_dir.clone(), env.worker_user);
        let name = self.name().to_owned();
        let begun = env.watcher.run_aside(
            "gpu-start",
            move || open(&config, &run_dir, user),
            move |manager, result| manager.gpu_opened(&name, generation, result),
        );
        if let Err(error) = begun {
            self.opened(env, generation, Err(error.into()));
        }
    }

    /// Opens the GPU, at the start of the manager.
    fn start(&mut self, env: &Environment) {
        let generation = env.watcher.generation();
        self.generation = generation;
        let opened = open(&self.config, &env.run_dir, env.worker_user);
        self.opened(env, generation, opened);
    }

    /// Takes the result of opening the GPU. A failure is logged, and the start repeated after a
    /// pause.
    pub fn opened(&mut self, env: &Environment, generation: Generation, opened: OpenResult) {
        if self.generation != generation {
            // Another start has overtaken this one.
            if let Ok((Some(process), _)) = opened {
                process.kill();
            }
            return;
        }
        match opened {
            Ok((process, gpu)) => {
                match &process {
                    Some(process) => {
                        log::info!("Parent {} runs in process {}", self.name(), process.pid());
                    }
                    None => log::info!("Parent {} is a {}", self.name(), gpu.describe().name),
                }
                self.connected(process, gpu);
                self.watch(env, generation);
                self.readmit_contexts(env);
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
            env.cgroups.place(
                Member::Gpu(self.name()),
                process.pid(),
                cgroups::Limits::GPU_PROCESS,
            );
        }
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
        child_logs::resume(&run_dir.parent_log(self.name()), log_name(self.name()));
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
        } else if let Some(mut old) = self.ending.take_if(|ending| ending.generation == generation)
        {
            let status = old.process.status().unwrap_or_else(|| "exit status unknown".into());
            log::info!("The process of lost parent {} has ended: {status}", self.name());
            old.process.leave();
            if let Connection::Closed { retry_at: Some(at), .. } = &mut self.connection {
                *at = old.start_at;
            }
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

    /// Handles the loss of the GPU: its vGPUs fail, its process is killed, and the GPU is started
    /// again when that has ended.
    pub(super) fn lose(&mut self, reason: &str) {
        let connection = std::mem::take(&mut self.connection);
        let lifetime = connection.since().map_or(Duration::ZERO, |since| since.elapsed());
        let start_at = Instant::now() + self.backoff.after_death(lifetime);
        let mut retry_at = start_at;
        let mut reason = reason.to_owned();
        if let Some(mut process) = connection.into_process() {
            process.wait(STATUS_TIMEOUT);
            if let Some(status) = process.status() {
                reason = format!("{reason} ({status})");
            } else if !process.has_ended() {
                process.signal(Signal::SIGKILL);
                let generation = self.generation;
                self.ending = Some(EndingProcess { process, generation, start_at });
                retry_at = start_at.max(Instant::now() + KILL_TIMEOUT);
            }
        }
        log::error!("Parent {} is lost: {reason}", self.name());
        self.generation = 0;
        self.partitions = Partitions::new(self.partitions.total());
        self.scheduling.reset(None);
        self.screen.clear_status();
        self.connection = Connection::Closed { retry_at: Some(retry_at), reason: Some(reason) };
        // A vGPU with a context pauses until there is a GPU process again.
        for vgpu in self.vgpus.values_mut().filter(|vgpu| vgpu.context.is_none()) {
            vgpu.fail(GPU_LOST);
        }
    }

    /// Handles the end of a context.
    pub fn context_exited(&mut self, id: VgpuId, generation: Generation) {
        let Some(vgpu) = self.vgpus.get_mut(&id) else { return };
        let ended = vgpu.context.take_if(|context| context.generation == generation);
        if let Some(mut context) = ended {
            let status = context.process.status().unwrap_or_else(|| "exit status unknown".into());
            // A context ends after its worker.
            log::info!("The context of vGPU {id} has ended ({status})");
            context.process.leave();
            let worker = vgpu.state().worker();
            if worker.is_some_and(|worker| !worker.process.wait(STATUS_TIMEOUT)) {
                vgpu.fail(CONTEXT_LOST);
            }
        }
    }

    /// Marks a vGPU as failed because its worker reports the loss of its GPU.
    pub(super) fn fail_for_lost_gpu(&mut self, vgpu: VgpuId) {
        if let Some(vgpu) = self.vgpus.get_mut(&vgpu) {
            vgpu.fail(GPU_LOST);
        }
    }

    /// Closes the GPU, and tells the GPU process to exit. Returns it.
    pub fn close(&mut self) -> Option<Process> {
        // The connection closes before the process is told to exit.
        let process = std::mem::take(&mut self.connection).into_process()?;
        process.signal(Signal::SIGTERM);
        Some(process)
    }
}

/// Opens the GPU, or starts its GPU process and connects to it.
fn open(config: &ParentConfig, run_dir: &RunDir, user: Account) -> OpenResult {
    if let Some(opened) = config.open() {
        return Ok((None, opened?));
    }
    let name = config.name.as_str();
    let (process, startup_error) = spawn_process(config, run_dir, user)?;
    match connect(run_dir, name) {
        Ok(gpu) => {
            let record = Record {
                process: process.record()?,
                vram_bytes: config.vram_bytes(),
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
fn spawn_process(
    config: &ParentConfig,
    run_dir: &RunDir,
    user: Account,
) -> io::Result<(Process, File)> {
    let name = config.name.as_str();
    sockets::create_private_dir(&run_dir.parent(name))?;
    let admin = SeqPacketListener::bind(&run_dir.admin_socket(name))?;
    let startup_error = File::from(memfd_create("startup-error", MFdFlags::MFD_CLOEXEC)?);
    let (args, starts_as) = config.gpu_process(user);
    let fds = [admin.as_fd(), startup_error.as_fd()];
    let limits = Limits {
        files: MAX_FILES,
        threads: None,
        may_lock_memory: true,
        // Its end takes the GPU from all vGPUs of the parent.
        is_oom_protected: true,
        ends_with_parent: false,
        user: starts_as,
    };
    let log = child_logs::create(&run_dir.parent_log(name), log_name(name))?;
    let process = spawn::role(name, &args, &fds, Some(log), limits)?;
    Ok((process, startup_error))
}

/// Returns the name of a parent's GPU process in the log.
fn log_name(parent: &str) -> String {
    format!("GPU process of {parent}")
}

/// Reads the message of a GPU process that failed to start.
fn read_startup_error(file: File) -> Option<String> {
    let mut file = file;
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(MAX_STARTUP_ERROR).read_to_string(&mut text).ok()?;
    // The hardware's library may have written the text.
    Some(one_line(&text, MAX_STARTUP_ERROR as usize)).filter(|text| !text.is_empty())
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
