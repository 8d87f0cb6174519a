//! Handlers that save, restore, hand over and upgrade vGPUs.

use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use vgpud_api::{
    Checkpoint, ErrorCode, ErrorDetail, Handover, LogWrites, RestoreFile, RestoredVgpu, SAVED_VGPU,
    SaveVgpu, UpgradedVgpu,
};

use super::file_receiver::PassedFile;
use crate::http::{HttpResult, JsonBody, VgpuPath};
use crate::service::Service;

pub async fn save(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
    JsonBody(request): JsonBody<SaveVgpu>,
) -> HttpResult<Response> {
    let body = service.save(id, request).await?;
    Ok(([(header::CONTENT_TYPE, SAVED_VGPU)], body).into_response())
}

pub async fn restore(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
    body: Body,
) -> HttpResult<Json<RestoredVgpu>> {
    Ok(Json(service.restore(id, body).await?))
}

pub async fn restore_file(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
    Extension(passed): Extension<PassedFile>,
    JsonBody(request): JsonBody<RestoreFile>,
) -> HttpResult<Json<RestoredVgpu>> {
    let file = passed.take().ok_or_else(|| {
        let message = "No file came with the request; pass it as a descriptor (SCM_RIGHTS)";
        ErrorDetail::new(ErrorCode::Invalid, message)
    })?;
    Ok(Json(service.restore_file(id, file, request.index).await?))
}

pub async fn checkpoint(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
) -> HttpResult<Json<Checkpoint>> {
    Ok(Json(service.checkpoint(id).await?))
}

pub async fn log_writes(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
    JsonBody(request): JsonBody<LogWrites>,
) -> HttpResult<StatusCode> {
    service.log_writes(id, request.enabled).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub async fn resume(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
) -> HttpResult<StatusCode> {
    service.resume(id).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub async fn upgrade(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
) -> HttpResult<Json<UpgradedVgpu>> {
    Ok(Json(service.upgrade(id).await?))
}

pub async fn handover(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
    JsonBody(request): JsonBody<Handover>,
) -> HttpResult<Json<RestoredVgpu>> {
    Ok(Json(service.handover(id, request.step).await?))
}
