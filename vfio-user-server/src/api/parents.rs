//! Physical GPUs, and who answers for them.

use axum::Json;
use axum::extract::State;

use super::model::{Parent, ParentTypes, Version};
use super::request::Refusal;
use super::service::Api;
use crate::manager::{Manager, Result};

/// Who answers, in which version.
#[utoipa::path(get, path = "/v1/version", responses((status = 200, body = Version, description = "The version")))]
pub async fn version(State(api): State<Api>) -> Json<Version> {
    Json(api.about.as_ref().clone())
}

/// The physical GPUs.
#[utoipa::path(get, path = "/v1/parents", responses(
    (status = 200, body = Vec<Parent>, description = "All of them"),
    Refusal,
))]
pub async fn parents(State(api): State<Api>) -> Result<Json<Vec<Parent>>> {
    Ok(Json(api.read(Manager::parents).await?))
}

/// The types that each physical GPU offers, and how many more of each can be started.
#[utoipa::path(get, path = "/v1/types", responses(
    (status = 200, body = Vec<ParentTypes>, description = "All of them"),
    Refusal,
))]
pub async fn types(State(api): State<Api>) -> Result<Json<Vec<ParentTypes>>> {
    Ok(Json(api.read(|manager| manager.types()).await?))
}
