//! Reports to the manager when a worker or a GPU process ends.

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc;

use mdev_core::ids::VgpuId;
use tokio::io::unix::AsyncFd;

use super::Manager;
use super::handle::{Event, Handle};
use crate::spawn::{self, Process};

/// Number of one start of a process. Tells a process from its successor.
pub type Generation = u64;

/// Watched process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watched {
    /// Worker of a vGPU.
    Worker(VgpuId, Generation),
    /// Context of a vGPU.
    Context(VgpuId, Generation),
    /// GPU process of a parent.
    Gpu(String, Generation),
}

/// Watcher of processes. Sends [`Event::Exited`] when one ends.
#[derive(Debug)]
pub struct Watcher {
    runtime: tokio::runtime::Handle,
    events: mpsc::Sender<Event>,
    last: Cell<Generation>,
}

impl Watcher {
    /// Creates a watcher that runs on `runtime` and reports to the manager behind `manager`.
    pub fn new(runtime: tokio::runtime::Handle, manager: &Handle) -> Self {
        Self { runtime, events: manager.events.clone(), last: Cell::new(0) }
    }

    /// Returns the number of the next process to be started.
    pub(super) fn generation(&self) -> Generation {
        self.last.set(self.last.get() + 1);
        self.last.get()
    }

    /// Runs `body` on a thread of its own, and passes its result to the manager's thread.
    pub(super) fn run_aside<T: Send + 'static>(
        &self,
        name: &str,
        body: impl FnOnce() -> T + Send + 'static,
        then: impl FnOnce(&mut Manager, T) + Send + 'static,
    ) -> io::Result<()> {
        let events = self.events.clone();
        spawn::thread(name, move || {
            let result = body();
            // An error means that the manager has ended.
            let _ = events.send(Event::Call(Box::new(move |manager| then(manager, result))));
        })
        .map(drop)
    }

    /// Watches a process until it ends.
    pub(super) fn watch(&self, process: &Process, watched: Watched) {
        match process.watch() {
            Ok(pidfd) => drop(self.runtime.spawn(report_end(pidfd, watched, self.events.clone()))),
            Err(error) => log::error!("Cannot watch process {}: {error}", process.pid()),
        }
    }
}

async fn report_end(pidfd: OwnedFd, watched: Watched, events: mpsc::Sender<Event>) {
    // SAFETY: `AsyncFd` owns the descriptor, which stays the same until it is dropped.
    match unsafe { AsyncFd::register(pidfd) } {
        Ok(pidfd) => {
            if let Err(error) = pidfd.readable().await {
                log::error!("Cannot watch {watched:?}: {error}");
            }
        }
        Err(error) => log::error!("Cannot watch {watched:?}: {error}"),
    }
    // An error means that the manager has ended.
    let _ = events.send(Event::Exited(watched));
}
