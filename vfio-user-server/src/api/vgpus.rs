//! vGPUs: defined, started, changed, stopped, looked at.

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::model::{CreateVgpu, ModifyVgpu, StartVgpu, StopVgpu, UndefineVgpu, Vgpu};
use super::request::{Body, Named, Refusal};
use super::service::{Api, to_the_end, told};
use crate::callouts::{Action, Subject};
use crate::manager::Result;

/// All vGPUs, running or defined or both, by parent and uuid.
#[utoipa::path(get, path = "/v1/vgpus", responses(
    (status = 200, body = Vec<Vgpu>, description = "All of them"),
    Refusal,
))]
pub async fn list(State(api): State<Api>) -> Result<Json<Vec<Vgpu>>> {
    api.all().await
}

/// Defines a vGPU, starts a transient one, or both. A definition is on disk before the answer, and the socket of one
/// that was started is ready.
#[utoipa::path(post, path = "/v1/vgpus", request_body = CreateVgpu, responses(
    (status = 201, body = Vgpu, description = "The vGPU as it is now"),
    Refusal,
))]
pub async fn create(
    State(api): State<Api>,
    Body(request): Body<CreateVgpu>,
) -> Result<(StatusCode, Json<Vgpu>)> {
    to_the_end(make(api, request)).await.map(|made| (StatusCode::CREATED, made))
}

async fn make(api: Api, request: CreateVgpu) -> Result<Json<Vgpu>> {
    let CreateVgpu { run, define, force, .. } = request;
    // Scripts are asked about what will be made, and that is then what is made.
    let (request, subject) = api.ask(move |manager| manager.planned(request)).await?;
    let mut defining = None;
    if define {
        let subject = subject.clone();
        defining = api.asked(Action::Define, force, move |_| Ok(subject)).await?;
    }
    let done = make_planned(&api, request, subject, run).await;
    told(defining, done).await
}

async fn make_planned(
    api: &Api,
    request: CreateVgpu,
    subject: Subject,
    run: bool,
) -> Result<Json<Vgpu>> {
    if !run {
        return api.one(move |manager| manager.create(request)).await;
    }
    let CreateVgpu { define, force, .. } = request;
    let id = subject.id;
    let starting = api.asked(Action::Start, force, move |_| Ok(subject)).await?;
    let done = match api.ask(move |manager| manager.create(request)).await {
        Ok(listed) => {
            let settled = api.settle(listed).await;
            // All of it or nothing.
            if settled.is_err()
                && define
                && let Err(error) = api.ask(move |manager| manager.undefine(id)).await
            {
                log::warn!("vGPU {id} stays defined: {error}");
            }
            settled
        }
        Err(error) => Err(error),
    };
    told(starting, done).await
}

/// One vGPU.
#[utoipa::path(get, path = "/v1/vgpus/{uuid}", params(("uuid" = String, Path)), responses(
    (status = 200, body = Vgpu, description = "The vGPU as it is now"),
    Refusal,
))]
pub async fn show(State(api): State<Api>, Named(id): Named) -> Result<Json<Vgpu>> {
    api.one(move |manager| manager.show(id)).await
}

/// Changes a definition, a running vGPU, or both.
#[utoipa::path(
    patch,
    path = "/v1/vgpus/{uuid}",
    params(("uuid" = String, Path)),
    request_body = ModifyVgpu,
    responses(
        (status = 200, body = Vgpu, description = "The vGPU as it is now"),
        Refusal,
    )
)]
pub async fn modify(
    State(api): State<Api>,
    Named(id): Named,
    Body(request): Body<ModifyVgpu>,
) -> Result<Json<Vgpu>> {
    to_the_end(async move {
        let (live, stored) = api.asked_to_modify(id, request.clone()).await?;
        let done = api.one(move |manager| manager.modify(id, request)).await;
        if let Some(live) = live {
            live.end_live(done.is_ok()).await;
        }
        told(stored, done).await
    })
    .await
}

/// Removes a definition. A vGPU that is running goes on until it is stopped.
#[utoipa::path(
    delete,
    path = "/v1/vgpus/{uuid}",
    params(("uuid" = String, Path)),
    request_body(content = Option<UndefineVgpu>),
    responses((status = 204, description = "Done"), Refusal)
)]
pub async fn undefine(
    State(api): State<Api>,
    Named(id): Named,
    Body(UndefineVgpu { force }): Body<UndefineVgpu>,
) -> Result<StatusCode> {
    to_the_end(async move {
        let round = api.asked(Action::Undefine, force, move |m| m.to_undefine(id)).await?;
        let done = api.ask(move |manager| manager.undefine(id)).await;
        told(round, done).await
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Starts a vGPU that is defined. Its socket is ready when this is answered.
#[utoipa::path(
    post,
    path = "/v1/vgpus/{uuid}/start",
    params(("uuid" = String, Path)),
    request_body(content = Option<StartVgpu>),
    responses((status = 200, body = Vgpu, description = "The vGPU as it is now"), Refusal)
)]
pub async fn start(
    State(api): State<Api>,
    Named(id): Named,
    Body(request): Body<StartVgpu>,
) -> Result<Json<Vgpu>> {
    to_the_end(async move { api.start(id, request).await }).await
}

/// Stops a vGPU. One that a VM uses is stopped only with `force`.
#[utoipa::path(
    post,
    path = "/v1/vgpus/{uuid}/stop",
    params(("uuid" = String, Path)),
    request_body(content = Option<StopVgpu>),
    responses((status = 204, description = "Done"), Refusal)
)]
pub async fn stop(
    State(api): State<Api>,
    Named(id): Named,
    Body(request): Body<StopVgpu>,
) -> Result<StatusCode> {
    to_the_end(async move {
        let StopVgpu { force } = request;
        if !force {
            api.refuse_if_used(id).await?;
        }
        let round = api.asked(Action::Stop, force, move |manager| manager.to_stop(id)).await?;
        // Scripts take their time: a VM may have come meanwhile.
        if round.is_some()
            && !force
            && let Err(error) = api.refuse_if_used(id).await
        {
            return told(round, Err(error)).await;
        }
        let stopping = api.ask(move |manager| manager.stop(id)).await;
        let done = match stopping {
            // Answered when nothing of it is left; the other end is dropped only where that is so too.
            Ok(stopping) => {
                let _ = stopping.await;
                Ok(())
            }
            Err(error) => Err(error),
        };
        told(round, done).await
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What is on a vGPU's screen. More often than its `refresh` it is not read out: a picture then comes that much later.
#[utoipa::path(get, path = "/v1/vgpus/{uuid}/screenshot", params(("uuid" = String, Path)), responses(
    (status = 200, content_type = "image/png", body = Vec<u8>, description = "The picture"),
    Refusal,
))]
pub async fn picture(State(api): State<Api>, Named(id): Named) -> Result<Response> {
    let screen = api.ask(move |manager| manager.screen(id)).await?;
    let png = api.pictures.take(id, screen).await?;
    Ok(([(header::CONTENT_TYPE, "image/png")], png).into_response())
}
