//! Handlers for physical screens.

use axum::Json;
use axum::extract::{Path, State};

use crate::http::{HttpResult, JsonBody, VgpuPath};
use crate::service::Service;
use vgpud_api::{Focused, PhysicalScreen, Rotate};

pub async fn focus(
    State(service): State<Service>,
    VgpuPath(id): VgpuPath,
) -> HttpResult<Json<Focused>> {
    Ok(Json(service.call(move |manager| manager.focus(id)).await?))
}

pub async fn rotate(
    State(service): State<Service>,
    Path(parent): Path<String>,
    JsonBody(Rotate { seconds }): JsonBody<Rotate>,
) -> HttpResult<Json<PhysicalScreen>> {
    Ok(Json(service.call(move |manager| manager.rotate(&parent, seconds)).await?))
}
