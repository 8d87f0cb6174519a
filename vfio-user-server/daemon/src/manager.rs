//! The manager: parents, vGPUs, definitions and shares. No guest data passes through the manager.
//!
//! One thread owns the [`Manager`] and handles [`Event`]s from the API's tasks and from the watcher
//! of processes. The thread does not wait for a process to end, nor for a worker. Modules in
//! reading order:
//!
//! * [`handle`], [`watcher`]: events, and where they come from
//! * [`run_dir`], [`sockets`]: the run directory
//! * [`environment`]: what all parents share; [`worker_users`]: users of workers; [`cgroups`]:
//!   control groups of workers and GPU processes; [`reserve`]: reserve of descriptors
//! * [`parent`]: a parent with its GPU process, scheduler and vGPUs; [`parents`]: all of them
//! * [`vgpu`]: a started vGPU, its state and its worker
//! * [`definitions`]: persistent definitions
//! * [`requests`]: requests of the control API
//! * `adopt`: start of a manager in a run directory with running processes

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::spawn::{KILL_TIMEOUT, Process};
use crate::systemd::{self, Notifier};
use vgpud_api::ErrorDetail;

mod adopt;
mod backoff;
mod cgroups;
mod config;
mod definitions;
mod environment;
mod handle;
mod parent;
mod parents;
mod requests;
mod reserve;
mod run_dir;
pub mod sockets;
mod vgpu;
mod watcher;
mod worker_users;

pub use crate::backend::ParentConfig;
pub use config::Config;
pub use definitions::PlacedDefinition;
pub use handle::{Ending, Event, Handle, Inbox, channel};
pub use requests::{Change, ClientReport, Listed, Measured, Saveable, Screen, Upgradable};
pub use run_dir::RunDir;
pub use watcher::{Watched, Watcher};

use cgroups::{Cgroups, Member};
use definitions::Definitions;
use environment::Environment;
use parent::Parent;
use parents::Parents;
use reserve::Reserve;
use watcher::Generation;
use worker_users::WorkerUsers;

/// Result of a request.
pub type Result<T> = std::result::Result<T, ErrorDetail>;

/// Limit of the time that GPU processes take to exit when the manager stops.
const GPU_EXIT_TIMEOUT: Duration = Duration::from_secs(1);

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
            env: Environment {
                reserve: Reserve::default(),
                run_dir,
                watcher,
                worker_user,
                worker_users,
                cgroups: Cgroups::find(),
                owner,
            },
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

    /// Takes the result of the start of a GPU process.
    fn gpu_opened(&mut self, parent: &str, generation: Generation, opened: parent::OpenResult) {
        if let Ok(parent) = self.parents.get_mut(parent) {
            parent.opened(&self.env, generation, opened);
        }
    }

    fn exited(&mut self, watched: Watched) {
        match watched {
            Watched::Worker(vgpu, generation) => {
                self.env.cgroups.remove(Member::Worker(vgpu));
                if let Some(parent) = self.parents.of_vgpu_mut(vgpu) {
                    parent.worker_exited(&self.env, vgpu, generation);
                }
            }
            Watched::Context(vgpu, generation) => {
                self.env.cgroups.remove(Member::Context(vgpu));
                if let Some(parent) = self.parents.of_vgpu_mut(vgpu) {
                    parent.context_exited(vgpu, generation);
                }
            }
            Watched::Gpu(parent, generation) => {
                self.env.cgroups.remove(Member::Gpu(&parent));
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

    /// Ends all workers, and then the GPU processes that they are connected to. A process that does
    /// not end although it was killed is left.
    fn stop_all(mut self) {
        log::info!("Stopping {} vGPUs", self.parents.vgpu_count());
        for vgpu in self.parents.vgpus() {
            vgpu.terminate();
        }
        let vgpus: Vec<_> = self.parents.iter_mut().flat_map(Parent::take_vgpus).collect();
        let (mut ids, mut workers, mut contexts) = (Vec::new(), Vec::new(), Vec::new());
        for vgpu in vgpus {
            ids.push(vgpu.id);
            let (worker, context) = vgpu.into_processes();
            workers.extend(worker);
            contexts.extend(context);
        }
        end_all(&workers, EXIT_TIMEOUT);
        // A context ends with its worker.
        end_all(&contexts, GPU_EXIT_TIMEOUT);
        for id in ids {
            run_dir::remove(&self.env.run_dir.vgpu(id));
        }
        let processes: Vec<_> = self.parents.iter_mut().filter_map(Parent::close).collect();
        end_all(&processes, GPU_EXIT_TIMEOUT);
        for parent in self.parents.iter() {
            run_dir::remove(&self.env.run_dir.parent(parent.name()));
        }
        self.env.cgroups.remove_empty();
    }
}

/// Waits until processes have exited, all together for `timeout`; kills the others, and waits for
/// these until [`KILL_TIMEOUT`].
fn end_all(processes: &[Process], timeout: Duration) {
    let deadline = Instant::now() + timeout;
    let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
    let late: Vec<_> = processes.iter().filter(|one| !one.wait(left(deadline))).collect();
    for process in &late {
        process.signal(Signal::SIGKILL);
    }
    let deadline = Instant::now() + KILL_TIMEOUT;
    for process in late {
        if !process.wait(left(deadline)) {
            process.report_unkillable();
        }
    }
}
