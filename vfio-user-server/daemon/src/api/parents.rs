//! Handlers for the version, physical GPUs and vGPU types.

use axum::Json;
use axum::extract::State;

use crate::http::HttpResult;
use crate::manager::Manager;
use crate::service::Service;
use vgpud_api::{Parent, ParentTypes, Version};

pub async fn version(State(service): State<Service>) -> Json<Version> {
    Json(service.version.as_ref().clone())
}

pub async fn parents(State(service): State<Service>) -> HttpResult<Json<Vec<Parent>>> {
    Ok(Json(service.query(Manager::parents).await?))
}

pub async fn types(State(service): State<Service>) -> HttpResult<Json<Vec<ParentTypes>>> {
    Ok(Json(service.query(|manager| manager.types()).await?))
}
