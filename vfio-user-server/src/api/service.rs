//! What the paths share: the manager, and questions to workers, which are bounded.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use mdev_core::ids::VgpuId;
use tokio::sync::Semaphore;

use super::model::{ErrorCode, ErrorDetail, ModifyVgpu, StartVgpu, Stats, Version, Vgpu};
use super::pictures::Pictures;
use super::user;
use crate::callouts::{Action, Callouts, Round, Subject};
use crate::console::screens::Screens;
use crate::console::turns::Turns;
use crate::console::web::access::Access;
use crate::manager::{Change, Handle, Listed, Manager, Result, ask};
use crate::private::WorkerStatus;

/// Rounds of questions to all workers at the same time. A worker takes eight connections, and the manager's own.
const MAX_ROUNDS: usize = 4;

/// Looks for how a worker has ended, 10 ms apart.
const LAST_WORDS: u32 = 20;

/// What every path has.
#[derive(Clone, Debug)]
pub struct Api {
    manager: Handle,
    callouts: Callouts,
    /// Who answers.
    pub about: Arc<Version>,
    /// Screens that are read out,
    pub pictures: Arc<Pictures>,
    /// and those that are made small.
    pub thumbnails: Arc<Pictures>,
    /// Screens that are watched.
    pub screens: Arc<Screens>,
    /// Who is let into the web console, where there is one.
    pub web: Option<Arc<Access>>,
    rounds: Arc<Semaphore>,
}

/// Runs what may wait on a thread that may.
pub async fn waiting<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(body)
        .await
        .map_err(|error| ErrorDetail::new(ErrorCode::Internal, error))
}

impl Api {
    /// Asks this manager, and these scripts before.
    pub fn new(
        manager: Handle,
        callouts: Callouts,
        about: Version,
        web: Option<Arc<Access>>,
    ) -> Self {
        let turns = Arc::<Turns>::default();
        Self {
            screens: Arc::new(Screens::new(manager.clone(), Arc::clone(&turns))),
            pictures: Arc::new(Pictures::new(Arc::clone(&turns))),
            thumbnails: Arc::new(Pictures::new(turns)),
            manager,
            callouts,
            web,
            about: Arc::new(about),
            rounds: Arc::new(Semaphore::new(MAX_ROUNDS)),
        }
    }

    /// What the manager says.
    pub async fn read<T: Send + 'static>(
        &self,
        body: impl FnOnce(&mut Manager) -> T + Send + 'static,
    ) -> Result<T> {
        self.manager.call(body).await
    }

    /// What the manager says, or why it refuses.
    pub async fn ask<T: Send + 'static>(
        &self,
        body: impl FnOnce(&mut Manager) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.manager.call(body).await?
    }

    /// The one vGPU that the manager says, with what its worker knows.
    pub async fn one(
        &self,
        body: impl FnOnce(&mut Manager) -> Result<Listed> + Send + 'static,
    ) -> Result<Json<Vgpu>> {
        let listed = self.ask(body).await?;
        let answer = self.ask_workers(vec![listed.control.clone()]).await.pop().flatten();
        Ok(Json(completed(listed, answer)))
    }

    /// All vGPUs, with what their workers know.
    pub async fn all(&self) -> Result<Json<Vec<Vgpu>>> {
        let listed = self.ask(Manager::list).await?;
        let controls = listed.iter().map(|one| one.control.clone()).collect();
        let answers = self.ask_workers(controls).await;
        let all = listed.into_iter().zip(answers).map(|(one, answer)| completed(one, answer));
        Ok(Json(all.collect()))
    }

    /// What every running vGPU was given and used.
    pub async fn stats(&self) -> Result<Stats> {
        let (measured, parents) = self.read(Manager::stats).await?;
        let controls = measured.iter().map(|one| one.control.clone()).collect();
        let answers = self.ask_workers(controls).await;
        let vgpus = measured.into_iter().zip(answers).map(|(one, answer)| {
            let mut stats = one.stats;
            if let Some(status) = answer {
                stats.traps = status.traps;
                stats.vm_pid = status.client.map(|vm| vm.pid);
            }
            stats
        });
        Ok(Stats { vgpus: vgpus.collect(), parents })
    }

    /// Asks the scripts, where there are any, before something is done to what the manager says. What is returned is to
    /// be told how it went.
    pub async fn asked(
        &self,
        action: Action,
        force: bool,
        subject: impl FnOnce(&mut Manager) -> Result<Subject> + Send + 'static,
    ) -> Result<Option<Round>> {
        if !self.callouts.are_there() {
            return Ok(None);
        }
        let subject = self.ask(subject).await?;
        self.callouts.begin(action, subject, force).await.map(Some)
    }

    /// The same before a definition, a running vGPU or both are changed.
    pub async fn asked_to_modify(
        &self,
        id: VgpuId,
        request: ModifyVgpu,
    ) -> Result<(Option<Round>, Option<Round>)> {
        if !self.callouts.are_there() {
            return Ok((None, None));
        }
        let force = request.force;
        let Change { stored, live } = self.ask(move |m| m.to_modify(id, request)).await?;
        let live = match live {
            Some(live) => Some(self.callouts.begin_live(live, force).await?),
            None => None,
        };
        let Some(stored) = stored else { return Ok((live, None)) };
        match self.callouts.begin(Action::Modify, stored, force).await {
            Ok(round) => Ok((live, Some(round))),
            Err(error) => {
                if let Some(live) = live {
                    live.end_live(false).await;
                }
                Err(error)
            }
        }
    }

    /// Starts a vGPU that is defined.
    pub async fn start(&self, id: VgpuId, request: StartVgpu) -> Result<Json<Vgpu>> {
        let (owner, force) = (request.owner.clone(), request.force);
        let subject = move |manager: &mut Manager| manager.to_start(id, owner.as_deref());
        let round = self.asked(Action::Start, force, subject).await?;
        let start = move |manager: &mut Manager| manager.start(id, request.owner.as_deref());
        let done = match self.ask(start).await {
            Ok(listed) => self.settle(listed).await,
            Err(error) => Err(error),
        };
        told(round, done).await
    }

    /// Starts what starts by itself, one after the other.
    pub async fn start_all(self, ids: Vec<VgpuId>) {
        for id in ids {
            if let Err(error) = self.start(id, StartVgpu::default()).await {
                log::error!("vGPU {id} is not started: {error}");
            }
        }
    }

    /// Refuses to go on where a VM uses a vGPU, or where that cannot be known.
    pub async fn refuse_if_used(&self, id: VgpuId) -> Result<()> {
        let listed = self.ask(move |manager| manager.show(id)).await?;
        if listed.foreign {
            let socket = PathBuf::from(listed.vgpu.socket.unwrap_or_default());
            return match waiting(move || user::is_connected(&socket)).await? {
                Ok(false) => Ok(()),
                Ok(true) => Err(ErrorDetail::new(
                    ErrorCode::InUse,
                    format!(
                        "vGPU {id} is used by a VM, and its worker is of another version of vgpud; shut that VM down first, or use --force"
                    ),
                )),
                Err(error) => Err(not_known(id, &error)),
            };
        }
        let Some(control) = listed.control else { return Ok(()) };
        let _round = self.rounds.acquire().await;
        let error = match waiting(move || ask::status(&control)).await? {
            Ok(WorkerStatus { client: None, .. }) => return Ok(()),
            Ok(WorkerStatus { client: Some(vm), .. }) => {
                let who = waiting(move || user::describe(vm)).await?;
                ErrorDetail::new(
                    ErrorCode::InUse,
                    format!("vGPU {id} is used by {who}; shut that VM down first, or use --force"),
                )
            }
            Err(error) => not_known(id, &error),
        };
        Err(error)
    }

    /// Waits until the worker of a vGPU that was just started answers. One that never does is stopped.
    pub async fn settle(&self, listed: Listed) -> Result<Json<Vgpu>> {
        let Some(control) = listed.control.clone() else { return Ok(Json(listed.vgpu)) };
        let id = listed.vgpu.uuid;
        let error = match waiting(move || ask::status(&control)).await? {
            Ok(status) => return Ok(Json(completed(listed, Some(status)))),
            Err(error) => error,
        };
        // How it ended says more than that it does not answer, and is known a moment later.
        let mut reason = None;
        for _ in 0..LAST_WORDS {
            reason = self.read(move |m| m.show(id)).await?.ok().and_then(|l| l.vgpu.reason);
            if reason.is_some() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if let Ok(stopping) = self.read(move |m| m.stop(id)).await? {
            // It ends with the vGPU gone, whichever way.
            let _ = stopping.await;
        }
        let reason = reason.unwrap_or_else(|| error.to_string());
        let what = format!("vGPU {id} did not start: {reason}; see the log of vgpud");
        Err(ErrorDetail::new(ErrorCode::Unavailable, what))
    }

    /// Asks the workers that there are, all at once. One that does not answer is left out.
    async fn ask_workers(&self, controls: Vec<Option<PathBuf>>) -> Vec<Option<WorkerStatus>> {
        let _round = self.rounds.acquire().await;
        let ask = |control: PathBuf| waiting(move || ask::status(&control));
        let asked: Vec<_> =
            controls.into_iter().map(|control| control.map(|c| tokio::spawn(ask(c)))).collect();
        let mut answers = Vec::with_capacity(asked.len());
        for question in asked {
            answers.push(match question {
                Some(question) => {
                    question.await.ok().and_then(Result::ok).and_then(std::result::Result::ok)
                }
                None => None,
            });
        }
        answers
    }
}

fn not_known(id: VgpuId, error: &std::io::Error) -> ErrorDetail {
    ErrorDetail::new(
        ErrorCode::Unavailable,
        format!("Whether a VM uses vGPU {id} is not known ({error}); --force stops it"),
    )
}

/// Tells the scripts that were asked how it went, and passes that on.
pub async fn told<T>(round: Option<Round>, done: Result<T>) -> Result<T> {
    if let Some(round) = round {
        round.end(done.is_ok()).await;
    }
    done
}

/// Does something to its end, even where whoever asked for it has gone: scripts that were asked are told.
pub async fn to_the_end<T: Send + 'static>(
    body: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    tokio::spawn(body).await.map_err(|error| ErrorDetail::new(ErrorCode::Internal, error))?
}

fn completed(listed: Listed, status: Option<WorkerStatus>) -> Vgpu {
    match (status, listed.control) {
        (Some(status), _) => Vgpu { vm: status.client, warnings: status.warnings, ..listed.vgpu },
        (None, Some(_)) => {
            Vgpu { warnings: vec!["Its worker does not answer".into()], ..listed.vgpu }
        }
        (None, None) => listed.vgpu,
    }
}
