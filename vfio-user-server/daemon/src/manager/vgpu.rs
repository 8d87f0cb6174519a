//! A started vGPU: its definition, its state and its worker.
//!
//! * [`context`]: the process with its memory and its engine
//! * [`lifecycle`]: states, and the events that change them
//! * [`worker`]: the worker's process

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mdev_core::definition::{Definition, Settings, VgpuName};
use mdev_core::device::{DisplayLimits, FunctionSpec};
use mdev_core::gpu::Admission;
use mdev_core::ids::VgpuId;
use mdev_core::profile::Profile;
use mdev_core::sched::Core;
use mdev_core::units::GIB;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::backoff::Backoff;
use super::environment::Environment;
use super::run_dir::{self, RunDir};
use super::watcher::{Generation, Watched};
use super::{ClientReport, Result, sockets};
use crate::log_limiter::LogLimiter;
use crate::spawn::{Process, ProcessRecord};
use crate::vgpu_names;
use crate::worker_protocol::{ProgramsSpec, VERSION, WorkerSpec};
use vgpud_api::{AttachedClient, ErrorCode, ErrorDetail};
use vgpud_host::users::Account;

pub mod context;
pub mod lifecycle;
pub mod worker;

use context::Context;
use lifecycle::{Event, Lifecycle, State};
use worker::Worker;

/// Limit of the time that a worker takes to exit. The last request of its VM takes microseconds.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// The same for each other vGPU that is stopped at the time, and at most: a GPU's driver frees one
/// after another.
const EXIT_TIMEOUT_PER_OTHER: Duration = Duration::from_millis(100);
const MAX_EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Limit of the time that a killed worker takes to end, before a request to stop is answered.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// The same for each GiB of guest memory that the GPU's driver has to release, and at most.
const RELEASE_TIMEOUT_PER_GIB: Duration = Duration::from_millis(500);
const MAX_RELEASE_TIMEOUT: Duration = Duration::from_secs(50);

/// Shortest pause before a start is repeated for which the host had no resources.
const MIN_POSTPONEMENT: Duration = Duration::from_millis(200);

/// Why a killed worker does not end, and what follows.
const STUCK: &str = "it waits in the kernel, for a file or a device of its VM or for the GPU's driver; the vGPU is removed as soon as the process ends";

/// Limit of restarts in a row.
const MAX_DEATHS: u32 = 8;

/// Contents of `run.json` in the folder of a vGPU: what a later manager needs to adopt it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// Worker.
    pub process: ProcessRecord,
    /// Context, on a GPU that has contexts.
    #[serde(default)]
    pub context: Option<ProcessRecord>,
    /// Name of the parent.
    pub parent: String,
    /// Definition in force, live changes included.
    pub definition: Definition,
}

/// Returns the limit of the time that the GPU's driver takes to release guest memory.
fn release_timeout(imported_bytes: u64) -> Duration {
    let gib = u32::try_from(imported_bytes / GIB).unwrap_or(u32::MAX);
    RELEASE_TIMEOUT_PER_GIB.saturating_mul(gib).min(MAX_RELEASE_TIMEOUT)
}

/// Returns the limit of the time that a worker takes to exit while `others` do, too.
fn exit_timeout(others: usize) -> Duration {
    let others = u32::try_from(others).unwrap_or(u32::MAX);
    let timeout = EXIT_TIMEOUT_PER_OTHER.saturating_mul(others).saturating_add(EXIT_TIMEOUT);
    timeout.min(MAX_EXIT_TIMEOUT)
}

/// Request that waits for the end of a vGPU, or for the reason why it does not end.
pub type StopWaiter = oneshot::Sender<Result<()>>;

/// Running worker that an earlier manager started.
#[derive(Debug)]
pub enum Found {
    /// It answers, and reports its client.
    Answering(Option<AttachedClient>),
    /// It is of an unsupported version, for this reason.
    Foreign(String),
    /// It does not answer. Whether a client is attached is unknown.
    Silent,
}

/// Result of a worker's death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterDeath {
    /// The vGPU was stopping and is to be removed.
    Stopped,
    /// The vGPU had failed before; nothing changes on its GPU.
    FailedBefore,
    /// The worker is to be started again. Its client on the GPU is void.
    Restarting,
    /// The worker is not started again. Its place on the GPU is free.
    GivenUp,
}

/// vGPU that was started and not stopped.
#[derive(Debug)]
pub struct Vgpu {
    /// UUID.
    pub id: VgpuId,
    /// Name of the parent.
    pub parent: String,
    /// Type.
    pub profile: Profile,
    /// Definition in force, live changes included.
    pub definition: Definition,
    /// Attributes of the definition, parsed.
    pub settings: Settings,
    owner: Account,
    lifecycle: Lifecycle<Worker>,
    backoff: Backoff,
    /// Context, on a GPU that has contexts.
    pub context: Option<Context>,
    /// Requests that wait until the vGPU is removed.
    stop_waiters: Vec<StopWaiter>,
    log_limiter: LogLimiter,
}

/// Parses the attributes of a definition.
pub fn settings(definition: &Definition) -> Result<Settings> {
    definition.attrs.settings().map_err(|error| ErrorDetail::new(ErrorCode::Invalid, error))
}

impl Vgpu {
    /// Creates a vGPU that has no worker yet. `owner` applies to definitions without that
    /// attribute.
    pub fn new(
        id: VgpuId,
        parent: String,
        profile: Profile,
        definition: Definition,
        owner: Account,
    ) -> Result<Self> {
        let settings = settings(&definition)?;
        let owner = sockets::owner_of(&definition, owner)?;
        Ok(Self {
            id,
            parent,
            profile,
            definition,
            settings,
            owner,
            lifecycle: Lifecycle::starting(),
            backoff: Backoff::default(),
            context: None,
            stop_waiters: Vec::new(),
            log_limiter: LogLimiter::new(Instant::now()),
        })
    }

    /// Returns the state.
    pub fn state(&self) -> &State<Worker> {
        self.lifecycle.state()
    }

    /// Returns the name.
    pub fn name(&self) -> Option<VgpuName> {
        self.definition.attrs.name()
    }

    /// Sets or removes the name.
    pub fn rename(&mut self, run_dir: &RunDir, name: Option<&VgpuName>) {
        self.definition.attrs.set_name(name);
        vgpu_names::set(self.id, name.cloned());
        if let Err(error) = self.write_record(run_dir) {
            log::warn!("A later manager will not know the name of vGPU {}: {error}", self.id);
        }
    }

    /// Returns the user that owns the vGPU.
    pub fn owner(&self) -> u32 {
        self.owner.uid
    }

    /// Returns the worker's process ID.
    pub fn pid(&self) -> Option<u32> {
        self.state().worker().map(Worker::pid)
    }

    /// Returns why the worker cannot be queried, if its version is unsupported.
    pub fn foreign(&self) -> Option<&str> {
        self.state().worker()?.foreign.as_deref()
    }

    /// Returns the control socket of a worker that can be queried.
    pub fn control(&self, run_dir: &RunDir) -> Option<PathBuf> {
        let worker = self.state().worker().filter(|worker| worker.foreign.is_none());
        worker.map(|_| run_dir.worker_socket(self.id))
    }

    /// Returns the attached client for log lines: ` (used by process 7)`, or nothing.
    fn user(&self) -> String {
        let client = self.state().client();
        client.map_or_else(String::new, |client| format!(" (used by process {})", client.pid))
    }

    /// Returns true for the worker of that start.
    pub fn has_generation(&self, generation: Generation) -> bool {
        self.state().worker().is_some_and(|worker| worker.generation == generation)
    }

    /// Applies an event that the current state accepts. A refusal is a bug, which is logged.
    fn apply(&mut self, event: Event<Worker>) {
        if let Err(error) = self.lifecycle.apply(event) {
            log::error!("vGPU {}: {error}", self.id);
        }
    }

    /// Writes `run.json`.
    pub fn write_record(&self, run_dir: &RunDir) -> io::Result<()> {
        let Some(worker) = self.state().worker() else { return Ok(()) };
        let record = Record {
            process: worker.process.record()?,
            context: self.context.as_ref().map(|it| it.process.record()).transpose()?,
            parent: self.parent.clone(),
            definition: self.definition.clone(),
        };
        run_dir::write_record(&run_dir.vgpu(self.id), &record)
    }

    fn worker_spec(&self, admission: &Admission) -> WorkerSpec {
        let display = self
            .profile
            .head
            .map(|head| DisplayLimits { max_width: head.max_width, max_height: head.max_height });
        WorkerSpec {
            version: VERSION,
            function: FunctionSpec {
                vgpu: self.id,
                type_name: self.profile.name.clone(),
                display,
                doorbell_mapped: self.settings.doorbell_mapped,
            },
            backend: admission.backend.into(),
            client: admission.spec.clone(),
            parent: self.parent.clone(),
            core: self.settings.share.core.map(Core::get),
            owner: self.owner.uid,
            manager: Account::own().uid,
            programs: self
                .profile
                .programs
                .then(|| ProgramsSpec { name: format!("Tessera {}", self.profile.name) }),
        }
    }

    /// Creates the sockets and starts the worker. The sockets listen before the worker runs, so a
    /// VM can attach as soon as this returns.
    pub fn launch(
        &mut self,
        env: &Environment,
        admission: &Admission,
        user: Account,
    ) -> io::Result<()> {
        let gpu = admission.fd.as_ref().map(AsFd::as_fd);
        vgpu_names::set(self.id, self.name());
        let spec = self.worker_spec(admission);
        let sockets = sockets::listen(&env.run_dir, self.id, self.owner, self.profile.programs)?;
        let label = match self.name() {
            Some(name) => format!("{} {name}", self.id),
            None => self.id.to_string(),
        };
        let user = (user, env.worker_users.are_separate());
        let process = worker::spawn(&env.run_dir, &label, &spec, &sockets, gpu, user)?;
        let (name, pid) = (&self.profile.name, process.pid());
        log::info!("vGPU {} of type {name} runs in process {pid}", self.id);
        let mut worker = self.watched(env, process);
        worker.tie(self.id);
        self.apply(Event::Launched(worker));
        self.write_record(&env.run_dir)
    }

    /// Takes over the worker that an earlier manager started.
    pub fn adopt(&mut self, env: &Environment, process: Process, found: Found) {
        vgpu_names::set(self.id, self.name());
        worker::resume_log(&env.run_dir, self.id);
        let mut worker = self.watched(env, process);
        // A connection to a worker that does not answer may wait.
        if !matches!(found, Found::Silent) {
            worker.tie(self.id);
        }
        self.lifecycle = match found {
            Found::Answering(client) => Lifecycle::adopted(worker, client),
            Found::Silent => Lifecycle::adopted(worker, None),
            Found::Foreign(reason) => {
                worker.foreign = Some(reason);
                Lifecycle::foreign(worker)
            }
        };
    }

    fn watched(&self, env: &Environment, process: Process) -> Worker {
        let generation = env.watcher.generation();
        env.watcher.watch(&process, Watched::Worker(self.id, generation));
        Worker::new(process, generation, env.run_dir.worker_socket(self.id))
    }

    /// Records the client that the worker reported. A report of an earlier worker has no effect.
    pub fn client_reported(&mut self, report: &ClientReport) {
        let client = report.client;
        if self.pid() != Some(report.worker) {
            return;
        }
        let id = self.id;
        if let Some(worker) = self.lifecycle.worker_mut() {
            // One that did not answer when this manager began.
            worker.tie(id);
        }
        if self.state().client() == client {
            return;
        }
        match self.lifecycle.apply(Event::ClientReported(client)) {
            Ok(()) => {
                let user = client.map(|client| format!("in use by process {}", client.pid));
                let user = user.as_deref().unwrap_or("not in use any more");
                if let Some(line) = self.log_limiter.line(format_args!("vGPU {id} is {user}")) {
                    log::info!("{line}");
                }
            }
            // The report was under way while the state changed.
            Err(error) => log::debug!("vGPU {}: {error}", self.id),
        }
    }

    /// Marks the vGPU as failed until it is stopped and started. Its worker continues, so that the
    /// VM sees a device that reports an error instead of a device that vanishes. A vGPU that is
    /// stopping is left as it is.
    pub fn fail(&mut self, reason: &str) {
        if !self.state().is_ending() {
            self.apply(Event::Failed { reason: reason.to_owned() });
        }
    }

    /// Handles the death of the worker.
    pub fn worker_died(&mut self) -> AfterDeath {
        let id = self.id;
        let status = self.lifecycle.worker_mut().and_then(|worker| worker.process.status());
        let status = status.unwrap_or_else(|| "exit status unknown".into());
        match self.state() {
            State::Stopping { .. } | State::Killed { .. } | State::Stuck { .. } => {
                return AfterDeath::Stopped;
            }
            State::Failed { .. } => {
                log::info!("The worker of failed vGPU {id} exited: {status}");
                self.apply(Event::WorkerDied { reason: String::new(), restart_at: None });
                return AfterDeath::FailedBefore;
            }
            _ => {}
        }
        let lived = self.state().worker().map_or(Duration::ZERO, |worker| worker.since.elapsed());
        let pause = self.backoff.after_death(lived);
        let deaths = self.backoff.deaths();
        if deaths <= MAX_DEATHS {
            let user = self.user();
            log::error!("The worker of vGPU {id}{user} died ({status}); starting it again");
            let restart_at = Some(Instant::now() + pause);
            let reason = format!("Its worker died ({status})");
            self.apply(Event::WorkerDied { reason, restart_at });
            return AfterDeath::Restarting;
        }
        let reason = format!("Its worker died {deaths} times in a row ({status})");
        let reason = failure(id, &reason);
        self.apply(Event::WorkerDied { reason, restart_at: None });
        AfterDeath::GivenUp
    }

    /// Marks the vGPU as failed because its worker cannot be started.
    pub fn give_up(&mut self, reason: &str) {
        let reason = failure(self.id, reason);
        self.fail(&reason);
    }

    /// Plans another start of the worker, for which the host had no resources.
    pub fn postpone(&mut self, reason: &str) {
        let pause = self.backoff.after_death(Duration::ZERO).max(MIN_POSTPONEMENT);
        log::warn!("The worker of vGPU {} is started later: {reason}", self.id);
        self.apply(Event::Postponed { at: Instant::now() + pause, reason: reason.to_owned() });
    }

    /// Begins a restart whose time has come.
    pub fn begin_restart(&mut self) {
        self.apply(Event::RestartDue);
    }

    /// Tells the worker to exit, beside so many `others` that exit. Returns false without a worker:
    /// the vGPU is then removed at once.
    pub fn begin_stop(&mut self, waiter: StopWaiter, others: usize) -> bool {
        if let State::Stuck { reason, .. } = self.state() {
            let error = ErrorDetail::new(ErrorCode::Unavailable, self.stuck(reason));
            // The request may have been cancelled.
            let _ = waiter.send(Err(error));
            return true;
        }
        self.stop_waiters.push(waiter);
        if self.state().worker().is_none() {
            return false;
        }
        if !self.state().is_ending() {
            log::info!("Stopping vGPU {}{}", self.id, self.user());
            self.terminate();
            self.apply(Event::Stop { kill_at: Instant::now() + exit_timeout(others) });
        }
        true
    }

    /// Sends SIGTERM to the worker.
    pub fn terminate(&self) {
        if let Some(worker) = self.state().worker() {
            worker.process.signal(Signal::SIGTERM);
        }
    }

    /// Kills a worker that did not exit in time, with `imported_bytes` of guest memory.
    pub fn kill(&mut self, imported_bytes: u64) {
        if let Some(worker) = self.state().worker() {
            log::warn!("The worker of vGPU {} does not exit; killing it", self.id);
            worker.kill();
        }
        let give_up_at = Instant::now() + KILL_TIMEOUT + release_timeout(imported_bytes);
        self.apply(Event::KillDue { give_up_at });
    }

    /// Stops waiting for the end of a killed worker, and tells the requests that wait for it.
    pub fn give_up_stop(&mut self) {
        let pid = self.pid().unwrap_or_default();
        let reason = format!("Its worker, process {pid}, was killed and does not end: {STUCK}");
        log::error!("vGPU {}: {reason}", self.id);
        let error = ErrorDetail::new(ErrorCode::Unavailable, self.stuck(&reason));
        for waiter in std::mem::take(&mut self.stop_waiters) {
            // The request may have been cancelled.
            let _ = waiter.send(Err(error.clone()));
        }
        self.apply(Event::GiveUp { reason });
    }

    fn stuck(&self, reason: &str) -> String {
        format!("vGPU {} is not stopped: {reason}", self.id)
    }

    /// Kills a remaining worker without waiting for its end. Returns the requests that wait for the
    /// end of the vGPU.
    pub fn end(self) -> Vec<StopWaiter> {
        if let Some(worker) = self.lifecycle.into_worker() {
            worker.process.kill();
        }
        self.stop_waiters
    }

    /// Takes the processes of the worker and the context out.
    pub fn into_processes(self) -> (Option<Process>, Option<Process>) {
        let worker = self.lifecycle.into_worker().map(|worker| worker.process);
        (worker, self.context.map(|context| context.process))
    }
}

/// Logs a failure that a restart cannot repair, and returns the text for the API.
fn failure(id: VgpuId, reason: &str) -> String {
    log::error!("vGPU {id} has failed: {reason}");
    format!("{reason}; see the log of vgpud, then stop it and start it again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_waits_longer_for_large_or_many_vms_and_shorter_than_the_timeout_of_vgpuctl() {
        assert_eq!(release_timeout(GIB - 1), Duration::ZERO);
        assert_eq!(release_timeout(32 * GIB), Duration::from_secs(16));
        assert_eq!(exit_timeout(0), Duration::from_secs(1));
        assert_eq!(exit_timeout(31), Duration::from_millis(4100));
        let longest = exit_timeout(usize::MAX) + KILL_TIMEOUT + release_timeout(u64::MAX);
        assert!(longest < Duration::from_secs(60));
    }
}
