//! What vGPUs were given and used, for programs and for Prometheus.

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::metrics;
use super::model::{ErrorCode, ErrorDetail, Stats};
use super::request::Refusal;
use super::service::Api;
use crate::manager::Result;

/// What every running vGPU was given and used.
#[utoipa::path(get, path = "/v1/stats", responses(
    (status = 200, body = Stats, description = "The statistics"),
    Refusal,
))]
pub async fn stats(State(api): State<Api>) -> Result<Json<Stats>> {
    Ok(Json(api.stats().await?))
}

/// The statistics in Prometheus' text format.
#[utoipa::path(get, path = "/metrics", responses(
    (status = 200, content_type = "text/plain", body = String, description = "The metrics"),
    Refusal,
))]
pub async fn metrics_text(State(api): State<Api>) -> Result<Response> {
    let text = metrics::text(&api.stats().await?, &api.about)
        .map_err(|error| ErrorDetail::new(ErrorCode::Internal, error))?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}
