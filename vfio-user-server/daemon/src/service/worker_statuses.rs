//! Statuses of workers. Each worker is asked one question at a time, and requests that wait for it
//! share its answer. A worker that did not answer costs later requests no time: they get its last
//! status, and it is asked again aside. No thread waits for an answer, so that any number of silent
//! workers leaves the threads to others.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mdev_core::ids::VgpuId;
use tokio::runtime::Handle;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::manager::ClientReport;
use crate::worker_client;
use crate::worker_protocol::WorkerStatus;

/// Wait for an answer where the last status will do. A worker that shares a GPU with one whose
/// memory the driver releases can answer seconds later.
const PATIENCE: Duration = Duration::from_millis(50);

/// Pause between questions to a worker that does not answer.
const SILENT_PAUSE: Duration = Duration::from_millis(500);

/// Worker to be asked, as the manager knows it.
#[derive(Clone, Debug)]
pub struct Asked {
    /// vGPU.
    pub vgpu: VgpuId,
    /// Process ID of the worker.
    pub pid: u32,
    /// Control socket of the worker.
    pub control: PathBuf,
}

/// Status of a worker.
#[derive(Clone, Debug)]
pub struct Told {
    /// Last status, if the worker has ever answered.
    pub status: Option<WorkerStatus>,
    /// True if the worker answered now.
    pub answers: bool,
}

/// Workers that were asked.
#[derive(Debug)]
pub struct WorkerStatuses {
    workers: Mutex<HashMap<(VgpuId, u32), Arc<Worker>>>,
    /// Asks the workers. A question that many wait for does not wait for what computes elsewhere.
    runtime: Handle,
}

#[derive(Debug, Default)]
struct Worker {
    /// Held by the task that asks the worker.
    asking: Arc<AsyncMutex<()>>,
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    status: Option<WorkerStatus>,
    /// Start of the last question that was answered.
    answered: Option<Instant>,
    /// Start of the last question, if it was not answered.
    silent: Option<Instant>,
}

impl Worker {
    fn last(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn told(&self, answers: bool) -> Told {
        Told { status: self.last().status.clone(), answers }
    }

    /// Asks the worker in a task that holds `guard`. Returns whether it answered.
    async fn ask(self: Arc<Self>, asked: Asked, guard: OwnedMutexGuard<()>) -> bool {
        let begun = Instant::now();
        let answer = worker_client::ask_status(&asked.control).await;
        let mut last = self.last();
        last.silent = answer.is_err().then_some(begun);
        if let Ok(status) = answer {
            last.status = Some(status);
            last.answered = Some(begun);
        }
        drop(guard);
        last.silent.is_none()
    }
}

impl WorkerStatuses {
    /// Creates a list without workers, which are asked on `runtime`.
    pub fn new(runtime: Handle) -> Self {
        Self { workers: Mutex::default(), runtime }
    }

    fn worker(&self, asked: &Asked) -> Arc<Worker> {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        // A new worker of a vGPU replaces the old one.
        workers.retain(|(vgpu, pid), _| *vgpu != asked.vgpu || *pid == asked.pid);
        Arc::clone(workers.entry((asked.vgpu, asked.pid)).or_default())
    }

    /// Forgets the workers of vGPUs that are gone.
    pub fn retain(&self, vgpus: &[VgpuId]) {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.retain(|(vgpu, _), _| vgpus.contains(vgpu));
    }

    /// Notes a status that a worker has told otherwise.
    pub fn learn(&self, asked: &Asked, status: WorkerStatus) {
        self.worker(asked).last().status = Some(status);
    }

    /// Returns a worker's status of now, or its last one if it does not answer soon.
    pub async fn ask_soon(&self, asked: Asked) -> Told {
        let worker = self.worker(&asked);
        let now = self.ask(asked);
        if worker.last().status.is_none() {
            return now.await;
        }
        // The question goes on, and renews the last status.
        tokio::time::timeout(PATIENCE, now).await.unwrap_or_else(|_| worker.told(false))
    }

    /// Returns a worker's status of now, or its last one if it does not answer.
    pub async fn ask(&self, asked: Asked) -> Told {
        let worker = self.worker(&asked);
        let requested = Instant::now();
        let silent = worker.last().silent;
        if let Some(since) = silent {
            if since.elapsed() >= SILENT_PAUSE
                && let Ok(guard) = Arc::clone(&worker.asking).try_lock_owned()
            {
                self.runtime.spawn(Arc::clone(&worker).ask(asked, guard));
            }
            return worker.told(false);
        }
        let guard = Arc::clone(&worker.asking).lock_owned().await;
        let (answered, silent) = {
            let last = worker.last();
            (last.answered, last.silent)
        };
        if silent.is_some() {
            return worker.told(false);
        }
        if answered.is_some_and(|begun| begun >= requested) {
            return worker.told(true);
        }
        let question = self.runtime.spawn(Arc::clone(&worker).ask(asked, guard));
        worker.told(question.await.unwrap_or(false))
    }
}

impl Told {
    /// Returns the report of the worker's client for the manager, if the worker answered. Which
    /// worker it is was not told by the worker.
    pub fn report(&self, asked: &Asked) -> Option<ClientReport> {
        let status = self.status.as_ref().filter(|_| self.answers)?;
        Some(ClientReport { vgpu: asked.vgpu, worker: asked.pid, client: status.client })
    }
}

#[cfg(test)]
mod tests {
    use ipc::seqpacket::{MAX_PACKET, SeqPacketListener};

    use super::*;
    use crate::worker_protocol::tests::status_of_version_1;
    use crate::worker_protocol::{VERSION, WorkerReply};

    #[test]
    fn worker_that_does_not_answer_costs_one_wait() {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("control.sock");
        let _listener = SeqPacketListener::bind(&control).unwrap();
        let asked = Asked { vgpu: VgpuId(uuid::Uuid::nil()), pid: 1, control };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let statuses = Arc::new(WorkerStatuses::new(Handle::current()));
            let begun = Instant::now();
            let readers: Vec<_> = (0..40)
                .map(|_| {
                    let (statuses, asked) = (Arc::clone(&statuses), asked.clone());
                    tokio::spawn(async move { statuses.ask(asked).await.answers })
                })
                .collect();
            for reader in readers {
                assert!(!reader.await.unwrap());
            }
            assert!(begun.elapsed() < worker_client::TIMEOUT * 4, "{:?}", begun.elapsed());
            let begun = Instant::now();
            assert!(!statuses.ask(asked).await.answers);
            assert!(begun.elapsed() < worker_client::TIMEOUT / 2);
        });
    }

    #[test]
    fn silent_workers_take_no_thread_from_others() {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("control.sock");
        let _listener = SeqPacketListener::bind(&control).unwrap();
        let asked = Asked { vgpu: VgpuId(uuid::Uuid::nil()), pid: 1, control };
        // The runtime's only thread for calls that block is kept until the end.
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let (done, is_done) = std::sync::mpsc::channel();
        let test = std::thread::spawn(move || {
            crate::io_runtime::new(1).unwrap().block_on(async {
                let kept = tokio::task::spawn_blocking(move || ends.recv());
                let told = WorkerStatuses::new(Handle::current()).ask(asked).await;
                done.send(told.answers).unwrap();
                let _ = kept.await.unwrap();
            });
        });
        assert_eq!(is_done.recv_timeout(Duration::from_secs(60)), Ok(false));
        drop(end);
        test.join().unwrap();
    }

    #[test]
    fn a_worker_that_is_late_costs_statistics_little_and_is_current_later() {
        const LATE: Duration = Duration::from_millis(600);
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("control.sock");
        let listener = SeqPacketListener::bind(&control).unwrap();
        let status = |gpu_ok| WorkerStatus { version: VERSION, gpu_ok, ..status_of_version_1() };
        let worker = std::thread::spawn(move || {
            for (pause, gpu_ok) in [(Duration::ZERO, false), (LATE, true)] {
                let socket = listener.accept().unwrap();
                socket.recv(&mut vec![0; MAX_PACKET]).unwrap().unwrap();
                std::thread::sleep(pause);
                let reply = WorkerReply::Status(Box::new(status(gpu_ok)));
                socket.send(&serde_json::to_vec(&reply).unwrap(), &[]).unwrap();
            }
        });
        let asked = Asked { vgpu: VgpuId(uuid::Uuid::nil()), pid: 1, control };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let statuses = WorkerStatuses::new(Handle::current());
            statuses.learn(&asked, status(false));
            assert!(statuses.ask_soon(asked.clone()).await.answers);
            let begun = Instant::now();
            let told = statuses.ask_soon(asked.clone()).await;
            assert!(begun.elapsed() < LATE, "{:?}", begun.elapsed());
            assert_eq!((told.answers, told.status), (false, Some(status(false))));
            tokio::time::sleep(LATE * 2).await;
            let last = statuses.worker(&asked).last().status.clone();
            assert_eq!(last, Some(status(true)));
        });
        worker.join().unwrap();
    }
}
