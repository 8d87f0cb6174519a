//! The manager: parents, vGPUs, definitions and shares. No guest data passes through the manager.
//!
//! One thread owns the [`Manager`] and handles [`Event`]s from the API's tasks and from the watcher
//! of processes. The thread does not wait for workers. Modules in reading order:
//!
//! * [`handle`], [`watcher`]: events, and where they come from
//! * [`run_dir`], [`sockets`]: the run directory
//! * [`environment`]: what all parents share; [`worker_users`]: users of workers
//! * [`parent`]: a parent with its GPU process, scheduler and vGPUs; [`parents`]: all of them
//! * [`vgpu`]: a started vGPU, its state and its worker
//! * [`definitions`]: persistent definitions
//! * [`requests`]: requests of the control API
//! * `adopt`: start of a manager in a run directory with running processes

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use crate::systemd::{self, Notifier};
use vgpud_api::ErrorDetail;

mod adopt;
mod backoff;
mod config;
mod definitions;
mod environment;
mod handle;
mod parent;
mod parents;
mod requests;
mod run_dir;
pub mod sockets;
mod vgpu;
mod watcher;
mod worker_users;

pub use crate::backend::ParentConfig;
pub use config::Config;
pub use definitions::PlacedDefinition;
pub use handle::{Ending, Event, Handle, Inbox, channel};
pub use requests::{Change, ClientReport, Listed, Measured, Screen};
pub use run_dir::RunDir;
pub use watcher::{Watched, Watcher};

use definitions::Definitions;
use environment::Environment;
use parent::Parent;
use parents::Parents;
use worker_users::WorkerUsers;

/// Result of a request.
pub type Result<T> = std::result::Result<T, ErrorDetail>;

/// Limit of the time that workers take to exit when the manager stops.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// State of the manager.
#[derive(Debug)]
pub struct Manager {
    env: Environment,
    definitions: Definitions,
    parents: Parents,
    notifier: Notifier,
}

impl Manager {
    /// Creates a manager whose parents are not started yet.
    pub fn new(config: &Config, run_dir: RunDir, watcher: Watcher) -> anyhow::Result<Self> {
        let definitions = Definitions::open(&config.config_dir)?;
        let parent = |parent: &ParentConfig| Parent::new(parent.clone(), &config.config_dir);
        let Config { worker_user, worker_uids, owner, .. } = *config;
        let worker_users = WorkerUsers::new(worker_uids, worker_user);
        Ok(Self {
            env: Environment { run_dir, watcher, worker_user, worker_users, owner },
            definitions,
            parents: Parents::new(config.parents.iter().map(parent).collect()),
            notifier: Notifier::from_env(),
        })
    }

    /// Handles events until the manager is told to end.
    pub fn serve(mut self, inbox: &Inbox) {
        loop {
            let event = match self.next_deadline() {
                None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            match event {
                Ok(Event::Call(body)) => body(&mut self),
                Ok(Event::Exited(watched)) => self.exited(watched),
                Ok(Event::End(ending)) => return self.end(ending),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.update(Instant::now());
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let parents = self.parents.iter().filter_map(Parent::deadline);
        parents.chain(self.notifier.deadline()).min()
    }

    /// Performs the operations that are due.
    fn update(&mut self, now: Instant) {
        for parent in self.parents.iter_mut() {
            parent.start_if_due(&self.env, now);
            parent.update_workers(&self.env, now);
            parent.read_if_due(now);
        }
        self.notifier.update(now, self.parents.vgpu_count());
    }

    fn exited(&mut self, watched: Watched) {
        match watched {
            Watched::Worker(vgpu, generation) => {
                if let Some(parent) = self.parents.of_vgpu_mut(vgpu) {
                    parent.worker_exited(&self.env, vgpu, generation);
                }
            }
            Watched::Gpu(parent, generation) => {
                if let Ok(parent) = self.parents.get_mut(&parent) {
                    parent.gpu_exited(generation);
                }
            }
        }
    }

    fn end(self, ending: Ending) {
        systemd::stopping();
        match ending {
            Ending::Leave => {
                log::info!("Leaving {} vGPUs to the next manager", self.parents.vgpu_count());
            }
            Ending::Stop => self.stop_all(),
        }
    }

    /// Ends all workers, and then the GPU processes that they are connected to.
    fn stop_all(mut self) {
        log::info!("Stopping {} vGPUs", self.parents.vgpu_count());
        for vgpu in self.parents.vgpus() {
            vgpu.terminate();
        }
        let deadline = Instant::now() + EXIT_TIMEOUT;
        for parent in self.parents.iter_mut() {
            parent.end_workers(&self.env, deadline);
        }
        for parent in self.parents.iter_mut() {
            parent.stop(&self.env.run_dir);
        }
    }
}
