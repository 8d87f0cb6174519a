//! What requests have in common: how they are read, and how they are refused.

use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use mdev_core::ids::VgpuId;
use serde::de::DeserializeOwned;
use utoipa::IntoResponses;

use super::model::{ErrorBody, ErrorCode, ErrorDetail};
use crate::manager::Result;

/// How a request is refused.
#[derive(IntoResponses)]
#[allow(dead_code, reason = "it describes what is answered by ErrorDetail")]
pub enum Refusal {
    /// What is wrong with the request
    #[response(status = "4XX")]
    Request(ErrorBody),
    /// What is wrong with the host
    #[response(status = "5XX")]
    Host(ErrorBody),
}

impl IntoResponse for ErrorDetail {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.code.status());
        let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(ErrorBody { error: self })).into_response()
    }
}

/// A JSON body. An empty one is all defaults.
#[derive(Debug)]
pub struct Body<T>(pub T);

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

/// The vGPU that a path names.
#[derive(Debug)]
pub struct Named(pub VgpuId);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = ErrorDetail;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let invalid = |what: String| ErrorDetail::new(ErrorCode::Invalid, what);
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|error| invalid(error.body_text()))?;
        text.parse().map(Self).map_err(|_| invalid(format!("{text:?} is not a UUID")))
    }
}

/// What no path is.
pub async fn no_such_path(request: Request) -> ErrorDetail {
    let path = request.uri().path();
    ErrorDetail::new(
        ErrorCode::NotFound,
        format!("There is no {path:?} in this API; see docs/openapi.json"),
    )
}

/// A path with a method that it does not have.
pub async fn no_such_method(request: Request) -> ErrorDetail {
    let what = format!(
        "{} is not for {:?}; see docs/openapi.json",
        request.method(),
        request.uri().path()
    );
    ErrorDetail::new(ErrorCode::MethodNotAllowed, what)
}
