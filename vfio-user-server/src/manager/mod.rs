//! The manager: which vGPUs there are, on which physical GPU, at which share. No guest data passes through it.
//!
//! One thread owns all of it ([`Manager`]); the API's tasks and the watchers of processes send it [`Event`]s. Nothing
//! it does waits for a worker. Read it in this order:
//!
//! * [`folders`]: the run directory
//! * `sockets`: whom its sockets belong to
//! * `parent`: a physical GPU, from its start to its loss
//! * `vgpu`: a vGPU that was started: its worker, kept alive
//! * `requests`: what the API asks for
//! * [`ask`]: questions to a worker
//! * `quotas`: what a vGPU may have besides time
//! * `knobs`, `scheduler`: how a parent's time is to be divided, and what the API asks and changes of that
//! * `screens`: who is on physical screens, and whether vGPUs take turns there
//! * `service`: what systemd is told, and what it gives us
//! * `tick`: measuring shares and enforcing them; `stats`: what was measured
//! * `adopt`: finding what an earlier manager left running

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use mdev_core::definition::Store;
use mdev_core::ids::VgpuId;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

use crate::api::model::{ErrorCode, ErrorDetail};
use crate::spawn::Process;
use crate::users::Account;

mod adopt;
pub mod ask;
mod backoff;
mod config;
pub mod folders;
mod knobs;
mod parent;
mod quotas;
mod requests;
mod run;
mod scheduler;
mod screens;
mod service;
mod sockets;
mod stats;
mod tick;
mod vgpu;

pub use config::Config;
pub use requests::{Change, Listed, Screen};
pub use run::run;
pub use stats::Measured;

pub use crate::backend::ParentConfig;

use folders::Folders;
use knobs::Knobs;
use parent::Parent;
use screens::Rotation;
use service::Service;
use vgpu::Vgpu;

/// What came of a request.
pub type Result<T> = std::result::Result<T, ErrorDetail>;

/// All of the manager's state.
#[derive(Debug)]
pub struct Manager {
    folders: Folders,
    store: Store,
    parents: Vec<Parent>,
    vgpus: BTreeMap<VgpuId, Vgpu>,
    watcher: Watcher,
    worker_user: Account,
    owner: Account,
    service: Service,
}

/// What the manager's thread is told.
pub enum Event {
    /// Do this.
    Call(Box<dyn FnOnce(&mut Manager) + Send>),
    /// A process ended.
    Exited(Watched),
    /// Leave.
    End(Ending),
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(_) => f.write_str("Call"),
            Self::Exited(watched) => write!(f, "Exited({watched:?})"),
            Self::End(ending) => write!(f, "End({ending:?})"),
        }
    }
}

/// How the manager leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Everything is stopped.
    Stop,
    /// Workers and software GPUs go on, for the next manager to adopt.
    Leave,
}

/// A process that is watched. The number tells it from the one that took its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watched {
    /// A vGPU's worker.
    Worker(VgpuId, u64),
    /// A parent's software GPU.
    Gpu(String, u64),
}

/// How the rest of the program speaks to the manager.
#[derive(Clone, Debug)]
pub struct Handle {
    events: mpsc::Sender<Event>,
}

impl Handle {
    /// Runs `body` on the manager's thread and waits for what it says.
    pub async fn call<T: Send + 'static>(
        &self,
        body: impl FnOnce(&mut Manager) -> T + Send + 'static,
    ) -> Result<T> {
        let (answer, answered) = oneshot::channel();
        let call = Event::Call(Box::new(move |manager| {
            // Whoever asked may have gone; what was asked for is done all the same.
            let _ = answer.send(body(manager));
        }));
        let gone =
            || ErrorDetail::new(ErrorCode::Unavailable, "vgpud is ending; ask again when it runs");
        self.events.send(call).map_err(|_| gone())?;
        answered.await.map_err(|_| gone())
    }

    /// Tells the manager to leave.
    pub fn end(&self, ending: Ending) {
        // An error means that it has left already.
        let _ = self.events.send(Event::End(ending));
    }
}

/// Tells the manager when processes end.
#[derive(Clone, Debug)]
struct Watcher {
    runtime: tokio::runtime::Handle,
    events: mpsc::Sender<Event>,
    generation: u64,
}

impl Watcher {
    /// A number for a process that is to be started.
    fn generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    fn watch(&self, process: &Process, watched: Watched) {
        match process.watch() {
            Ok(pidfd) => drop(self.runtime.spawn(report_end(pidfd, watched, self.events.clone()))),
            Err(error) => log::error!("Cannot watch process {}: {error}", process.pid()),
        }
    }
}

async fn report_end(pidfd: OwnedFd, watched: Watched, events: mpsc::Sender<Event>) {
    // SAFETY: the descriptor is owned by what it is wrapped in, and stays the same one for as long.
    match unsafe { AsyncFd::register(pidfd) } {
        Ok(pidfd) => {
            if let Err(error) = pidfd.readable().await {
                log::error!("Cannot watch {watched:?}: {error}");
            }
        }
        Err(error) => log::error!("Cannot watch {watched:?}: {error}"),
    }
    // An error means that the manager has left, and nobody wants to know.
    let _ = events.send(Event::Exited(watched));
}

impl Manager {
    fn new(config: &Config, folders: Folders, watcher: Watcher) -> anyhow::Result<Self> {
        // What it says names the place and the cause.
        let store = Store::open(&config.config_dir)
            .map_err(|error| anyhow::anyhow!("{error}; name another with --config-dir"))?;
        let parent = |config: &ParentConfig| {
            let rotation = Rotation::load(store.dir(), &config.name);
            Parent::new(config.clone(), Knobs::load(store.dir(), &config.name), rotation)
        };
        let parents = config.parents.iter().map(parent).collect();
        Ok(Self {
            folders,
            store,
            parents,
            vgpus: BTreeMap::new(),
            watcher,
            worker_user: config.worker_user,
            owner: config.owner,
            service: Service::new(),
        })
    }

    /// Handles events until told to leave.
    fn serve(mut self, inbox: &mpsc::Receiver<Event>) {
        loop {
            let event = match self.next_deadline() {
                None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            match event {
                Ok(Event::Call(body)) => body(&mut self),
                Ok(Event::Exited(Watched::Worker(vgpu, generation))) => {
                    self.worker_exited(vgpu, generation);
                }
                Ok(Event::Exited(Watched::Gpu(parent, generation))) => {
                    self.gpu_exited(&parent, generation);
                }
                Ok(Event::End(Ending::Leave)) => {
                    service::stopping();
                    log::info!("Leaving {} vGPUs to the next manager", self.vgpus.len());
                    return;
                }
                Ok(Event::End(Ending::Stop)) => {
                    service::stopping();
                    return self.stop_all();
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.do_what_is_due(Instant::now());
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let parents = self.parents.iter().filter_map(Parent::deadline);
        let vgpus = self.vgpus.values().filter_map(Vgpu::deadline);
        let readings = self.parents.iter().filter_map(|parent| parent.next_read);
        parents.chain(vgpus).chain(readings).chain(self.service.deadline()).min()
    }

    fn do_what_is_due(&mut self, now: Instant) {
        for index in 0..self.parents.len() {
            if self.parents[index].deadline().is_some_and(|at| at <= now) {
                self.start_parent(index);
            }
        }
        let due = |vgpu: &Vgpu| vgpu.deadline().is_some_and(|at| at <= now);
        let due: Vec<_> = self.vgpus.values().filter(|v| due(v)).map(|v| v.id).collect();
        for vgpu in due {
            self.vgpu_due(vgpu);
        }
        self.read_what_is_due(now);
        self.service.turn(now, self.vgpus.len());
    }

    /// Ends everything in an orderly way: workers first, so that each can say good-bye to its GPU.
    fn stop_all(mut self) {
        log::info!("Stopping {} vGPUs", self.vgpus.len());
        for vgpu in self.vgpus.values() {
            vgpu.terminate();
        }
        let deadline = Instant::now() + Duration::from_secs(2);
        for (id, vgpu) in std::mem::take(&mut self.vgpus) {
            if let Some(process) = vgpu.process {
                process.end(deadline.saturating_duration_since(Instant::now()));
            }
            folders::remove(&self.folders.vgpu(id));
        }
        for parent in &mut self.parents {
            parent.stop(&self.folders);
        }
    }

    fn parent_index(&self, name: &str) -> Result<usize> {
        self.parents.iter().position(|parent| parent.name() == name).ok_or_else(|| {
            let names: Vec<_> = self.parents.iter().map(Parent::name).collect();
            ErrorDetail::new(
                ErrorCode::NotFound,
                format!("There is no parent {name:?}; there are {}", names.join(", ")),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_a_manager_that_has_left_is_told() {
        let (events, inbox) = mpsc::channel();
        drop(inbox);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let error = runtime.block_on(Handle { events }.call(|_| ())).unwrap_err();
        assert_eq!(error.message, "vgpud is ending; ask again when it runs");
    }
}
