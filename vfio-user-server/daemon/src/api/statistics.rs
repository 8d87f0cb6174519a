//! Handlers for statistics, as JSON and in Prometheus' text format.

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::metrics;
use crate::http::HttpResult;
use crate::service::Service;
use vgpud_api::{ErrorCode, ErrorDetail, Stats};

pub async fn stats(State(service): State<Service>) -> HttpResult<Json<Stats>> {
    Ok(Json(service.stats().await?))
}

pub async fn metrics_text(State(service): State<Service>) -> HttpResult<Response> {
    let text = metrics::text(&service.stats().await?, &service.version)
        .map_err(|error| ErrorDetail::new(ErrorCode::Internal, error))?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}
