//! vGPUs: defined, started, changed, stopped, looked at.

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::model::{CreateVgpu, ModifyVgpu, StartVgpu, StopVgpu, Vgpu};
use super::request::{Body, Named, Refusal};
use super::service::Api;
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
    let CreateVgpu { run, define, .. } = request;
    if !run {
        let made = api.one(move |manager| manager.create(request)).await?;
        return Ok((StatusCode::CREATED, made));
    }
    let listed = api.ask(move |manager| manager.create(request)).await?;
    let id = listed.vgpu.uuid;
    match api.settle(listed).await {
        Ok(answer) => Ok((StatusCode::CREATED, answer)),
        Err(error) => {
            // All of it or nothing.
            if define && let Err(error) = api.ask(move |manager| manager.undefine(id)).await {
                log::warn!("vGPU {id} stays defined: {error}");
            }
            Err(error)
        }
    }
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
    api.one(move |manager| manager.modify(id, request)).await
}

/// Removes a definition. A vGPU that is running goes on until it is stopped.
#[utoipa::path(delete, path = "/v1/vgpus/{uuid}", params(("uuid" = String, Path)), responses(
    (status = 204, description = "Done"),
    Refusal,
))]
pub async fn undefine(State(api): State<Api>, Named(id): Named) -> Result<StatusCode> {
    api.ask(move |manager| manager.undefine(id)).await?;
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
    let listed = api.ask(move |manager| manager.start(id, request.owner.as_deref())).await?;
    api.settle(listed).await
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
    if !request.force {
        api.refuse_if_used(id).await?;
    }
    let stopping = api.ask(move |manager| manager.stop(id)).await?;
    // Answered when nothing of it is left; the other end is dropped only where that is so too.
    let _ = stopping.await;
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
