//! Operations on vGPUs, shared by the control API and the web console.
//!
//! A [`Service`] combines the manager's state with its workers' replies, runs callout scripts
//! around changes, and holds the readers of screens. It knows nothing of HTTP.
//!
//! * [`lifecycle`]: create, start, modify, undefine and stop, with their callout scripts
//! * `attached_vm`: description of the VM that uses a vGPU

use std::path::{Path, PathBuf};
use std::sync::Arc;

use mdev_core::ids::VgpuId;
use tokio::sync::Semaphore;

use crate::callouts::Callouts;
use crate::console::live_screens::LiveScreens;
use crate::console::qmp_input::QmpInput;
use crate::console::readout_limiter::ReadoutLimiter;
use crate::console::shared_screenshots::SharedScreenshots;
use crate::manager::{ClientReport, Handle, Listed, Manager, Result};
use crate::worker_protocol::WorkerStatus;
use crate::{blocking, worker_client};
use vgpud_api::{ErrorCode, ErrorDetail, Stats, Version, Vgpu};

mod attached_vm;
pub mod lifecycle;

/// Concurrent rounds of status requests to all workers. A worker accepts eight connections besides
/// the manager's.
const MAX_STATUS_ROUNDS: usize = 4;

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
    status_rounds: Arc<Semaphore>,
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
            status_rounds: Arc::new(Semaphore::new(MAX_STATUS_ROUNDS)),
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
        let status = self.worker_statuses(vec![listed.control.clone()]).await.pop().flatten();
        Ok(with_status(listed, status))
    }

    /// Returns all vGPUs, each completed with its worker's status.
    pub async fn vgpus(&self) -> Result<Vec<Vgpu>> {
        let listed = self.call(Manager::list).await?;
        let controls = listed.iter().map(|vgpu| vgpu.control.clone()).collect();
        let statuses = self.worker_statuses(controls).await;
        Ok(listed
            .into_iter()
            .zip(statuses)
            .map(|(vgpu, status)| with_status(vgpu, status))
            .collect())
    }

    /// Returns the statistics of all running vGPUs and of the parents.
    pub async fn stats(&self) -> Result<Stats> {
        let (measured, parents) = self.query(Manager::stats).await?;
        let controls = measured.iter().map(|vgpu| vgpu.control.clone()).collect();
        let statuses = self.worker_statuses(controls).await;
        let vgpus = measured.into_iter().zip(statuses).map(|(vgpu, status)| {
            let mut stats = vgpu.stats;
            if let Some(status) = status {
                stats.traps = status.traps;
                stats.vm_pid = status.client.map(|vm| vm.pid);
            }
            stats
        });
        Ok(Stats { vgpus: vgpus.collect(), parents })
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

    /// Requests the status of several workers concurrently. The status of a worker that does not
    /// reply is `None`.
    async fn worker_statuses(&self, controls: Vec<Option<PathBuf>>) -> Vec<Option<WorkerStatus>> {
        let _permit = self.status_rounds.acquire().await;
        let request = |control: PathBuf| blocking::run(move || worker_client::status(&control));
        let requests: Vec<_> = controls
            .into_iter()
            .map(|control| control.map(|control| tokio::spawn(request(control))))
            .collect();
        let mut statuses = Vec::with_capacity(requests.len());
        for request in requests {
            statuses.push(match request {
                Some(request) => {
                    request.await.ok().and_then(Result::ok).and_then(std::result::Result::ok)
                }
                None => None,
            });
        }
        let reports = statuses.iter().flatten().map(ClientReport::from);
        self.manager.report_clients(reports.collect());
        statuses
    }
}

/// Completes a vGPU with its worker's status.
fn with_status(listed: Listed, status: Option<WorkerStatus>) -> Vgpu {
    match (status, listed.control) {
        (Some(status), _) => Vgpu { vm: status.client, warnings: status.warnings, ..listed.vgpu },
        (None, Some(_)) => {
            Vgpu { warnings: vec!["Its worker does not answer".into()], ..listed.vgpu }
        }
        (None, None) => listed.vgpu,
    }
}
