//! Create, start, modify, undefine and stop, each with its callout scripts.
//!
//! An operation runs to its end even if the client disconnects, so that callout scripts that ran
//! before the operation also run after it.

use std::time::Duration;

use mdev_core::ids::VgpuId;

use super::worker_statuses::Told;
use super::{Service, asked};
use crate::callouts::{Action, CalloutRun};
use crate::manager::sockets::{ChosenOwner, OWNER, owner_of_caller};
use crate::manager::{Change, Listed, Manager, PlacedDefinition, Result};
use crate::{blocking, worker_client};
use vgpud_api::{
    CreateVgpu, ErrorCode, ErrorDetail, ModifyVgpu, StartVgpu, StopVgpu, UndefineVgpu, Vgpu,
};

/// Number of polls for the exit reason of a worker that did not start.
const EXIT_REASON_POLLS: u32 = 20;

/// Interval of polls for the exit reason.
const EXIT_REASON_INTERVAL: Duration = Duration::from_millis(10);

impl Service {
    /// Defines a vGPU, starts a transient vGPU, or both. A started vGPU belongs to `caller`, unless
    /// the request names an owner.
    pub async fn create(&self, mut request: CreateVgpu, caller: Option<u32>) -> Result<Vgpu> {
        let named = request.attrs.iter().any(|attr| attr.contains_key(OWNER));
        if let Some(owner) = owner_of_caller(caller).filter(|_| request.run && !named) {
            request.attrs.push([(OWNER.to_owned(), owner)].into());
        }
        let service = self.clone();
        run_detached(async move {
            let CreateVgpu { run, define, force, .. } = request;
            // The plan fixes all choices, such as the UUID, so that scripts see the vGPU that is
            // created.
            let (request, planned) = service.call(move |manager| manager.planned(request)).await?;
            let mut callouts = None;
            if define {
                let planned = planned.clone();
                callouts =
                    service.callouts_before(Action::Define, force, move |_| Ok(planned)).await?;
            }
            let result = if run {
                service.create_running(request, planned).await
            } else {
                service.call_for_vgpu(move |manager| manager.create(request)).await
            };
            finish_callouts(callouts, result).await
        })
        .await
    }

    async fn create_running(&self, request: CreateVgpu, planned: PlacedDefinition) -> Result<Vgpu> {
        let CreateVgpu { define, force, .. } = request;
        let id = planned.id;
        let callouts = self.callouts_before(Action::Start, force, move |_| Ok(planned)).await?;
        let result = match self.call(move |manager| manager.create(request)).await {
            Ok(listed) => {
                let started = self.wait_for_worker(listed).await;
                // A failed start also removes the new definition.
                if started.is_err()
                    && define
                    && let Err(error) = self.call(move |manager| manager.undefine(id)).await
                {
                    log::warn!("vGPU {id} stays defined: {error}");
                }
                started
            }
            Err(error) => Err(error),
        };
        finish_callouts(callouts, result).await
    }

    /// Changes a definition, a running vGPU, or both.
    pub async fn modify(&self, id: VgpuId, request: ModifyVgpu) -> Result<Vgpu> {
        let service = self.clone();
        run_detached(async move {
            let (live, stored) = service.callouts_before_modify(id, request.clone()).await?;
            let result = service.call_for_vgpu(move |manager| manager.modify(id, request)).await;
            if let Some(live) = live {
                live.finish_live(result.is_ok()).await;
            }
            finish_callouts(stored, result).await
        })
        .await
    }

    /// Removes a definition.
    pub async fn undefine(&self, id: VgpuId, request: UndefineVgpu) -> Result<()> {
        let service = self.clone();
        run_detached(async move {
            let UndefineVgpu { force } = request;
            let definition = move |manager: &mut Manager| manager.to_undefine(id);
            let callouts = service.callouts_before(Action::Undefine, force, definition).await?;
            let result = service.call(move |manager| manager.undefine(id)).await;
            finish_callouts(callouts, result).await
        })
        .await
    }

    /// Starts a defined vGPU, and returns when its socket is ready. The vGPU belongs to `caller`,
    /// unless the request or the definition names an owner.
    pub async fn start(&self, id: VgpuId, request: StartVgpu, caller: Option<u32>) -> Result<Vgpu> {
        let service = self.clone();
        run_detached(async move {
            let StartVgpu { owner, force } = request;
            let owner = ChosenOwner { named: owner, caller: owner_of_caller(caller) };
            let with_owner = owner.clone();
            let definition = move |manager: &mut Manager| manager.to_start(id, &with_owner);
            let callouts = service.callouts_before(Action::Start, force, definition).await?;
            let start = move |manager: &mut Manager| manager.start(id, &owner);
            let result = match service.call(start).await {
                Ok(listed) => service.wait_for_worker(listed).await,
                Err(error) => Err(error),
            };
            finish_callouts(callouts, result).await
        })
        .await
    }

    /// Starts the vGPUs with start policy `auto`, one after the other.
    pub async fn start_all(self, ids: Vec<VgpuId>) {
        for id in ids {
            if let Err(error) = self.start(id, StartVgpu::default(), None).await {
                log::error!("vGPU {id} is not started: {error}");
            }
        }
    }

    /// Stops a vGPU, and returns when its worker has ended. Without `force`, a vGPU that a VM uses
    /// is not stopped.
    pub async fn stop(&self, id: VgpuId, request: StopVgpu) -> Result<()> {
        let service = self.clone();
        run_detached(async move {
            let StopVgpu { force } = request;
            if !force {
                service.refuse_if_used(id).await?;
            }
            let definition = move |manager: &mut Manager| manager.to_stop(id);
            let callouts = service.callouts_before(Action::Stop, force, definition).await?;
            // A VM can attach while the scripts run.
            if callouts.is_some()
                && !force
                && let Err(error) = service.refuse_if_used(id).await
            {
                return finish_callouts(callouts, Err(error)).await;
            }
            let result = match service.call(move |manager| manager.stop(id)).await {
                // The sender reports the end, or is dropped after it.
                Ok(stopped) => stopped.await.unwrap_or(Ok(())),
                Err(error) => Err(error),
            };
            finish_callouts(callouts, result).await
        })
        .await
    }

    /// Waits until the worker of a started vGPU replies. A worker that does not reply is stopped.
    async fn wait_for_worker(&self, listed: Listed) -> Result<Vgpu> {
        let Some(control) = listed.control.clone() else { return Ok(listed.vgpu) };
        let id = listed.vgpu.uuid;
        let error = match blocking::run(move || worker_client::patient_status(&control)).await? {
            Ok(status) => {
                if let Some(asked) = asked(&listed) {
                    self.statuses.learn(&asked, status.clone());
                }
                let told = Told { status: Some(status), answers: true };
                return Ok(self.with_status(listed, Some(told)).await);
            }
            Err(error) => error,
        };
        // The exit reason says more than the missing reply, and is known shortly after.
        let mut reason = None;
        for _ in 0..EXIT_REASON_POLLS {
            reason = self.query(move |m| m.show(id)).await?.ok().and_then(|l| l.vgpu.reason);
            if reason.is_some() {
                break;
            }
            tokio::time::sleep(EXIT_REASON_INTERVAL).await;
        }
        if let Ok(stopped) = self.query(move |m| m.stop(id)).await? {
            // The sender reports the end, or is dropped after it. The failed start is reported.
            let _ = stopped.await;
        }
        let reason = reason.unwrap_or_else(|| error.to_string());
        let message = format!("vGPU {id} did not start: {reason}; see the log of vgpud");
        Err(ErrorDetail::new(ErrorCode::Unavailable, message))
    }

    /// Runs the callout scripts for an action, if the host has any. The returned run must be
    /// finished with the result of the action.
    async fn callouts_before(
        &self,
        action: Action,
        force: bool,
        definition: impl FnOnce(&mut Manager) -> Result<PlacedDefinition> + Send + 'static,
    ) -> Result<Option<CalloutRun>> {
        if !self.callouts.exist() {
            return Ok(None);
        }
        let definition = self.call(definition).await?;
        self.callouts.before(action, definition, force).await.map(Some)
    }

    /// Runs the callout scripts for a modification: of the running vGPU and of the definition, in
    /// this order.
    async fn callouts_before_modify(
        &self,
        id: VgpuId,
        request: ModifyVgpu,
    ) -> Result<(Option<CalloutRun>, Option<CalloutRun>)> {
        if !self.callouts.exist() {
            return Ok((None, None));
        }
        let force = request.force;
        let Change { stored, live } = self.call(move |m| m.to_modify(id, request)).await?;
        let live = match live {
            Some(live) => Some(self.callouts.before_live(live, force).await?),
            None => None,
        };
        let Some(stored) = stored else { return Ok((live, None)) };
        match self.callouts.before(Action::Modify, stored, force).await {
            Ok(stored) => Ok((live, Some(stored))),
            Err(error) => {
                if let Some(live) = live {
                    live.finish_live(false).await;
                }
                Err(error)
            }
        }
    }
}

/// Finishes a run of callout scripts with the result of its action, and returns the result.
async fn finish_callouts<T>(callouts: Option<CalloutRun>, result: Result<T>) -> Result<T> {
    if let Some(callouts) = callouts {
        callouts.finish(result.is_ok()).await;
    }
    result
}

/// Runs `body` as a task of its own, so that the cancellation of the caller does not cancel `body`.
async fn run_detached<T: Send + 'static>(
    body: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    tokio::spawn(body).await.map_err(|error| ErrorDetail::new(ErrorCode::Internal, error))?
}
