//! The control API's paths. Each handler asks the manager for what it knows and the workers for the rest.

use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, Path, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use mdev_core::ids::VgpuId;
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;
use utoipa::OpenApi;

use super::model::{
    CreateVgpu, ErrorBody, ErrorCode, ErrorDetail, ModifyScheduler, ModifyVgpu, Parent,
    ParentTypes, Scheduler, SchedulerDecision, Stats, StopVgpu, Version, Vgpu,
};
use super::{metrics, screenshot};
use crate::manager::{Handle, Listed, Manager, Result, ask};
use crate::private::WorkerStatus;

/// Longest request body. A definition is a few hundred bytes.
const MAX_BODY: usize = 64 << 10;

/// Rounds of questions to all workers at the same time. A worker takes eight connections, and the manager's own.
const MAX_ROUNDS: usize = 4;

/// Pictures that are rendered at the same time: each may take tens of megabytes.
const MAX_PICTURES: usize = 2;

#[derive(Clone, Debug)]
struct Api {
    manager: Handle,
    about: Arc<Version>,
    rounds: Arc<Semaphore>,
    pictures: Arc<Semaphore>,
}

/// The description of the API, as docs/openapi.json has it.
#[derive(Debug, OpenApi)]
#[openapi(
    info(
        title = "Tessera control API",
        description = "HTTP/1.1 with JSON on vgpud's UNIX socket, <run-dir>/control.sock.",
    ),
    paths(
        version,
        parents,
        types,
        list,
        create,
        show,
        modify,
        undefine,
        start,
        stop,
        picture,
        stats,
        schedulers,
        scheduler,
        modify_scheduler,
        scheduler_log,
        metrics_text
    )
)]
struct Description;

/// docs/openapi.json.
pub fn openapi() -> String {
    // It is made of strings, lists and maps with string keys: nothing in it can fail to be written.
    let mut text = Description::openapi().to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// The service that answers on the control socket.
pub fn router(manager: Handle, about: Version) -> Router {
    let api = Api {
        manager,
        about: Arc::new(about),
        rounds: Arc::new(Semaphore::new(MAX_ROUNDS)),
        pictures: Arc::new(Semaphore::new(MAX_PICTURES)),
    };
    Router::new()
        .route("/v1/version", get(version))
        .route("/v1/parents", get(parents))
        .route("/v1/types", get(types))
        .route("/v1/vgpus", get(list).post(create))
        .route("/v1/vgpus/{uuid}", get(show).patch(modify).delete(undefine))
        .route("/v1/vgpus/{uuid}/start", post(start))
        .route("/v1/vgpus/{uuid}/stop", post(stop))
        .route("/v1/vgpus/{uuid}/screenshot", get(picture))
        .route("/v1/stats", get(stats))
        .route("/v1/schedulers", get(schedulers))
        .route("/v1/schedulers/{parent}", get(scheduler).patch(modify_scheduler))
        .route("/v1/schedulers/{parent}/log", get(scheduler_log))
        .route("/metrics", get(metrics_text))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(api)
}

impl IntoResponse for ErrorDetail {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.code.status());
        let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(ErrorBody { error: self })).into_response()
    }
}

/// A JSON body. An empty one is all defaults.
struct Body<T>(T);

impl<T: DeserializeOwned + Default, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ErrorDetail;

    async fn from_request(request: Request, state: &S) -> Result<Self> {
        let bytes = Bytes::from_request(request, state).await.map_err(|error| {
            let code = match error.status() {
                StatusCode::PAYLOAD_TOO_LARGE => ErrorCode::TooLarge,
                _ => ErrorCode::Invalid,
            };
            ErrorDetail::new(code, format!("Cannot read the request: {}", error.body_text()))
        })?;
        if bytes.is_empty() {
            return Ok(Self(T::default()));
        }
        let value = serde_json::from_slice(&bytes).map_err(|error| {
            ErrorDetail::new(
                ErrorCode::Invalid,
                format!("The request is not what it should be: {error}"),
            )
        })?;
        Ok(Self(value))
    }
}

fn vgpu_id(text: &str) -> Result<VgpuId> {
    text.parse()
        .map_err(|_| ErrorDetail::new(ErrorCode::Invalid, format!("{text:?} is not a UUID")))
}

async fn no_such_path(request: Request) -> ErrorDetail {
    let path = request.uri().path();
    ErrorDetail::new(
        ErrorCode::NotFound,
        format!("There is no {path:?} in this API; see docs/openapi.json"),
    )
}

async fn no_such_method(request: Request) -> ErrorDetail {
    let what = format!(
        "{} is not for {:?}; see docs/openapi.json",
        request.method(),
        request.uri().path()
    );
    ErrorDetail::new(ErrorCode::MethodNotAllowed, what)
}

/// Runs what may wait on a thread that may.
async fn waiting<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(body)
        .await
        .map_err(|error| ErrorDetail::new(ErrorCode::Internal, error))
}

impl Api {
    /// Asks the workers that there are, all at once. One that does not answer is left out.
    async fn ask_all(&self, controls: Vec<Option<PathBuf>>) -> Vec<Option<WorkerStatus>> {
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

    /// Adds what workers know.
    async fn complete(&self, listed: Vec<Listed>) -> Vec<Vgpu> {
        let controls = listed.iter().map(|one| one.control.clone()).collect();
        let answers = self.ask_all(controls).await;
        listed.into_iter().zip(answers).map(|(one, answer)| completed(one, answer)).collect()
    }

    /// Refuses to go on where a VM uses a vGPU, or where that cannot be known.
    async fn refuse_if_used(&self, id: VgpuId) -> Result<()> {
        let listed = self.manager.call(move |manager| manager.show(id)).await??;
        let Some(control) = listed.control else { return Ok(()) };
        let _round = self.rounds.acquire().await;
        let error = match waiting(move || ask::status(&control)).await? {
            Ok(WorkerStatus { client: None, .. }) => return Ok(()),
            Ok(WorkerStatus { client: Some(vm), .. }) => ErrorDetail::new(
                ErrorCode::InUse,
                format!(
                    "vGPU {id} is used by {}; shut that VM down first, or stop it with force",
                    process_name(vm.pid)
                ),
            ),
            Err(error) => ErrorDetail::new(
                ErrorCode::Unavailable,
                format!("Whether a VM uses vGPU {id} is not known ({error}); stop it with force"),
            ),
        };
        Err(error)
    }

    /// What every running vGPU was given and used.
    async fn stats(&self) -> Result<Stats> {
        let (measured, parents) = self.manager.call(Manager::stats).await?;
        let answers = self.ask_all(measured.iter().map(|one| one.control.clone()).collect()).await;
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

    async fn complete_one(&self, listed: Listed) -> Json<Vgpu> {
        let answer = self.ask_all(vec![listed.control.clone()]).await.pop().flatten();
        Json(completed(listed, answer))
    }
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

/// Waits until the worker of a vGPU that was just started answers. One that never does is stopped.
async fn settle(manager: &Handle, listed: Listed) -> Result<Json<Vgpu>> {
    let Some(control) = listed.control.clone() else { return Ok(Json(listed.vgpu)) };
    let id = listed.vgpu.uuid;
    let error = match waiting(move || ask::status(&control)).await? {
        Ok(status) => return Ok(Json(completed(listed, Some(status)))),
        Err(error) => error,
    };
    let reason = manager.call(move |m| m.show(id)).await?.ok().and_then(|l| l.vgpu.reason);
    if let Ok(stopping) = manager.call(move |m| m.stop(id)).await? {
        // It ends with the vGPU gone, whichever way.
        let _ = stopping.await;
    }
    let reason = reason.unwrap_or_else(|| error.to_string());
    let what = format!("vGPU {id} did not start: {reason}; see the log of vgpud");
    Err(ErrorDetail::new(ErrorCode::Unavailable, what))
}

/// Who answers, in which version.
#[utoipa::path(get, path = "/v1/version", responses((status = 200, body = Version, description = "The version")))]
async fn version(State(api): State<Api>) -> Json<Version> {
    Json(api.about.as_ref().clone())
}

/// The physical GPUs.
#[utoipa::path(get, path = "/v1/parents", responses(
    (status = 200, body = Vec<Parent>, description = "All of them"),
    (status = "5XX", body = ErrorBody, description = "What is wrong with the host"),
))]
async fn parents(State(api): State<Api>) -> Result<Json<Vec<Parent>>> {
    Ok(Json(api.manager.call(|manager| manager.parents()).await?))
}

/// The types that each physical GPU offers, and how many more of each can be started.
#[utoipa::path(get, path = "/v1/types", responses(
    (status = 200, body = Vec<ParentTypes>, description = "All of them"),
    (status = "5XX", body = ErrorBody, description = "What is wrong with the host"),
))]
async fn types(State(api): State<Api>) -> Result<Json<Vec<ParentTypes>>> {
    Ok(Json(api.manager.call(|manager| manager.types()).await?))
}

/// All vGPUs, running or defined or both, by parent and uuid.
#[utoipa::path(get, path = "/v1/vgpus", responses(
    (status = 200, body = Vec<Vgpu>, description = "All of them"),
    (status = "5XX", body = ErrorBody, description = "What is wrong with the host"),
))]
async fn list(State(api): State<Api>) -> Result<Json<Vec<Vgpu>>> {
    let listed = api.manager.call(|manager| manager.list()).await??;
    Ok(Json(api.complete(listed).await))
}

/// Defines a vGPU, starts a transient one, or both. A definition is on disk before the answer, and the socket of one
/// that was started is ready.
#[utoipa::path(post, path = "/v1/vgpus", request_body = CreateVgpu, responses(
    (status = 201, body = Vgpu, description = "The vGPU as it is now"),
    (status = "4XX", body = ErrorBody, description = "What is wrong with the request"),
    (status = "5XX", body = ErrorBody, description = "What is wrong with the host"),
))]
async fn create(
    State(api): State<Api>,
    Body(request): Body<CreateVgpu>,
) -> Result<(StatusCode, Json<Vgpu>)> {
    let CreateVgpu { run, define, .. } = request;
    let listed = api.manager.call(move |manager| manager.create(request)).await??;
    let id = listed.vgpu.uuid;
    if !run {
        return Ok((StatusCode::CREATED, api.complete_one(listed).await));
    }
    match settle(&api.manager, listed).await {
        Ok(answer) => Ok((StatusCode::CREATED, answer)),
        Err(error) => {
            // All of it or nothing.
            if define && let Err(error) = api.manager.call(move |m| m.undefine(id)).await? {
                log::warn!("vGPU {id} stays defined: {error}");
            }
            Err(error)
        }
    }
}

/// One vGPU.
#[utoipa::path(get, path = "/v1/vgpus/{uuid}", params(("uuid" = String, Path)), responses(
    (status = 200, body = Vgpu, description = "The vGPU as it is now"),
    (status = "4XX", body = ErrorBody, description = "What is wrong with the request"),
))]
async fn show(State(api): State<Api>, Path(uuid): Path<String>) -> Result<Json<Vgpu>> {
    let id = vgpu_id(&uuid)?;
    let listed = api.manager.call(move |manager| manager.show(id)).await??;
    Ok(api.complete_one(listed).await)
}

/// Changes a definition, a running vGPU, or both.
#[utoipa::path(
    patch,
    path = "/v1/vgpus/{uuid}",
    params(("uuid" = String, Path)),
    request_body = ModifyVgpu,
    responses(
        (status = 200, body = Vgpu, description = "The vGPU as it is now"),
        (status = "4XX", body = ErrorBody, description = "What is wrong with the request"),
        (status = "5XX", body = ErrorBody, description = "What is wrong with the host"),
    )
)]
async fn modify(
    State(api): State<Api>,
    Path(uuid): Path<String>,
    Body(request): Body<ModifyVgpu>,
) -> Result<Json<Vgpu>> {
    let id = vgpu_id(&uuid)?;
    let listed = api.manager.call(move |manager| manager.modify(id, request)).await??;
    Ok(api.complete_one(listed).await)
}

/// Removes a definition. A vGPU that is running goes on until it is stopped.
#[utoipa::path(delete, path = "/v1/vgpus/{uuid}", params(("uuid" = String, Path)), responses(
    (status = 204, description = "Done"),
    (status = "4XX", body = ErrorBody, description = "What is wrong with the request"),
    (status = "5XX", body = ErrorBody, description = "What is wrong with the host"),
))]
async fn undefine(State(api): State<Api>, Path(uuid): Path<String>) -> Result<StatusCode> {
    let id = vgpu_id(&uuid)?;
    api.manager.call(move |manager| manager.undefine(id)).await??;
    Ok(StatusCode::NO_CONTENT)
}

/// Starts a vGPU that is defined. Its socket is ready when this is answered.
#[utoipa::path(post, path = "/v1/vgpus/{uuid}/start", params(("uuid" = String, Path)), responses(
    (status = 200, body = Vgpu, description = "The vGPU as it is now"),
    (status = "4XX", body = ErrorBody, description = "What is wrong with the request"),
    (status = "5XX", body = ErrorBody, description = "What is wrong with the host"),
))]
async fn start(State(api): State<Api>, Path(uuid): Path<String>) -> Result<Json<Vgpu>> {
    let id = vgpu_id(&uuid)?;
    let listed = api.manager.call(move |manager| manager.start(id)).await??;
    settle(&api.manager, listed).await
}

/// Stops a vGPU. One that a VM uses is stopped only with `force`.
#[utoipa::path(
    post,
    path = "/v1/vgpus/{uuid}/stop",
    params(("uuid" = String, Path)),
    request_body(content = Option<StopVgpu>),
    responses(
        (status = 204, description = "Done"),
        (status = "4XX", body = ErrorBody, description = "What is wrong with the request"),
        (status = "5XX", body = ErrorBody, description = "What is wrong with the host"),
    )
)]
async fn stop(
    State(api): State<Api>,
    Path(uuid): Path<String>,
    Body(request): Body<StopVgpu>,
) -> Result<StatusCode> {
    let id = vgpu_id(&uuid)?;
    if !request.force {
        api.refuse_if_used(id).await?;
    }
    let stopping = api.manager.call(move |manager| manager.stop(id)).await??;
    // Answered when nothing of it is left; the other end is dropped only where that is so too.
    let _ = stopping.await;
    Ok(StatusCode::NO_CONTENT)
}

/// A process as people know it: its name and number.
fn process_name(pid: i32) -> String {
    match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("process {pid} ({})", name.trim_end().escape_default()),
        Err(_) => format!("process {pid}"),
    }
}

/// What is on a vGPU's screen.
#[utoipa::path(
    get,
    path = "/v1/vgpus/{uuid}/screenshot",
    params(("uuid" = String, Path)),
    responses(
        (status = 200, content_type = "image/png", body = Vec<u8>, description = "The picture"),
        (status = "4XX", body = ErrorBody, description = "What is wrong with the request"),
        (status = "5XX", body = ErrorBody, description = "What is wrong with the host"),
    )
)]
async fn picture(State(api): State<Api>, Path(uuid): Path<String>) -> Result<Response> {
    let id = vgpu_id(&uuid)?;
    let (control, has_head) = api.manager.call(move |manager| manager.worker(id)).await??;
    if !has_head {
        let what = format!("vGPU {id} has no display head; types that end in Q have one");
        return Err(ErrorDetail::new(ErrorCode::Conflict, what));
    }
    let permit = api.pictures.acquire_owned().await;
    let png = waiting(move || {
        let _permit = permit;
        screenshot::take(&control)
    });
    Ok(([(header::CONTENT_TYPE, "image/png")], png.await??).into_response())
}

/// What every running vGPU was given and used.
#[utoipa::path(get, path = "/v1/stats", responses(
    (status = 200, body = Stats, description = "The statistics"),
    (status = "5XX", body = ErrorBody, description = "What is wrong with the host"),
))]
async fn stats(State(api): State<Api>) -> Result<Json<Stats>> {
    Ok(Json(api.stats().await?))
}

/// How the time of every physical GPU is divided.
#[utoipa::path(get, path = "/v1/schedulers", responses(
    (status = 200, body = Vec<Scheduler>, description = "All of them"),
    (status = "5XX", body = ErrorBody, description = "What is wrong with the host"),
))]
async fn schedulers(State(api): State<Api>) -> Result<Json<Vec<Scheduler>>> {
    Ok(Json(api.manager.call(|manager| manager.schedulers()).await?))
}

/// How a physical GPU's time is divided.
#[utoipa::path(get, path = "/v1/schedulers/{parent}", params(("parent" = String, Path)), responses(
    (status = 200, body = Scheduler, description = "The scheduler as it is now"),
    (status = "4XX", body = ErrorBody, description = "What is wrong with the request"),
))]
async fn scheduler(State(api): State<Api>, Path(parent): Path<String>) -> Result<Json<Scheduler>> {
    Ok(Json(api.manager.call(move |manager| manager.scheduler(&parent)).await??))
}

/// Changes how a physical GPU's time is divided, at once and for later managers.
#[utoipa::path(
    patch,
    path = "/v1/schedulers/{parent}",
    params(("parent" = String, Path)),
    request_body = ModifyScheduler,
    responses(
        (status = 200, body = Scheduler, description = "The scheduler as it is now"),
        (status = "4XX", body = ErrorBody, description = "What is wrong with the request"),
        (status = "5XX", body = ErrorBody, description = "What is wrong with the host"),
    )
)]
async fn modify_scheduler(
    State(api): State<Api>,
    Path(parent): Path<String>,
    Body(change): Body<ModifyScheduler>,
) -> Result<Json<Scheduler>> {
    let changed = api.manager.call(move |manager| manager.modify_scheduler(&parent, &change));
    Ok(Json(changed.await??))
}

/// The last decisions of a scheduler, oldest first.
#[utoipa::path(
    get,
    path = "/v1/schedulers/{parent}/log",
    params(("parent" = String, Path)),
    responses(
        (status = 200, body = Vec<SchedulerDecision>, description = "All that are kept"),
        (status = "4XX", body = ErrorBody, description = "What is wrong with the request"),
    )
)]
async fn scheduler_log(
    State(api): State<Api>,
    Path(parent): Path<String>,
) -> Result<Json<Vec<SchedulerDecision>>> {
    Ok(Json(api.manager.call(move |manager| manager.scheduler_log(&parent)).await??))
}

/// The statistics in Prometheus' text format.
#[utoipa::path(get, path = "/metrics", responses(
    (status = 200, content_type = "text/plain", body = String, description = "The metrics"),
    (status = "5XX", body = ErrorBody, description = "What is wrong with the host"),
))]
async fn metrics_text(State(api): State<Api>) -> Result<Response> {
    let text = metrics::text(&api.stats().await?, &api.about)
        .map_err(|error| ErrorDetail::new(ErrorCode::Internal, error))?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `UPDATE_GOLDEN=1 cargo test -p vfio-user-server openapi` writes it anew.
    #[test]
    fn openapi_file_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(path, openapi()).unwrap();
        }
        let file = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            file == openapi(),
            "docs/openapi.json is not current: UPDATE_GOLDEN=1 cargo test -p vfio-user-server openapi"
        );
    }
}
