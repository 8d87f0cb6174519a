//! Operations on vGPUs, shared by the control API and the web console.
//!
//! A [`Service`] combines the manager's state with its workers' replies, runs callout scripts
//! around changes, and holds the readers of screens. It knows nothing of HTTP.
//!
//! * [`lifecycle`]: create, start, modify, undefine and stop, with their callout scripts
//! * `worker_statuses`: statuses of workers, some of which may not answer
//! * `attached_vm`: description of the VM that uses a vGPU; `programs`: of CUDA programs

use std::path::Path;
use std::sync::Arc;

use mdev_core::ids::VgpuId;

use crate::blocking;
use crate::callouts::Callouts;
use crate::console::live_screens::LiveScreens;
use crate::console::qmp_input::QmpInput;
use crate::console::readout_limiter::ReadoutLimiter;
use crate::console::shared_screenshots::SharedScreenshots;
use crate::manager::{Handle, Listed, Manager, Result};
use vgpud_api::{ErrorCode, ErrorDetail, Stats, Version, Vgpu};
use worker_statuses::{Asked, Told, WorkerStatuses};

mod attached_vm;
pub mod lifecycle;
mod programs;
mod worker_statuses;

/// Operations on vGPUs.
#[derive(Clone, Debug)]
pub struct Service {
    manager: Handle,
    callouts: Callouts,
    /// Version of the daemon.
    pub version: Arc<Version>,
    /// Screenshots in full size.
    pub screenshots: Arc<SharedScreenshots>,
    /// Screenshots in the size of a thumbnail.
    pub thumbnails: Arc<SharedScreenshots>,
    /// Screens with viewers.
    pub screens: Arc<LiveScreens>,
    statuses: Arc<WorkerStatuses>,
}

impl Service {
    /// Creates a service that calls `manager`, with `callouts` around changes.
    pub fn new(manager: Handle, callouts: Callouts, version: Version) -> Self {
        let limiter = Arc::<ReadoutLimiter>::default();
        Self {
            screens: Arc::new(LiveScreens::new(manager.clone(), Arc::clone(&limiter))),
            screenshots: Arc::new(SharedScreenshots::new(Arc::clone(&limiter))),
            thumbnails: Arc::new(SharedScreenshots::new(limiter)),
            manager,
            callouts,
            version: Arc::new(version),
            statuses: Arc::default(),
        }
    }

    /// Runs a query that cannot fail on the manager's thread.
    pub async fn query<T: Send + 'static>(
        &self,
        body: impl FnOnce(&mut Manager) -> T + Send + 'static,
    ) -> Result<T> {
        self.manager.call(body).await
    }

    /// Runs a query or change on the manager's thread.
    pub async fn call<T: Send + 'static>(
        &self,
        body: impl FnOnce(&mut Manager) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.manager.call(body).await?
    }

    /// Runs a query or change on the manager's thread, and completes the resulting vGPU with its
    /// worker's status.
    pub async fn call_for_vgpu(
        &self,
        body: impl FnOnce(&mut Manager) -> Result<Listed> + Send + 'static,
    ) -> Result<Vgpu> {
        let listed = self.call(body).await?;
        let status = self.worker_statuses(vec![asked(&listed)]).await.pop().flatten();
        Ok(with_status(listed, status))
    }

    /// Returns all vGPUs, each completed with its worker's status.
    pub async fn vgpus(&self) -> Result<Vec<Vgpu>> {
        let listed = self.call(Manager::list).await?;
        let vgpus: Vec<_> = listed.iter().map(|listed| listed.vgpu.uuid).collect();
        self.statuses.retain(&vgpus);
        let statuses = self.worker_statuses(listed.iter().map(asked).collect()).await;
        Ok(listed
            .into_iter()
            .zip(statuses)
            .map(|(vgpu, status)| with_status(vgpu, status))
            .collect())
    }

    /// Returns the statistics of all running vGPUs and of the parents.
    pub async fn stats(&self) -> Result<Stats> {
        let (measured, parents) = self.query(Manager::stats).await?;
        let asked = measured.iter().map(|vgpu| {
            let (pid, control) = (vgpu.stats.pid?, vgpu.control.clone()?);
            Some(Asked { vgpu: vgpu.stats.uuid, pid, control })
        });
        let statuses = self.worker_statuses(asked.collect()).await;
        let vgpus = measured.into_iter().zip(statuses).map(|(vgpu, status)| {
            let mut stats = vgpu.stats;
            if let Some(status) = status.and_then(|told| told.status) {
                stats.traps = status.traps;
                stats.programs = status.programs.map(|found| programs::describe(found, vgpu.owner));
                // Otherwise, the client is a program.
                let vm = status.client.filter(|_| stats.programs.is_none());
                stats.vm_pid = vm.map(|vm| vm.pid);
            }
            stats
        });
        // Names of processes are read from files.
        let vgpus = blocking::run(move || vgpus.collect()).await?;
        Ok(Stats { vgpus, parents })
    }

    /// Connects to the QMP monitor at `path` for keyboard and pointer. The monitor must belong to
    /// the VM that is attached to the vGPU.
    pub async fn open_input(&self, id: VgpuId, path: &Path) -> Result<QmpInput> {
        if !path.is_absolute() {
            let path = path.display();
            let message = format!("\"{path}\" is not an absolute path; begin it with a slash");
            return Err(ErrorDetail::new(ErrorCode::Invalid, message));
        }
        let vgpu = self.call_for_vgpu(move |manager| manager.show(id)).await?;
        let Some(vm) = vgpu.vm else {
            let message = format!(
                "No VM is attached to vGPU {id}, so there is no keyboard; omit the monitor"
            );
            return Err(ErrorDetail::new(ErrorCode::Conflict, message));
        };
        QmpInput::open(path, vm.pid).await.map_err(|error| {
            let message = format!("The monitor {} cannot be used: {error}", path.display());
            ErrorDetail::new(ErrorCode::Conflict, message)
        })
    }

    /// Requests the status of several workers concurrently.
    async fn worker_statuses(&self, asked: Vec<Option<Asked>>) -> Vec<Option<Told>> {
        let requests: Vec<_> = asked
            .into_iter()
            .map(|asked| {
                asked.map(|asked| {
                    let statuses = Arc::clone(&self.statuses);
                    tokio::spawn(async move {
                        let told = statuses.ask(asked.clone()).await;
                        (told.report(&asked), told)
                    })
                })
            })
            .collect();
        let (mut statuses, mut reports) = (Vec::with_capacity(requests.len()), Vec::new());
        for request in requests {
            let told = match request {
                Some(request) => request.await.ok(),
                None => None,
            };
            statuses.push(told.map(|(report, told)| {
                reports.extend(report);
                told
            }));
        }
        self.manager.report_clients(reports);
        statuses
    }
}

/// Returns the worker of a vGPU that can be asked.
fn asked(listed: &Listed) -> Option<Asked> {
    let (pid, control) = (listed.vgpu.pid?, listed.control.clone()?);
    Some(Asked { vgpu: listed.vgpu.uuid, pid, control })
}

/// Completes a vGPU with its worker's status.
fn with_status(listed: Listed, told: Option<Told>) -> Vgpu {
    let Some(Told { status, answers }) = told else { return listed.vgpu };
    let (vm, mut warnings) =
        status.map(|status| (status.client, status.warnings)).unwrap_or_default();
    if !answers {
        warnings.push("Its worker does not answer".into());
    }
    Vgpu { vm, warnings, ..listed.vgpu }
}
