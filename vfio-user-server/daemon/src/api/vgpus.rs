//! Handlers for vGPUs.

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::access::Caller;
use crate::http::{HttpResult, JsonBody, VgpuPath};
use crate::service::Service;
use vgpud_api::{CreateVgpu, ModifyVgpu, StartVgpu, StopVgpu, UndefineVgpu, Vgpu};

pub async fn list(State(service): State<Service>) -> HttpResult<Json<Vec<Vgpu>>> {
    Ok(Json(service.vgpus().await?))
}

pub async fn create(
    State(service): State<Service>,
    Caller(caller): Caller,
    JsonBody(request): JsonBody<CreateVgpu>,
) -> HttpResult<(StatusCode, Json<Vgpu>)> {
    Ok((StatusCode::CREATED, Json(service.create(request, caller).await?)))
}

pub async fn show(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
) -> HttpResult<Json<Vgpu>> {
    Ok(Json(service.call_for_vgpu(move |manager| manager.show(id)).await?))
}

pub async fn modify(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
    JsonBody(request): JsonBody<ModifyVgpu>,
) -> HttpResult<Json<Vgpu>> {
    Ok(Json(service.modify(id, request).await?))
}

pub async fn undefine(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
    JsonBody(request): JsonBody<UndefineVgpu>,
) -> HttpResult<StatusCode> {
    service.undefine(id, request).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub async fn start(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
    Caller(caller): Caller,
    JsonBody(request): JsonBody<StartVgpu>,
) -> HttpResult<Json<Vgpu>> {
    Ok(Json(service.start(id, request, caller).await?))
}

pub async fn stop(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
    JsonBody(request): JsonBody<StopVgpu>,
) -> HttpResult<StatusCode> {
    service.stop(id, request).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub async fn screenshot(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
) -> HttpResult<Response> {
    let screen = service.call(move |manager| manager.screen(id)).await?;
    let png = service.screenshots.full_size(id, screen).await?;
    Ok(([(header::CONTENT_TYPE, "image/png")], png).into_response())
}
