//! Operations on vGPUs, shared by the control API and the web console.
//!
//! A [`Service`] combines the manager's state with its workers' replies, runs callout scripts
//! around changes, and holds the readers of screens. It knows nothing of HTTP.
//!
//! * [`lifecycle`]: create, start, modify, undefine and stop, with their callout scripts
//! * `saving`, `restoring`: save, restore and resume; `written`: guest memory that a vGPU has
//!   written; [`upgrading`]: other workers under running VMs
//! * `worker_statuses`: statuses of workers, some of which may not answer
//! * `attached_vm`: description of the VM that uses a vGPU; `programs`: of CUDA programs

use std::io;
use std::path::Path;
use std::sync::Arc;

use mdev_core::ids::VgpuId;
use tokio::runtime;

use crate::callouts::Callouts;
use crate::console::live_screens::LiveScreens;
use crate::console::qmp_input::QmpInput;
use crate::console::readout_limiter::ReadoutLimiter;
use crate::console::shared_screenshots::SharedScreenshots;
use crate::manager::{Handle, Listed, Manager, Result};
use crate::{blocking, systemd};
use vgpud_api::{AttachedClient, ErrorCode, ErrorDetail, Stats, Version, Vgpu};
use worker_statuses::{Asked, Told, WorkerStatuses};

mod attached_vm;
pub mod lifecycle;
mod programs;
mod restoring;
mod saving;
pub mod upgrading;
mod worker_statuses;
mod written;

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
    names: Arc<attached_vm::VmNames>,
    saving: saving::Saving,
    program: upgrading::OwnProgram,
}

impl Service {
    /// Creates a service that calls `manager`, with `callouts` around changes, and asks workers on
    /// the runtime `questions`.
    pub fn new(
        manager: Handle,
        callouts: Callouts,
        version: Version,
        questions: runtime::Handle,
    ) -> Self {
        let limiter = Arc::<ReadoutLimiter>::default();
        Self {
            screens: Arc::new(LiveScreens::new(manager.clone(), Arc::clone(&limiter))),
            screenshots: Arc::new(SharedScreenshots::new(Arc::clone(&limiter))),
            thumbnails: Arc::new(SharedScreenshots::new(limiter)),
            manager,
            callouts,
            version: Arc::new(version),
            statuses: Arc::new(WorkerStatuses::new(questions)),
            names: Arc::default(),
            saving: saving::Saving::default(),
            program: upgrading::OwnProgram::default(),
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
        let status = self.worker_statuses(vec![asked(&listed)], Wait::Full).await.pop().flatten();
        Ok(self.with_status(listed, status).await)
    }

    /// Completes a vGPU with its worker's status, and with the name of its VM.
    async fn with_status(&self, listed: Listed, told: Option<Told>) -> Vgpu {
        let Some(Told { status, answers }) = told else { return listed.vgpu };
        let programs = status.as_ref().and_then(|status| status.programs.as_ref());
        // Otherwise, the client is a program of the host.
        let is_vm = programs.is_none_or(|programs| programs.in_vm);
        let (vm, mut warnings) =
            status.map(|status| (status.client, status.warnings)).unwrap_or_default();
        let vm_name = self.vm_name(listed.vgpu.uuid, vm.filter(|_| is_vm)).await;
        if !answers {
            warnings.push("Its worker does not answer".into());
        }
        Vgpu { vm, vm_name, warnings, ..listed.vgpu }
    }

    async fn vm_name(&self, vgpu: VgpuId, vm: Option<AttachedClient>) -> Option<String> {
        match vm {
            Some(vm) => self.names.of(vgpu, vm.pid).await,
            None => None,
        }
    }

    /// Returns all vGPUs, each completed with its worker's status.
    pub async fn vgpus(&self) -> Result<Vec<Vgpu>> {
        let listed = self.call(Manager::list).await?;
        let vgpus: Vec<_> = listed.iter().map(|listed| listed.vgpu.uuid).collect();
        self.statuses.retain(&vgpus);
        self.names.retain(&vgpus);
        let statuses = self.worker_statuses(listed.iter().map(asked).collect(), Wait::Full).await;
        let mut vgpus = Vec::new();
        for (listed, status) in listed.into_iter().zip(statuses) {
            vgpus.push(self.with_status(listed, status).await);
        }
        Ok(vgpus)
    }

    /// Returns the statistics of all running vGPUs and of the parents.
    pub async fn stats(&self) -> Result<Stats> {
        let (measured, parents) = self.query(Manager::stats).await?;
        let asked = measured.iter().map(|vgpu| {
            let (pid, control) = (vgpu.stats.pid?, vgpu.control.clone()?);
            Some(Asked { vgpu: vgpu.stats.uuid, pid, control })
        });
        let statuses = self.worker_statuses(asked.collect(), Wait::Short).await;
        let mut vgpus = Vec::new();
        for (vgpu, status) in measured.into_iter().zip(statuses) {
            let mut stats = vgpu.stats;
            if let Some(status) = status.and_then(|told| told.status) {
                stats.traps = status.traps;
                if let Some(found) = status.programs {
                    // Names of processes are read from files.
                    let described = blocking::run(move || programs::describe(found, vgpu.owner));
                    stats.programs = Some(described.await?);
                }
                // Otherwise, the client is a program.
                let in_vm = stats.programs.as_ref().is_none_or(|programs| programs.in_vm);
                let vm = status.client.filter(|_| in_vm);
                stats.vm_pid = vm.map(|vm| vm.pid);
                stats.vm_name = self.vm_name(stats.uuid, vm).await;
            }
            vgpus.push(stats);
        }
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
            let remedy = monitor_remedy(path, error.kind(), systemd::is_service());
            let message = format!("The monitor {} cannot be used: {error}{remedy}", path.display());
            ErrorDetail::new(ErrorCode::Conflict, message)
        })
    }

    /// Requests the status of several workers concurrently.
    async fn worker_statuses(&self, asked: Vec<Option<Asked>>, wait: Wait) -> Vec<Option<Told>> {
        let requests: Vec<_> = asked
            .into_iter()
            .map(|asked| {
                asked.map(|asked| {
                    let statuses = Arc::clone(&self.statuses);
                    tokio::spawn(async move {
                        let told = match wait {
                            Wait::Full => statuses.ask(asked.clone()).await,
                            Wait::Short => statuses.ask_soon(asked.clone()).await,
                        };
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

/// How long to wait for workers.
#[derive(Clone, Copy, Debug)]
enum Wait {
    /// As long as a worker that answers can take.
    Full,
    /// Where the last status will do.
    Short,
}

/// Returns what to do about a monitor that cannot be reached because of the unit's restrictions, in
/// words that continue the error.
fn monitor_remedy(path: &Path, error: io::ErrorKind, is_service: bool) -> &'static str {
    let hidden = |folders: &[&str]| folders.iter().any(|folder| path.starts_with(folder));
    match error {
        _ if !is_service => "",
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            if hidden(&["/tmp", "/var/tmp"]) =>
        {
            "; vgpud's service has its own /tmp and /var/tmp: put the VM's socket below /run"
        }
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied
            if hidden(&["/home", "/root", "/run/user"]) =>
        {
            "; vgpud's service does not see /home, /root and /run/user: put the VM's socket below /run"
        }
        io::ErrorKind::PermissionDenied => {
            "; vgpud's service needs the permissions of root's group: chgrp root, chmod g+rw"
        }
        _ => "",
    }
}

/// Returns the worker of a vGPU that can be asked.
fn asked(listed: &Listed) -> Option<Asked> {
    let (pid, control) = (listed.vgpu.pid?, listed.control.clone()?);
    Some(Asked { vgpu: listed.vgpu.uuid, pid, control })
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind as E;

    use super::*;

    #[test]
    fn a_monitor_that_the_service_cannot_reach_has_a_remedy() {
        for (path, error, part) in [
            ("/tmp/qmp.sock", E::NotFound, "its own /tmp"),
            ("/var/tmp/x/qmp.sock", E::NotFound, "its own /tmp"),
            ("/home/me/qmp.sock", E::PermissionDenied, "does not see /home"),
            ("/run/user/1000/qmp.sock", E::NotFound, "does not see /home"),
            ("/run/vm/qmp.sock", E::PermissionDenied, "chgrp root"),
        ] {
            let remedy = monitor_remedy(Path::new(path), error, true);
            assert!(remedy.contains(part), "{path}: {remedy}");
            assert_eq!(monitor_remedy(Path::new(path), error, false), "");
        }
        assert_eq!(monitor_remedy(Path::new("/run/vm/qmp.sock"), E::NotFound, true), "");
        assert_eq!(monitor_remedy(Path::new("/tmpfiles/qmp.sock"), E::NotFound, true), "");
    }
}
